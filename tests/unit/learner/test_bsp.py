"""The bulk-synchronous pace: the residuals of a rank in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.configs.reduce import ReduceConfig
from penstock.configs.sections import LearnerConfig
from penstock.core.notes import notes_to
from penstock.core.params import Arrays
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.sync.bsp import Bsp, note_share
from penstock.profiling.ledger import TimeLedger

VECTOR = {"w": (8,)}


def bsp(codec: str, optimizer: Any, shapes: Mapping[str, tuple[int, ...]] = VECTOR) -> Bsp:
    """The sync of one rank of two, whose group keeps the state of that rank alone."""
    cfg = LearnerConfig(count=2, optimizer=optimizer, reduce=ReduceConfig(codec=codec))
    group: Any = SimpleNamespace(
        world=2,
        rank=0,
        gradients=SoloCollective(0, 2),
        collect_states=lambda own: own,
        restore_own=lambda state: state,
    )
    named = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    flat = FlatOptimizer(named, cfg)
    return Bsp(group, {"model": flat}, cfg, TimeLedger(), TimeLedger(), {}, lambda: None)


def saved(codec: str, optimizer: str) -> Arrays:
    """A state in which all residuals are 1."""
    state = bsp(codec, optimizer).state_dict(saves=True)
    return state | {kind: np.ones_like(a) for kind, a in state.items() if a.dtype == np.float32}


def restored(state: Arrays, codec: str, optimizer: str) -> float:
    """A value of the residual in a sync of this codec that has loaded ``state``."""
    sync = bsp(codec, optimizer)
    sync.load_state_dict(state)
    return float(sync.state_dict(saves=True)["model/error"][0])


@pytest.mark.parametrize(
    ("before", "now", "optimizer", "expected"),
    [
        ("powersgd", "powersgd", "adam", 1.0),
        ("onebit_adam", "powersgd", "adam", 0.0),  # a step of Adam is no gradient
        ("dgc", "dropping", "sgd", 0.0),  # a velocity would get momentum once more
    ],
)
def test_residuals_are_restored_only_for_the_same_codec(
    before: str, now: str, optimizer: str, expected: float
) -> None:
    assert restored(saved(before, optimizer), now, optimizer) == expected


def test_residuals_of_a_checkpoint_that_does_not_name_the_codec_are_restored() -> None:
    state = saved("onebit", "sgd")
    del state["codec"]
    assert restored(state, "onebit", "sgd") == 1.0


TOWERS = {"hidden.weight": (2, 64, 64), "hidden.bias": (2, 64), "value.weight": (1, 64)}
SMALL = {"hidden.weight": (2, 4, 8), "hidden.bias": (2, 8), "value.weight": (1, 8)}


@pytest.mark.parametrize(
    ("codec", "shapes", "least", "most"),
    [
        ("powersgd", TOWERS, 0.0, 0.5),
        ("powersgd", SMALL, 1.0, 1.0),
        ("none", SMALL, 1.0, 1.0),
        ("terngrad", {"w": (5, 5), "bias": (1000,)}, 0.97, 0.99),
        ("terngrad", {"w": (50, 20), "bias": (50,)}, 0.0, 0.5),
    ],
)
def test_uncoded_layers_count_in_the_share_of_bytes_sent(
    codec: str, shapes: dict[str, tuple[int, ...]], least: float, most: float
) -> None:
    assert least <= bsp(codec, "sgd", shapes).sent_share() <= most


@pytest.mark.parametrize(
    ("codec", "share", "percent"),
    [("terngrad", 0.5, None), ("terngrad", 0.98, 98), ("none", 1.0, None)],
)
def test_lossy_codec_that_sends_more_than_half_of_the_bytes_is_noted(
    codec: str, share: float, percent: int | None
) -> None:
    notes: list[str] = []
    with notes_to(notes.append):
        note_share(codec, share)
    said = (
        f"learner.reduce.codec {codec} sends {percent} % of the bytes of fp32 with this network "
        "and its options; set learner.reduce.codec=int8, which sends a quarter, or none"
    )
    assert notes == ([] if percent is None else [said])


@pytest.mark.parametrize(("own", "other"), [(0.25, 0.5), (0.5, 0.25), (np.inf, 0.25)])
def test_smallest_value_of_all_learners_is_found(own: float, other: float) -> None:
    """By the collective that takes the largest."""

    def all_reduce_max(values: torch.Tensor) -> None:
        torch.maximum(values, torch.tensor([-other], dtype=torch.float64), out=values)

    sync = bsp("powersgd", "adam")
    group: Any = sync._group
    group.control = SimpleNamespace(all_reduce_max=all_reduce_max)
    assert sync.all_reduce_min(own) == 0.25

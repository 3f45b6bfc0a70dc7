"""Local SGD by hand: when a round begins, what it averages, and what it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.configs.sections import LearnerConfig
from penstock.learner.sync.gradient_sync import ControlMessage
from penstock.learner.sync.local_sgd import LocalSgd
from penstock.profiling.ledger import TimeLedger

GROWTH = np.array([8.0, 15.0, 1.0, 20.0, 40.0, 2.0])  # steps, trained, episodes; recent ones
OTHERS = np.array([4.0, 10.0, 1.0, 6.0, 7.0, 1.0])


class Other:
    """A second learner: its message, and by how much it adds to each sum of tensors."""

    world = 2

    def __init__(self, samples: float, *adds: list[float]) -> None:
        self.control = SimpleNamespace(all_reduce=self._hear)
        self.gradients = SimpleNamespace(all_reduce=self._add)
        self.heard: list[list[float]] = []
        self._message = torch.from_numpy(ControlMessage(np.array([samples]), OTHERS).pack())
        self._adds = [torch.tensor(add) for add in adds]

    def _hear(self, message: Tensor) -> None:
        message += self._message

    def _add(self, values: Tensor) -> None:
        self.heard.append(values.tolist())
        values += self._adds.pop(0)


def pace_of(other: Other, values: Tensor, moments: dict[str, Tensor]) -> tuple[LocalSgd, Any]:
    optimizer: Any = SimpleNamespace(
        values=values, moments=moments, step=lambda total, env_steps: torch.tensor(1.0)
    )
    group: Any = other
    cfg = LearnerConfig(count=2, pace="local_sgd", local_steps=2)
    return LocalSgd(group, {"model": optimizer}, cfg, TimeLedger()), optimizer


def message(samples: float = 15.0, **flags: bool) -> ControlMessage:
    return ControlMessage(np.array([samples]), GROWTH.copy(), **flags)


def test_a_round_averages_by_the_samples_since_the_last_one() -> None:
    """30 samples of this learner and 10 of the other: weights 3/4 and 1/4. Its values are 5 and 6,
    its moments 8 and 4."""
    other = Other(10.0, [5 / 4, 6 / 4], [8 / 4, 4 / 4])
    values, moment = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    pace, optimizer = pace_of(other, values, {"exp_avg": moment})
    for _ in range(2):
        alone = pace.sync_control(message())
        assert alone.counts.tolist() == [15.0]
        assert not alone.growth.any()
        pace.step(optimizer, 15.0, 0)
    assert pace.rounds == 0
    assert pace.unsent.tolist() == [16.0, 30.0, 2.0]
    together = pace.sync_control(message())
    assert other.heard == [[0.75, 1.5], [0.0, 3.0]]
    assert values.tolist() == [2.0, 3.0]
    assert moment.tolist() == [2.0, 4.0]
    assert together.counts.tolist() == [15.0], "of the batch to come, its own"
    assert together.growth.tolist() == [28.0, 55.0, 4.0, 26.0, 47.0, 3.0]
    assert pace.rounds == 1
    assert not pace.unsent.any()
    after = pace.sync_control(message())
    assert after.growth.tolist() == [0.0, 0.0, 0.0, 26.0, 47.0, 3.0]


@pytest.mark.parametrize("flag", ["stop", "nan", "checkpoint", "regroup", None])
def test_a_flag_or_a_lack_of_samples_begins_a_round(flag: str | None) -> None:
    other = Other(5.0, [5.0])
    pace, optimizer = pace_of(other, torch.tensor([1.0]), {})
    pace.step(optimizer, 15.0, 0)
    summed = pace.sync_control(message(**{flag: True}) if flag else message(0.0))
    assert pace.rounds == 1
    assert other.heard == [[0.75]]
    assert [name for name in ("stop", "nan", "checkpoint", "regroup") if getattr(summed, name)] == (
        [flag] if flag else []
    )


def test_nothing_is_averaged_where_nobody_has_trained() -> None:
    other = Other(0.0)
    values = torch.tensor([1.0])
    pace, _ = pace_of(other, values, {})
    pace.sync_control(message(0.0))
    assert pace.rounds == 1
    assert other.heard == []
    assert values.tolist() == [1.0]


def test_samples_count_for_one_round() -> None:
    other = Other(15.0, [0.0], [0.0])
    pace, optimizer = pace_of(other, torch.tensor([1.0]), {})
    pace.step(optimizer, 15.0, 0)
    pace.sync_control(message(stop=True))
    pace.step(optimizer, 45.0, 0)
    pace.sync_control(message(stop=True))
    assert other.heard == [[0.5], [0.5 * 0.75]]

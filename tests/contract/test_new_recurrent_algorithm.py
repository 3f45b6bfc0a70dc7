"""What adding an algorithm with memory takes that records a column of its own: one registration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep_run import of_kind, train_in_lockstep
from penstock.algos.base import RecordedColumns, UnrollAlgorithm
from penstock.algos.impala import algorithm as impala
from penstock.algos.slots import process
from penstock.algos.unrolled import unrolled
from penstock.configs.algorithms import ALGORITHMS, AlgorithmSpec, OnPolicyConfig
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.configs.value_types import NotNegative
from penstock.core.interfaces import Environments, Step
from penstock.core.observations import Spaces
from penstock.core.params import Array
from penstock.core.specs import Column
from penstock.learner.checkpoints import checkpoint_format
from penstock.models.distributions import distribution
from penstock.models.torch_heads import ActorCritic


class AgedConfig(OnPolicyConfig):
    """An actor-critic on undiscounted sums of rewards."""

    name: Literal["aged"] = "aged"
    value_cost: NotNegative = 0.5


class Ages:
    """Steps since each environment's episode began."""

    def __init__(self, config: Config, env: Environments) -> None:
        self._next = np.zeros(env.count, np.float32)
        self._ages = np.zeros(env.count, np.float32)

    def record(self, step: Step) -> tuple[Array, ...]:
        np.copyto(self._ages, self._next)
        self._next += step.alive
        self._next[step.ended] = 0
        return (self._ages,)

    def state_dict(self) -> Any:
        return self._next.copy()

    def load_state_dict(self, state: Any) -> None:
        self._next[...] = state


def columns_of(config: Config, spaces: Spaces) -> tuple[Column, ...]:
    return (Column("age", "<f4"),)


def loss(
    net: ActorCritic,
    batch: dict[str, Tensor],
    cfg: AgedConfig,
    envs: slice = slice(None),
    add_others: Any = None,
) -> tuple[Tensor, Tensor]:
    assert net.state_size, "the network has memory"
    rows, alive = batch["alive"][:, envs].numel(), batch["alive"][:, envs].flatten()
    outputs, values, _ = unrolled(net, batch, envs)
    policy = distribution(net.actions, outputs[:rows], None)
    logp = policy.logp(batch["action"][:, envs].flatten(0, 1))
    ends = batch["terminated"] | batch["truncated"]
    later = values.detach().view(len(batch["obs"]), -1)[1:] * ~ends[:, envs]
    target = (batch["reward"][:, envs] + cfg.discount * later).flatten()
    error = (target - values[:rows]) * alive
    age = (batch["age"][:, envs].flatten() * alive).sum()
    total = cfg.value_cost * error.square().sum() - (error.detach() * logp).sum()
    return total, torch.stack([total.detach(), age])


AGED = UnrollAlgorithm[AgedConfig](
    ("loss", "age"),
    impala.columns,
    impala.check,
    process,
    loss,
    recorded={"ages": RecordedColumns(columns_of, Ages)},
)


@pytest.fixture
def registered() -> Iterator[None]:
    ALGORITHMS.register(AlgorithmSpec(AgedConfig, f"{__name__}:AGED"))
    yield
    ALGORITHMS.unregister("aged")


@pytest.mark.usefixtures("registered")
def test_new_recurrent_algorithm_trains_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    small = [
        *("algo.name=aged", "model.core=lstm", "transport.kind=inproc", "actors.count=1"),
        *("actors.envs=4", "actors.unroll=8", "learner.updates_per_batch=1", "stop.return=null"),
    ]
    for folder, steps, resume in (("once", 20, "no"), ("twice", 10, "no"), ("twice", 20, "must")):
        config = resolve("CartPole-v1", [*small, f"stop.learner_steps={steps}"])
        heard = train_in_lockstep(tmp_path / folder, config, resume)
        [stop] = of_kind(heard, "stop")
        assert (stop["reason"], stop["error"]) == ("learner_steps", "")
        assert max(metrics.get("age", 0) for metrics in of_kind(heard, "metrics")) > 1
    once, twice = (
        checkpoint_format.load(tmp_path / folder / "checkpoints" / "last").weights
        for folder in ("once", "twice")
    )
    assert np.array_equal(once, twice)

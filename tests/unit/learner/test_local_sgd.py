"""Local SGD by hand: when a learner enters a round, what it averages and counts."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.configs.sections import LearnerConfig
from penstock.learner.group.collective import GroupCollective
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.sync.gradient_sync import ControlMessage
from penstock.learner.sync.local_sgd import LocalSgd
from penstock.profiling.ledger import TimeLedger
from reduce_ring import run_ranks

GROWTH = np.array([8.0, 15.0, 1.0, 20.0, 40.0, 2.0])  # steps, trained, episodes; recent ones
BUSY_S = 60.0
OTHERS = np.array([4.0, 10.0, 1.0, 6.0, 7.0, 1.0])


class Other:
    """A second learner: its message, and by how much it adds to each sum of tensors."""

    world = 2

    def __init__(self, samples: float, *adds: list[float]) -> None:
        self.control = SimpleNamespace(all_reduce=self._hear)
        self.gradients = SimpleNamespace(all_reduce=self._add)
        self.heard: list[list[float]] = []
        counts = np.array([samples, BUSY_S, 1.0])  # it has made its updates in so many seconds
        self._message = torch.from_numpy(ControlMessage(counts, OTHERS).pack())
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
    return LocalSgd(group, {"model": optimizer}, cfg, TimeLedger(), lambda: None), optimizer


def message(samples: float = 15.0, **flags: bool) -> ControlMessage:
    return ControlMessage(np.array([samples]), GROWTH.copy(), **flags)


def test_round_averages_by_samples_since_the_last_round() -> None:
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
def test_a_flag_or_a_lack_of_samples_begins_the_first_round(flag: str | None) -> None:
    other = Other(5.0, [5.0])
    pace, optimizer = pace_of(other, torch.tensor([1.0]), {})
    pace.step(optimizer, 15.0, 0)
    summed = pace.sync_control(message(**{flag: True}) if flag else message(0.0))
    assert pace.rounds == 1
    assert other.heard == [[0.75]]
    assert [name for name in ("stop", "nan", "checkpoint", "regroup") if getattr(summed, name)] == (
        [flag] if flag else []
    )


def test_round_without_any_samples_averages_nothing() -> None:
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


class Learner:
    """A rank of a real group, whose optimizer takes 1 off its only value in each step."""

    def __init__(self, ring: GroupCollective, local_steps: int = 4, wait_s: float = 0.05) -> None:
        cfg = LearnerConfig.model_validate(
            {
                **{"count": 2, "pace": "local_sgd", "local_steps": local_steps},
                **{"optimizer": "sgd", "momentum": 0.0, "lr": 1.0, "grad_clip": None},
                "reduce": {"wait_s": wait_s},
            }
        )
        self.optimizer = FlatOptimizer([("x", nn.Parameter(torch.zeros(1)))], cfg)
        group: Any = SimpleNamespace(world=ring.world, control=ring, gradients=ring)
        self.pace = LocalSgd(group, {"model": self.optimizer}, cfg, TimeLedger(), lambda: None)
        self.turns = 0

    def turn(self, samples: float = 0.0, **flags: bool) -> ControlMessage:
        """A turn with so many samples; a step if there are any."""
        self.turns += 1
        control = self.pace.sync_control(message(samples, **flags))
        if control.counts.any():
            self.optimizer.grads.fill_(samples)
            self.pace.step(self.optimizer, samples, 0)
        return control

    @property
    def value(self) -> float:
        return float(self.optimizer.values[0])

    def last_counts(self) -> list[float]:
        """The last exchange of counts, after the round that has stopped all."""
        last = self.pace.sync_control(ControlMessage(np.zeros(0), GROWTH.copy()))
        counts: list[float] = last.growth.tolist()
        return counts


def test_learner_without_samples_joins_rounds_and_trains_on_later_samples() -> None:
    """The busy one makes 4 steps of 10 samples in each round. In the second round the other gets 10
    samples after it was without: its value is -4 - 1, that of the busy one -4 - 4."""
    has_trained = threading.Event()

    def busy(learner: Learner) -> None:
        for _ in range(4):
            learner.turn(10.0)
            time.sleep(0.25)  # so a round is expected to take a second
        for _ in range(4):  # the first of these enters the first round
            learner.turn(10.0)
        assert has_trained.wait(20.0)
        learner.turn(10.0)

    def starved(learner: Learner) -> None:
        learner.turn()
        assert (learner.pace.rounds, learner.value) == (1, -4.0)
        for _ in range(3):
            learner.turn()
        assert learner.pace.rounds == 1, "it does not wait for the other"
        learner.turn(10.0)
        has_trained.set()
        while learner.pace.rounds == 1:
            learner.turn()
            time.sleep(0.05)

    def work(ring: GroupCollective) -> tuple[float, int]:
        learner = Learner(ring)
        (starved if ring.rank else busy)(learner)
        return learner.value, learner.pace.rounds

    (of_busy, rounds), (of_other, others_rounds) = run_ranks(2, work)
    mean = (40 * -8 + 10 * -5) / 50
    assert (of_busy, of_other) == pytest.approx((mean - 1, mean)), "it went on with a step"
    assert rounds == others_rounds == 2


def test_learners_starved_in_turn_enter_the_same_rounds() -> None:
    """Whoever is without, and for how long, nobody waits for ever."""

    def work(ring: GroupCollective) -> tuple[int, list[float]]:
        learner = Learner(ring, local_steps=3, wait_s=0.01)
        chance = np.random.default_rng(ring.rank)
        stopped = False
        while not stopped:
            samples = 10.0 if chance.random() < 0.5 else 0.0
            if not samples:
                time.sleep(0.01)
            stops = ring.rank == 0 and learner.turns == 60
            stopped = learner.turn(0.0 if stops else samples, stop=stops).stop
        return learner.pace.rounds, learner.last_counts()

    first, *others = run_ranks(3, work)
    assert first[0] > 10
    assert others == [first, first]


def test_group_without_any_samples_keeps_entering_rounds() -> None:
    def work(ring: GroupCollective) -> tuple[int, float]:
        learner = Learner(ring)
        for _ in range(5):
            learner.turn()
        return learner.pace.rounds, learner.value

    assert run_ranks(2, work) == [(5, 0.0)] * 2

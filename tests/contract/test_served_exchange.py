"""Counters, stopping and saving of learners that have a parameter server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.algos.slots import UnrollSummary
from penstock.configs.sections import LearnerConfig, StopConfig
from penstock.learner.extras.parameter_server import served
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.extras.parameter_server.served import Served
from penstock.learner.extras.parameter_server.server import ParameterServer
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.learner.progress import Progress
from penstock.learner.sync.gradient_sync import ControlMessage
from penstock.profiling.ledger import TimeLedger

UNROLL, ENVS = 4, 2
STEPS = UNROLL * ENVS
OPTIMUM = torch.tensor([1.0, -2.0, 3.0])


class Learner:
    """What `learner.role` and a trainer do, without processes: ``updates`` for each batch."""

    def __init__(self, address: str, rank: int, cfg: LearnerConfig, steps: int = 0) -> None:
        self.optimizer = FlatOptimizer([("x", nn.Parameter(torch.zeros(3)))], cfg)
        self.progress = Progress(StopConfig(), 1)
        self.progress.trained_steps = steps
        self.waits = 0
        self.patience = 50
        self.client = ServerClient(
            [address],
            rank,
            self.optimizer,
            cfg,
            version=self.progress.version,
            tally=tuple(self.progress.totals()),
        )
        self.ledger = TimeLedger()
        self.sync = Served(
            self.client, self.optimizer, self.progress, cfg.most_count, self.ledger, self._wait
        )

    def _wait(self) -> bool:
        self.waits += 1
        return self.waits < self.patience

    def turn(self, updates: int = 1, *, has_data: bool = True, **said: bool) -> ControlMessage:
        counts = np.zeros(updates)
        if has_data:
            self._play()
            counts[:] = STEPS / updates
        word = ControlMessage(counts, self.progress.growth(), **said)
        heard = self.sync.sync_control(word)
        self.progress.commit(word.growth, heard.growth)
        if heard.counts.any():
            self.progress.count_lag(self.unrolls, updates)
        for count in heard.counts[heard.counts > 0]:
            self.sync.prepare_backward(self.optimizer, count)
            self.optimizer.grads.copy_((self.optimizer.values - OPTIMUM) * count)
            self.sync.step(self.optimizer, count, self.progress.trained_steps)
            self.progress.count_updates(1)
        return heard

    def _play(self) -> None:
        shape = (UNROLL, ENVS)
        terminated = np.zeros(shape, bool)
        terminated[-1, 0] = True
        arrays = {
            "alive": np.ones(shape, bool),
            "policy_version": np.zeros(shape, np.int64),
            "terminated": terminated,
            "truncated": np.zeros(shape, bool),
            "episode_return": np.full(shape, 7.0, np.float32),
            "episode_length": np.full(shape, 4.0, np.float32),
        }
        self.unrolls = UnrollSummary.of(arrays)
        self.progress.count_unrolls(self.unrolls, STEPS)


Make = Callable[..., Learner]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from makes(tmp_path, staleness=0)


def makes(tmp_path: Path, **chosen: Any) -> Iterator[Make]:
    settings = {"count": 2, "optimizer": "sgd", "momentum": 0.0, "lr": 0.1}
    settings |= {"pace": "ssp", "grad_clip": None}
    cfg = LearnerConfig.model_validate(settings | chosen)
    address = f"ipc://{tmp_path}/s"
    server, stop = ParameterServer(cfg, address), threading.Event()
    made: list[Learner] = []

    def serve() -> None:
        while not stop.is_set():
            server.turn(0.02)

    def one(rank: int, steps: int = 0) -> Learner:
        made.append(Learner(address, rank, cfg, steps))
        return made[-1]

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield one
    for learner in made:
        learner.sync.close()
    stop.set()
    thread.join()
    server.close()


def both(learners: list[Learner], act: Callable[[Learner], object]) -> None:
    with ThreadPoolExecutor(len(learners)) as pool:
        list(pool.map(act, learners))


def test_counters_of_all_learners_agree_at_the_end(make: Make) -> None:
    learners = [make(0), make(1)]
    both(learners, lambda learner: learner.turn(has_data=False))  # both are there
    both(learners, lambda learner: [learner.turn(updates=2) for _ in range(10)])
    both(learners, lambda learner: learner.turn(0, has_data=False))
    for learner in learners:
        learner.turn(0, has_data=False, stop=True)
    for learner in learners:
        learner.turn(0, has_data=False)
        progress = learner.progress
        assert progress.trained_steps == 2 * 10 * STEPS
        assert progress.episodes == 20
        assert progress.learner_steps == progress.version == 40
        assert progress.return_mean == 7.0
    # Of each two updates the second began where the first did, or after it.
    left = float(((learners[0].optimizer.values - OPTIMUM) / OPTIMUM).abs().max())
    assert 0.8**20 * 0.999 < left < 0.81**20 * 1.001


@pytest.mark.parametrize("pull", ["ahead", "cached"])
def test_counters_agree_at_the_end_with_prefetched_and_cached_pulls(
    tmp_path: Path, pull: str
) -> None:
    for make in makes(tmp_path, staleness=2, pull=pull):
        learners = [make(0), make(1)]
        both(learners, lambda learner: learner.turn(has_data=False))
        both(learners, lambda learner: [learner.turn(updates=2) for _ in range(10)])
        both(learners, lambda learner: learner.turn(has_data=False))
        for learner in learners:
            learner.turn(0, has_data=False, stop=True)
        for learner in learners:
            learner.turn(0, has_data=False)
            progress = learner.progress
            assert progress.trained_steps == 2 * 10 * STEPS
            assert progress.episodes == 20
            assert progress.learner_steps == progress.version == 40
            assert learner.ledger.snapshot()["pull"] > 0
        left = float(((learners[0].optimizer.values - OPTIMUM) / OPTIMUM).abs().max())
        assert left < 0.1  # of 1, after 40 steps that take off a tenth of what they know


def test_policy_lag_includes_updates_of_other_learners(make: Make) -> None:
    """The unrolls are by version 0, and each turn makes an update."""
    one, other = make(0), make(1)
    both([one, other], lambda learner: learner.turn(has_data=False))
    for _ in range(3):
        one.turn()
        assert one.client.fetch(10.0) is not None  # so its push has arrived
        other.turn()
    assert one.progress.lag.counts == {0: STEPS, 2: STEPS, 4: STEPS}
    assert other.progress.lag.counts == {1: STEPS, 3: STEPS, 5: STEPS}
    assert other.progress.version == 5  # of the weights here, which lack its own last update
    assert other.progress.learner_steps == 6


def test_turn_with_cached_parameters_sends_no_request(tmp_path: Path) -> None:
    for make in makes(tmp_path, staleness=3, pull="cached"):
        one, other = make(0), make(1)
        both([one, other], lambda learner: learner.turn(has_data=False))
        asked = one.client._shards[0].requests
        before = one.optimizer.values.clone()
        for _ in range(3):  # the clock was 0, or 1 if the other one came first
            one.turn()
        assert one.client._shards[0].requests == asked
        left = 0.9**3 * (before - OPTIMUM)  # of its own three steps, a tenth each
        torch.testing.assert_close(one.optimizer.values, OPTIMUM + left)
        both([one, other], lambda learner: [learner.turn() for _ in range(3)])
        assert one.client._shards[0].requests > asked
        assert not torch.allclose(one.optimizer.values, OPTIMUM + left)


def test_returns_are_known_while_a_batch_makes_several_updates(make: Make) -> None:
    learners = [make(0), make(1)]
    both(learners, lambda learner: learner.turn(has_data=False))
    both(learners, lambda learner: [learner.turn(updates=2) for _ in range(4)])
    for learner in learners:
        assert learner.progress.return_mean == 7.0


def test_learner_without_data_does_not_block_the_other(make: Make) -> None:
    busy, idle = make(0), make(1)
    both([busy, idle], lambda learner: learner.turn(has_data=False))

    def work(learner: Learner) -> None:
        for _ in range(5):
            learner.turn(has_data=learner is busy)

    both([busy, idle], work)
    assert busy.progress.learner_steps == 5
    assert idle.progress.learner_steps in (4, 5)  # the last update may be still to come


def test_stop_and_nan_flags_of_one_learner_reach_the_other(make: Make) -> None:
    one, other = make(0), make(1)
    both([one, other], lambda learner: learner.turn(has_data=False))
    both([one, other], lambda learner: learner.turn(has_data=False, nan=learner is one))
    both([one, other], lambda learner: learner.turn())
    heard = other.turn()
    assert (heard.stop, heard.nan) == (False, True)
    assert one.turn(has_data=False, stop=True).stop
    assert other.turn(has_data=False).stop


def test_learner_ordered_to_end_does_not_wait_for_the_other(make: Make) -> None:
    fast, slow = make(0), make(1)
    both([fast, slow], lambda learner: learner.turn(has_data=False))
    fast.turn()
    fast.patience = 0
    fast.turn(has_data=False)  # would wait for the other
    assert fast.progress.learner_steps == 1


def test_a_learner_that_is_stopped_within_a_batch_sends_no_gradient_that_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast, slow = make(0), make(1)
    both([fast, slow], lambda learner: learner.turn(has_data=False))
    sent: list[int] = []
    push = fast.client.push

    def counted(samples: int, *tally: Any, **said: Any) -> Any:
        sent.append(samples)
        return push(samples, *tally, **said)

    monkeypatch.setattr(fast.client, "push", counted)
    fast.patience = 0
    fast.turn(updates=4)  # the pace gives no parameters for the second update
    assert sent == [STEPS // 4, 0, 0, 0]
    assert fast.waits == 1


def test_a_learner_that_is_stopped_while_its_early_pull_waits_sends_its_last_counts(
    tmp_path: Path,
) -> None:
    for make in makes(tmp_path, staleness=1, pull="ahead"):
        fast, slow = make(0), make(1)
        both([fast, slow], lambda learner: learner.turn(has_data=False))
        fast.patience, turns = 0, 1
        while not fast.turn().stop:  # until the pace holds its pull back
            turns += 1
        assert turns < 5
        slow.turn(has_data=False)
        slow.turn(has_data=False)
        assert slow.progress.trained_steps == turns * STEPS
        assert slow.progress.episodes == turns


@pytest.mark.slow
def test_saved_parameters_are_those_of_the_server(make: Make) -> None:
    one, late = make(0, steps=100), make(1)
    one.turn()
    assert one.client.fetch(10.0) is not None  # so its push has arrived
    late.turn()
    assert late.progress.trained_steps == 100 + STEPS  # the run's, without its own batch so far
    late.turn(has_data=False)  # goes on when its update is made
    one.sync.state_dict(saves=True)
    torch.testing.assert_close(one.optimizer.values, 0.19 * OPTIMUM)
    assert float(one.optimizer.state_dict()["steps"]) == 2


def test_saved_counters_match_the_updates_of_the_server(make: Make) -> None:
    one, other = make(0), make(1)
    both([one, other], lambda learner: learner.turn(has_data=False))
    one.turn()
    other.turn()
    other.turn(has_data=False)  # hears that the update of both is made
    one.sync.state_dict(saves=True)
    steps = float(one.optimizer.state_dict()["steps"])
    assert one.progress.learner_steps == one.progress.version == steps == 2
    assert one.progress.trained_steps == 2 * STEPS
    one.turn(has_data=False)
    assert one.progress.trained_steps == 2 * STEPS


def test_saved_state_at_the_end_is_the_servers_in_float32(
    tmp_path: Path,
) -> None:
    for make in makes(tmp_path, staleness=0, reduce={"codec": "bf16"}):
        one, other = make(0), make(1)
        both([one, other], lambda learner: learner.turn(has_data=False))
        both([one, other], lambda learner: [learner.turn() for _ in range(3)])
        one.turn(has_data=False, stop=True)
        one.sync.state_dict(saves=True)
        other.turn()
        assert other.client.fetch(10.0) is not None  # so its push has arrived
        one.turn(0, has_data=False)  # as `LearnerProcess.finish`
        saved = one.optimizer.values.clone()
        state = one.client.fetch(5.0)
        assert state is not None
        assert torch.equal(saved, torch.from_numpy(state.values))
        assert not torch.equal(saved, saved.bfloat16().float())
        assert one.progress.learner_steps == state.version
        assert one.progress.trained_steps == 7 * STEPS


@pytest.mark.slow
def test_slow_server_state_is_awaited(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make(0), make(1)
    both([one, other], lambda learner: learner.turn())
    both([one, other], lambda learner: learner.turn(has_data=False))
    late: list[float] = []
    fetch = one.client.fetch
    monkeypatch.setattr(
        one.client, "fetch", lambda wait_s: fetch(wait_s) if late else late.append(wait_s)
    )
    waited = one.waits
    assert one.sync.state_dict(saves=True) == {}
    assert one.waits > waited
    assert float(one.optimizer.state_dict()["steps"]) == 2


def test_state_dict_without_an_answer_of_the_server_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "FETCH_S", 0.0)
    monkeypatch.setattr(served, "STOPPING_S", 0.1)
    cfg = LearnerConfig.model_validate({"count": 2, "pace": "ssp"})
    lonely = Learner(f"ipc://{tmp_path}/nobody", 0, cfg)
    assert lonely.sync.state_dict(saves=True) is None
    assert lonely.waits >= lonely.patience
    lonely.sync.close()

"""An algorithm's update gets the data that its `core.interfaces.DataSpec` asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from data_algorithms import BURN_IN, train_dqn_on
from lockstep_run import of_kind, train_in_lockstep
from penstock.algos.dqn.algorithm import columns
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.control import Channel
from penstock.core.interfaces import (
    BatchPlan,
    Dataset,
    StepResult,
    Transitions,
    TransitionSequences,
)
from penstock.core.role import RoleContext
from penstock.core.specs import Column
from penstock.envs import probe
from penstock.launch.lockstep import Lockstep
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.factory import make_trainer
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.role import make_source
from penstock.learner.sources.dataset import DatasetSource
from penstock.learner.sources.replay import ReplayDataSource
from penstock.profiling.ledger import TimeLedger
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting, Replay
from penstock.transport.shm.store import SlotWriter

TARGET = "cartpole_dqn"
SMALL = (
    *("actors.envs=2", "actors.unroll=8", "actors.count=1", "transport.slots=2"),
    *("replay.capacity=512", "replay.min_size=64", "replay.batch_size=16"),
    *("replay.samples_per_insert=4", "model.hidden=[8]", "learner.device=cpu"),
)
LOCKSTEP = (*SMALL, "transport.kind=inproc", "stop.return=null", "stop.learner_steps=40")
SEQUENCES = TransitionSequences(length=6, burn_in=BURN_IN, overlap=3)


@pytest.fixture
def train_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`train_dqn_on`, for one test."""
    return partial(train_dqn_on, monkeypatch=monkeypatch)


def settings(*options: str) -> Config:
    return resolve(TARGET, [*SMALL, *options])


def run_lockstep(folder: Path, options: Sequence[str]) -> list[dict[str, Any]]:
    return train_in_lockstep(folder, resolve(TARGET, list(options)))


def losses(heard: list[dict[str, Any]]) -> list[float]:
    """Of each interval in which there was an update."""
    return [m["q_loss"] for m in of_kind(heard, "metrics") if "q_loss" in m]


@contextmanager
def lockstep(folder: Path, *options: str) -> Iterator[Lockstep]:
    """The lockstep mode before its first turn."""
    config = resolve(TARGET, [*LOCKSTEP, *options])
    ours, theirs = Channel.pair()
    page, descriptor = StatusPage.create()
    ctx = RoleContext("lockstep", 0, 0, 1, folder, folder, Channel(theirs), page, config)
    trainer = make_trainer(config, probe(config.env), ctx.ledger)
    checkpoints = CheckpointManager(folder, trainer, ctx.report, ctx.event)
    made = Lockstep(config, trainer, ctx, checkpoints)
    try:
        yield made
    finally:
        made._lockstep_source.close()
        for end in (ours, ctx.channel, page):
            end.close()
        os.close(descriptor)


# ------------------------------------------------------------------------------- sequences


def with_state(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    return (*columns(observation_space, action_space), Column("state", "<f4", (3,)))


@pytest.mark.parametrize("pad", [True, False])
def test_sequences_are_steps_of_one_episode_with_the_state_before_them(
    train_on: Callable[..., None], pad: bool
) -> None:
    """Environment e plays steps e, e + 2 ...; each seventh step is an episode's last, and the row
    after it a reset."""
    train_on(TransitionSequences(5, burn_in=2, overlap=4, pad=pad), columns=with_state)
    config = settings(
        "replay.prioritized=true", "replay.min_size=16", "replay.samples_per_insert=9"
    )
    trainer = OffPolicyTrainer(config, probe(config.env))
    source = ReplayDataSource(config, trainer, Accounting(), 1, 1, TimeLedger(), shared=False)
    store = source.store
    lane = store.open_lane(2)
    event = store.lane_event(lane)
    writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)
    lengths: set[int] = set()
    for number in range(30):
        source.next(0.0)
        slot = writer.acquire(0.0)
        assert slot is not None
        for column in slot.columns.values():
            column[...] = 0
        step = number * 8 + np.arange(8)[:, None] + np.zeros((1, 2), np.int64)
        slot.columns["reward"][...] = step + 1000 * np.arange(2)
        slot.columns["obs"][:-1, :, 0] = slot.columns["reward"]
        slot.columns["obs"][-1, :, 0] = slot.columns["reward"][-1] + 1
        slot.columns["state"][...] = slot.columns["reward"][..., None] + 0.5
        slot.columns["terminated"][...] = step % 8 == 6
        slot.columns["alive"][...] = step % 8 != 7
        slot.columns["priority"][...] = 1
        slot.columns["policy_version"][...] = number
        slot.header["sequence"], slot.header["steps"] = number, 14
        writer.publish(slot)
        while (batch := source.next(0.0)) is not None:
            data, mask = batch.data, batch.data["mask"]
            first = data["reward"][0]
            steps = np.where(mask, first + np.arange(5)[:, None], 0)
            assert np.array_equal(data["reward"], steps)
            assert np.array_equal(data["obs"][..., 0] * mask, steps)
            assert np.array_equal((data["next_obs"][..., 0] - 1) * mask, steps)
            assert np.array_equal(data["state"], np.repeat(first[:, None] + 0.5, 3, 1))
            assert np.array_equal(data["terminated"], mask & (data["reward"] % 1000 % 8 == 6))
            assert (batch.versions[0] == first % 1000 // 8).all()
            assert mask[0].all()
            assert (first % 1000 % 8 + mask.sum(0) <= 7).all()
            lengths |= set(mask.sum(0).tolist())
            assert trainer.plan_updates(batch).counts.tolist() == [mask[2:].sum()]
            source.release(batch, StepResult(0))
    assert lengths == ({1, 2, 3, 4, 5} if pad else {5})
    assert source.figures()["samples_per_insert"] == pytest.approx(9, rel=0.3)
    source.close()


@pytest.mark.parametrize("prioritized", ["true", "false"])
def test_an_algorithm_on_sequences_trains_in_lockstep(
    train_on: Callable[..., None], tmp_path: Path, prioritized: str
) -> None:
    train_on(SEQUENCES)
    options = [*LOCKSTEP, f"replay.prioritized={prioritized}", "checkpoint.every_steps=20"]
    saved = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        heard = run_lockstep(folder, options)
        assert of_kind(heard, "stop")[0]["reason"] == "learner_steps"
        accounting = of_kind(heard, "final")[0]["accounting"]
        assert accounting["produced"] == accounting["trained"] > 0
        assert max(losses(heard)) > 0
        saved.append(checkpoint_format.load(folder / "checkpoints" / "last"))
    assert np.array_equal(saved[0].weights, saved[1].weights)


# ------------------------------------------------------------------------------ relabelling


def to_goal(
    batch: dict[str, Any],
    future: Callable[[int], Mapping[str, Any]],
    rng: np.random.Generator,
) -> None:
    """Hindsight: where the pole will be within 5 steps is where it was to get."""
    reached = future(5)
    batch["goal"] = reached["next_obs"][:, 2]
    batch["later"] = reached["keys"]
    batch["reward"][:] = -np.abs(batch["next_obs"][:, 2] - batch["goal"])
    batch["drawn"] = rng.random(len(batch["reward"]))


def test_relabel_gets_future_rows_and_its_rewards_reach_the_update(
    train_on: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_on(Transitions(relabel=to_goal))
    seen: list[Any] = []
    step = OffPolicyTrainer.step

    def note(self: OffPolicyTrainer, batch: Any, *plan: Any, **others: Any) -> Any:
        seen.append(batch.data)
        np.testing.assert_array_equal(batch.tensors["reward"], batch.data["reward"])
        return step(self, batch, *plan, **others)

    monkeypatch.setattr(OffPolicyTrainer, "step", note)
    run_lockstep(tmp_path, LOCKSTEP)
    assert len(seen) == 40
    reward = np.concatenate([batch["reward"] for batch in seen])
    assert (reward <= 0).all(), "CartPole gives 1 for each step"
    itself = np.concatenate([batch["later"] == batch["keys"] for batch in seen])
    assert np.array_equal(reward[itself], np.zeros(itself.sum()))
    assert 0.1 < itself.mean() < 0.6, "one in five, and at the ends of episodes more"
    ended = np.concatenate([batch["terminated"] for batch in seen])
    assert itself[ended].all()


# --------------------------------------------------------------------------------- data sets


def record(folder: Path, **options: Any) -> Path:
    """CartPole by chance, as a user's program records it."""
    env = gym.make("CartPole-v1")
    env.action_space.seed(0)
    with Replay.from_env(env, capacity=400, **options) as replay:
        obs, _ = env.reset(seed=0)
        for _ in range(400):
            action = env.action_space.sample()
            after, reward, terminated, truncated, info = env.step(action)
            replay.add(
                obs=obs,
                action=action,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
                next_obs=after,
                info=info,
            )
            obs = env.reset()[0] if terminated or truncated else after
        replay.save(folder)
    env.close()
    return folder


@pytest.fixture(params=["recorded", "of a run"])
def dataset(
    request: pytest.FixtureRequest, tmp_path: Path, train_on: Callable[..., None]
) -> Iterator[Path]:
    if request.param == "recorded":
        yield record(tmp_path / "data", n_step=3)
    else:
        train_on(Transitions())
        run_lockstep(tmp_path / "run", [*LOCKSTEP, "replay.checkpoint=true"])
        yield tmp_path / "run" / "checkpoints" / "last" / "replay" / "0"


@pytest.mark.parametrize("draws", [Transitions(), Transitions(3, relabel=to_goal), SEQUENCES])
@pytest.mark.parametrize("prioritized", ["true", "false"])
def test_a_data_set_is_trained_on_in_lockstep_without_actors(
    dataset: Path,
    train_on: Callable[..., None],
    tmp_path: Path,
    draws: Transitions | TransitionSequences,
    prioritized: str,
) -> None:
    train_on(Dataset(dataset, draws))
    options = [*LOCKSTEP, f"replay.prioritized={prioritized}", "checkpoint.every_steps=20"]
    heard = run_lockstep(tmp_path / "trained", options)
    assert of_kind(heard, "stop")[0]["reason"] == "learner_steps"
    last = of_kind(heard, "metrics")[-1]
    assert (last["learner_steps"], last["env_steps"], last["actors_alive"]) == (40, 0, 0)
    assert max(losses(heard)) > 0
    assert of_kind(heard, "final")[0]["accounting"]["produced"] == 0


def test_a_data_set_gives_its_rows_with_keys_weights_and_versions(
    train_on: Callable[..., None], tmp_path: Path
) -> None:
    folder = record(tmp_path / "data")
    train_on(Dataset(folder))
    config = settings("stop.learner_steps=10", "replay.prioritized=true")
    trainer = OffPolicyTrainer(config, probe(config.env))
    source = DatasetSource(config, trainer, TimeLedger())
    out = [source.next(0.0) for _ in range(20)]
    with Replay.load(folder) as stored:
        known = {row.tobytes() for row in stored.sample(400)["obs"]} | {
            row.tobytes() for _ in range(20) for row in stored.sample(400)["obs"]
        }
    for batch in out:
        assert {row.tobytes() for row in batch.data["obs"]} <= known
        assert batch.keys.shape == batch.weights.shape == batch.versions.shape == (16,)
        assert (batch.versions == 0).all(), "who recorded it had none"
    for batch in out:
        source.release(batch, trainer.step(batch))
    assert not np.array_equal(source.next(0.0).weights, np.ones(16)), "priorities came back"
    assert source.figures() == {"queue_fill": 1.0, "replay_size": 400}
    assert source.in_flight_steps() == 0
    source.close()


def test_a_data_set_that_does_not_fit_is_refused(
    train_on: Callable[..., None], tmp_path: Path
) -> None:
    folder = record(tmp_path / "data")

    def refusal(data: Dataset, *options: str) -> str:
        train_on(data)
        config = settings(*options)
        with pytest.raises(UserError) as error:
            DatasetSource(config, OffPolicyTrainer(config, probe(config.env)), TimeLedger())
        return str(error.value)

    steps = "stop.learner_steps=10"
    assert "stop.learner_steps or stop.minutes" in refusal(Dataset(folder))
    assert "holds no replay.json" in refusal(Dataset(tmp_path / "nowhere"), steps)
    assert "which rows follow each other" in refusal(Dataset(folder, Transitions(3)), steps)
    many = ("replay.batch_size=450", "replay.capacity=1024")
    assert "lower replay.batch_size" in refusal(Dataset(folder), steps, *many)
    other = refusal(Dataset(folder), steps, "env.id=Acrobot-v1")
    assert "column obs is float32[4], and the run's networks need float32[6]" in other


def test_only_lockstep_runs_without_actors(train_on: Callable[..., None], tmp_path: Path) -> None:
    train_on(Dataset(tmp_path))
    config = settings()
    trainer = make_trainer(config, probe(config.env))
    page, _ = StatusPage.create()
    with pytest.raises(UserError, match=r"transport\.kind=inproc"):
        make_source(config, trainer, Accounting(), 1, 1, TimeLedger(), page)
    page.close()


# --------------------------------------------------------------------------------- lockstep


def test_batch_whose_rows_all_have_no_weight_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose padded sequences end before the burn-in does."""
    monkeypatch.setattr(
        OffPolicyTrainer, "plan_updates", lambda self, batch: BatchPlan(np.zeros(1))
    )
    given: list[Any] = []
    draw = ReplayDataSource.next

    def note(self: ReplayDataSource, timeout_s: float) -> Any:
        if (batch := draw(self, timeout_s)) is not None:
            given.append(batch)
        return batch

    released: list[tuple[Any, StepResult]] = []
    monkeypatch.setattr(ReplayDataSource, "next", note)
    monkeypatch.setattr(ReplayDataSource, "release", lambda _, *given: released.append(given))
    with lockstep(tmp_path) as run:
        while len(given) < 3:
            run.turn()
        assert all(batch is old for (batch, _), old in zip(released, given, strict=True))
        assert run._progress.learner_steps == 0

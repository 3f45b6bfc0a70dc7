"""Transitions of games whose seats end apart, from an actor's slots through a replay."""

from __future__ import annotations

import numpy as np
import pytest

from fake_inference import ScriptedInference
from penstock.actors.rollout import Rollout
from penstock.configs.load import resolve
from penstock.core.observations import views
from penstock.envs import make
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.sources.replay import ReplayDataSource
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting
from penstock.transport.shm.store import SlotWriter
from seat_game import LENGTHS

ROWS, UNROLL, SLOTS = 4, 5, 24
SIZES = (f"actors.envs={ROWS}", f"actors.unroll={UNROLL}", "actors.count=1", "transport.slots=1")
REPLAY = (
    "replay.samples_per_insert=null",
    "replay.capacity=1000",
    "replay.min_size=50",
    "replay.batch_size=256",
)


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_transition_ends_with_the_episode_of_its_own_seat(n_step: int) -> None:
    cfg = resolve(
        "seat_game:Pair",
        ["algo.name=dqn", f"algo.n_step={n_step}", "algo.discount=0.5", *SIZES, *REPLAY],
    )
    env = make(cfg.env, ROWS)
    inference = ScriptedInference(lambda obs: np.ones(ROWS, np.int32))
    rollout = Rollout(env, inference, 0, TimeLedger())
    trainer = OffPolicyTrainer(cfg, env.info)
    source = ReplayDataSource(cfg, trainer, Accounting(), 1, 1, TimeLedger(), first=1, shared=False)
    store = source.store
    lane = store.open_lane(1)
    writer = SlotWriter(
        store.arena, store.geometry, lane, store.lane_event(lane), store.filled_event
    )
    steps = 0
    for sequence in range(SLOTS):
        slot = writer.acquire(0.0)
        assert slot is not None
        played = rollout.fill(slot.columns, slot.index)
        steps += played
        header = slot.header
        header["actor"] = header["incarnation"] = header["rows"] = 0
        header["sequence"], header["steps"], header["produced_steps"] = sequence, played, steps
        writer.publish(slot)
        batch = source.next(0.0) or source.next(0.0)
    env.close()
    assert batch is not None
    assert steps == np.count_nonzero(steps_that_play(SLOTS * UNROLL))

    data = batch.data
    before = views(env.info.parts, data["obs"])
    after = views(env.info.parts, data["next_obs"])
    seat = before["seat"].argmax(1)
    age = before["age"][:, 0]
    length = np.array(LENGTHS)[seat]
    summed = np.minimum(n_step, length - age)
    assert set(zip(seat, age, strict=True)) == {
        (seat, age) for seat in (0, 1) for age in range(LENGTHS[seat])
    }
    np.testing.assert_array_equal(after["seat"].argmax(1), seat)
    np.testing.assert_array_equal(after["age"][:, 0], age + summed)
    np.testing.assert_allclose(data["reward"], 2 * (1 - 0.5**summed))
    ends = age + summed == length
    np.testing.assert_allclose(data["discount"], np.where(ends, 0, 0.5**summed))
    source.close()
    store.close()


def steps_that_play(steps: int) -> np.ndarray:
    """Whether each row of each step is a decision, bool ``[steps, ROWS]``."""
    age = np.arange(1, steps + 1)[:, None] % (max(LENGTHS) + 1)
    return (age > 0) & (age <= np.tile(LENGTHS, ROWS // 2))

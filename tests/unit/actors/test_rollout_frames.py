"""Frames that an actor stores once come back from replay as the stacks that it saw."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fake_inference import ScriptedInference
from penstock.actors.rollout import Rollout
from penstock.algos.samples import slot_spec
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.envs import make
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Replay
from penstock.transport.shm.store import SlotWriter

pytest.importorskip("ale_py")

ENVS, UNROLL, SLOTS = 2, 6, 12
OPTIONS = (
    *(f"actors.envs={ENVS}", f"actors.unroll={UNROLL}"),
    *("env.kwargs.max_num_frames_per_episode=36", "env.kwargs.noop_max=0"),
)


def chance() -> ScriptedInference:
    """Acts at random, the same way each time."""
    rng, ones = np.random.default_rng(3), np.ones(ENVS, np.float32)
    return ScriptedInference(lambda _: rng.integers(0, 6, ENVS, np.int32), q_taken=ones, q_max=ones)


def play(config: Config, replay: Replay | None) -> list[dict[str, npt.NDArray[Any]]]:
    """Slots of one actor, into ``replay`` if there is one; their columns."""
    game = make(config.env, ENVS, 1)
    spec = slot_spec(config, game.info)
    rollout = Rollout(game, chance(), 5, TimeLedger())
    played = []
    writer = None
    if replay is not None:
        store = replay.table.store
        lane = store.open_lane(1)
        event = store.lane_event(lane)
        writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)
    for sequence in range(SLOTS):
        slot = writer.acquire(0.0) if writer else None
        columns = slot.columns if slot else spec.views(spec.zeros())
        rollout.fill(columns, sequence)
        if writer and slot:
            slot.header["actor"] = slot.header["incarnation"] = slot.header["rows"] = 0
            slot.header["sequence"] = sequence
            writer.publish(slot)
            assert replay is not None
            replay.stats()  # takes it in
        played.append({name: column.copy() for name, column in columns.items()})
    game.close()
    return played


def test_stacks_come_back_from_frames() -> None:
    whole = play(resolve("pong_apex", [*OPTIONS, "transport.frame_stack=null"]), None)
    config = resolve("pong_apex", list(OPTIONS))
    game = make(config.env, ENVS, 1)
    spec = slot_spec(config, game.info)
    game.close()
    replay = Replay(spec, ENVS * UNROLL * SLOTS, frame_stack=4, n_step=1, seed=0, writers=2)
    frames = play(config, replay)
    for known, stored in zip(whole, frames, strict=True):
        np.testing.assert_array_equal(stored["obs"], known["obs"][:, :, -1])
        np.testing.assert_array_equal(stored["alive"], known["alive"])
    ended = sum(int((slot["terminated"] | slot["truncated"]).sum()) for slot in whole)
    assert ended >= 8
    assert len(replay) == sum(int(slot["alive"].sum()) for slot in whole)
    batch = replay.sample(len(replay))
    rows = batch["keys"] & 0xFFFFFFFF
    for i, row in enumerate(rows):
        slot, rest = divmod(int(row), ENVS * UNROLL)
        t, env = divmod(rest, ENVS)
        known = whole[slot]
        np.testing.assert_array_equal(batch.obs[i], known["obs"][t, env])
        np.testing.assert_array_equal(batch.next_obs[i], known["obs"][t + 1, env])
    assert len(set(rows)) > 30
    replay.close()

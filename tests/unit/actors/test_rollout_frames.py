"""Frames that an actor stores once are restored by replay as the stacks that the actor saw."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fake_inference import ScriptedInference
from penstock.actors.rollout import Rollout
from penstock.algos.samples import slot_spec
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.interfaces import LearnerGoneError
from penstock.envs import make
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Replay
from penstock.transport.shm.store import SlotWriter

pytest.importorskip("ale_py")

ENVS, UNROLL = 2, 6
OPTIONS = (
    *(f"actors.envs={ENVS}", f"actors.unroll={UNROLL}"),
    *("env.kwargs.max_num_frames_per_episode=36", "env.kwargs.noop_max=0"),
)


LIVES = (
    *(f"actors.envs={ENVS}", f"actors.unroll={UNROLL}"),
    *("env.id=ALE/Breakout-v5", "env.kwargs.episodic_life=true", "env.kwargs.noop_max=0"),
)


def chance() -> ScriptedInference:
    """Acts at random, the same way each time."""
    rng, ones = np.random.default_rng(3), np.ones(ENVS, np.float32)
    return ScriptedInference(lambda _: rng.integers(0, 4, ENVS, np.int32), q_taken=ones, q_max=ones)


def play(config: Config, replay: Replay | None, slots: int) -> list[dict[str, npt.NDArray[Any]]]:
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
    for sequence in range(slots):
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


@pytest.mark.parametrize(
    ("options", "slots", "ends"),
    [(OPTIONS, 12, 8), pytest.param(LIVES, 24, 6, marks=pytest.mark.slow)],
)
def test_stacks_are_restored_from_single_frames(
    options: tuple[str, ...], slots: int, ends: int
) -> None:
    whole = play(resolve("pong_apex", [*options, "transport.frame_stack=null"]), None, slots)
    config = resolve("pong_apex", list(options))
    game = make(config.env, ENVS, 1)
    spec = slot_spec(config, game.info)
    game.close()
    replay = Replay(spec, ENVS * UNROLL * slots, frame_stack=4, n_step=1, seed=0, writers=2)
    frames = play(config, replay, slots)
    for known, stored in zip(whole, frames, strict=True):
        np.testing.assert_array_equal(stored["obs"], known["obs"][:, :, -1])
        np.testing.assert_array_equal(stored["alive"], known["alive"])
    ended = sum(int((slot["terminated"] | slot["truncated"]).sum()) for slot in whole)
    assert ended >= ends
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


def test_abandoned_first_unroll_is_continued_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = resolve("pong_apex", list(OPTIONS))
    (whole,) = play(config, None, 1)
    game = make(config.env, ENVS, 1)
    spec = slot_spec(config, game.info)
    monkeypatch.setattr("penstock.actors.rollout.BEAT_NS", 0)
    calls: list[int] = []

    def beat() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise LearnerGoneError("the learner ended")

    rollout = Rollout(game, chance(), 5, TimeLedger())
    with pytest.raises(LearnerGoneError):
        rollout.fill(spec.views(spec.zeros()), 0, beat)
    columns = spec.views(spec.zeros())
    rollout.fill(columns, 1, beat)  # its first stacks are of different frames
    game.close()
    for name in ("obs", "alive", "pad"):
        np.testing.assert_array_equal(columns[name][: UNROLL - 3], whole[name][3:UNROLL], name)


@pytest.mark.slow
def test_returns_and_lengths_are_those_of_games_where_lives_are_episodes() -> None:
    slots = play(resolve("pong_apex", [*LIVES, "transport.frame_stack=null"]), None, 60)
    names = ("reward", "terminated", "alive", "episode_return", "episode_length")
    rows = {name: np.concatenate([slot[name] for slot in slots]) for name in names}
    games = 0
    for env in range(ENVS):
        total, length, lives = 0.0, 0, 5
        for reward, ended, alive, of_game, steps in zip(
            *(rows[n][:, env] for n in names), strict=True
        ):
            total, length, lives = total + reward, length + alive, lives - ended
            assert of_game == total
            assert steps == (0 if ended and lives else length)
            if not lives:
                total, length, lives, games = 0.0, 0, 5, games + 1
    assert games >= 2


def test_frame_stack_refuses_an_environment_that_marks_playing_rows() -> None:
    config = resolve("pong_apex", list(OPTIONS))
    env = make(config.env, ENVS, 1)
    spec = slot_spec(config, env.info)
    env.playing = np.ones(ENVS, np.bool_)
    rollout = Rollout(env, chance(), 5, TimeLedger())
    with pytest.raises(UserError, match=r"whole$"):
        rollout.fill(spec.views(spec.zeros()), 0)
    env.close()

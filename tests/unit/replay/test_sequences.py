"""Every value of drawn sequences, against lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.samplers import Prioritized, Sampler, Uniform
from penstock.replay.sequences import Sequences


@dataclass
class Game:
    """Environments whose observations are all different, and the list of what they did."""

    rng: np.random.Generator
    envs: int
    shape: tuple[int, ...] = ()
    stack: int = 0
    ends: float = 0.15

    def __post_init__(self) -> None:
        self.count = 0
        self.where: dict[bytes, tuple[int, int]] = {}
        self.log: list[list[dict[str, Any]]] = [[] for _ in range(self.envs)]
        self.frames = [[self._frame()] for _ in range(self.envs)]

    def _frame(self) -> Any:
        self.count += 1
        return np.full(self.shape, self.count, np.float32)

    def _seen(self, env: int, at: int) -> Any:
        """The observation after ``at`` steps of the episode."""
        frames = self.frames[env]
        if not self.stack:
            return frames[at]
        return np.stack([frames[max(0, at - i)] for i in reversed(range(self.stack))])

    def step(self) -> dict[str, Any]:
        rows = []
        for env in range(self.envs):
            at = len(self.frames[env]) - 1
            self.frames[env].append(self._frame())
            terminated, truncated = (bool(self.rng.random() < self.ends / 2) for _ in range(2))
            row = {
                "obs": self._seen(env, at),
                "next_obs": self._seen(env, at + 1),
                "action": self.count * 3,
                "reward": float(self.count % 97),
                "state": {"h": np.array([self.count, -self.count], np.float32)},
                "terminated": terminated,
                "truncated": truncated and not terminated,
                "at": at,
            }
            rows.append(row)
            self.where[row["obs"].tobytes()] = env, len(self.log[env])
            self.log[env].append(row)
            if terminated or truncated:
                self.frames[env] = [self._frame()]
        return {
            "obs": np.stack([r["obs"] for r in rows]),
            "next_obs": np.stack([r["next_obs"] for r in rows]),
            "action": np.array([r["action"] for r in rows]),
            "reward": np.array([r["reward"] for r in rows], np.float32),
            "terminated": np.array([r["terminated"] for r in rows]),
            "truncated": np.array([r["truncated"] for r in rows]),
            "state": {"h": np.stack([r["state"]["h"] for r in rows])},
        }

    def find(self, obs: Any) -> tuple[int, int]:
        """Environment and step of an observation."""
        return self.where[obs.tobytes()]


def columns(game: Game) -> dict[str, Any]:
    shape = (game.stack, *game.shape) if game.stack else game.shape
    return {
        "obs": (np.float32, shape),
        "action": (np.int64, ()),
        "state": {"h": (np.float32, (2,))},
    }


def assert_sequence(batch: Any, b: int, game: Game, sequences: Sequences) -> tuple[int, int]:
    """Everything of sequence ``b`` is what the game logged; gives where it starts."""
    env, t = game.find(batch.obs[0, b])
    rows = [game.log[env][t]]
    while len(rows) < sequences.length and not (rows[-1]["terminated"] or rows[-1]["truncated"]):
        rows.append(game.log[env][t + len(rows)])
    count = len(rows)
    assert sequences.pad or count == sequences.length
    assert rows[0]["at"] % sequences.stride == 0
    assert batch.mask[:, b].tolist() == [True] * count + [False] * (sequences.length - count)
    np.testing.assert_array_equal(batch.state["h"][b], rows[0]["state"]["h"])
    discount = [0.0 if r["terminated"] else np.float32(0.9) for r in rows]
    np.testing.assert_array_equal(batch.discount[:count, b], discount)
    for name in ("obs", "next_obs", "action", "reward", "terminated", "truncated"):
        np.testing.assert_array_equal(batch[name][:count, b], [r[name] for r in rows], name)
    for name in ("action", "reward", "terminated", "truncated", "discount"):
        assert not batch[name][count:, b].any()
    assert not batch.obs[count + 1 :, b].any()
    return env, t


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_values_and_starts_match_the_list_reference(seed: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 9))
    sequences = Sequences(
        length, data.draw(st.integers(0, length - 1)), 0, pad=data.draw(st.booleans())
    )
    rng = np.random.default_rng(seed)
    shape = data.draw(st.sampled_from([(3,), (20,), (80,)]))  # in the record, beside, as frames
    game = Game(rng, data.draw(st.integers(1, 3)), shape)
    replay = Replay(
        columns(game),
        60 * game.envs,
        envs=game.envs,
        unroll=data.draw(st.integers(1, 13)),
        discount=0.9,
        sequences=sequences,
        sampler=data.draw(st.sampled_from([Uniform, Prioritized]))(),
        seed=0,
    )
    for _ in range(data.draw(st.integers(1, 160))):
        replay.add(**game.step())
    first_kept = len(game.log[0]) - len(replay) // game.envs
    expected = {
        (env, t)
        for env, log in enumerate(game.log)
        for t in range(first_kept, len(log))
        if is_start(log, t, sequences)
    }
    if not expected:
        with pytest.raises(ReplayError, match="no stored one is complete"):
            replay.sample(1)
        return
    found = set()
    for _ in range(20):
        batch = replay.sample(20)
        found |= {assert_sequence(batch, b, game, sequences) for b in range(20)}
    assert found <= expected
    assert len(expected) > 40 or found == expected
    replay.close()


def is_start(log: list[dict[str, Any]], t: int, sequences: Sequences) -> bool:
    rest = log[t : t + sequences.length]
    ends = [i for i, r in enumerate(rest) if r["terminated"] or r["truncated"]]
    whole = len(rest) == sequences.length and (not ends or ends[0] == sequences.length - 1)
    complete = whole or (sequences.pad and bool(ends))
    return complete and log[t]["at"] % sequences.stride == 0


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("unroll", [3, 16])
def test_frame_stacks_of_sequences_match_plain_stacks(pad: bool, unroll: int) -> None:
    sequences = Sequences(5, 2, 1, pad)
    game = Game(np.random.default_rng(1), 2, (9, 9), stack=4)
    replay = Replay(
        columns(game),
        100,
        envs=2,
        frame_stack=4,
        unroll=unroll,
        discount=0.9,
        sequences=sequences,
        seed=0,
    )
    for _ in range(130):
        replay.add(**game.step())
    batch = replay.sample(50)
    assert batch.burn_in == 1
    assert batch.obs.shape == (5, 50, 4, 9, 9)
    for b in range(50):
        assert_sequence(batch, b, game, sequences)
    state = replay.sampler.state_dict()
    stacked = replay.sample(50)
    replay.sampler.load_state_dict(state)
    frames = replay.sample(50, stacked=False)
    assert frames.frames.shape == (9, 50, 9, 9)
    for t in range(5):
        shown = np.moveaxis(frames.frames[t : t + 4], 0, 1)
        live = stacked.mask[t]
        np.testing.assert_array_equal(shown[live], stacked.obs[t][live])
        following = np.moveaxis(frames.frames[t + 1 : t + 5], 0, 1)
        np.testing.assert_array_equal(following[live], stacked.next_obs[t][live])


def filled(sampler: Sampler, sequences: Sequences, steps: int = 400) -> tuple[Replay, Game]:
    game = Game(np.random.default_rng(2), 1, (3,), ends=0.0)
    replay = Replay(columns(game), 1000, sampler=sampler, sequences=sequences, seed=3)
    for _ in range(steps):
        replay.add(**game.step())
    return replay, game


def test_uniform_sequences_draw_all_starts_evenly() -> None:
    replay, _ = filled(Uniform(), Sequences(10, 0))
    counts = np.zeros(40)
    for _ in range(40):
        obs = replay.sample(100).obs[0, :, 0]
        np.add.at(counts, ((obs - 1) / 10).astype(int), 1)
    chi2 = ((counts - 100) ** 2 / 100).sum()
    assert chi2 < 80  # 39 degrees of freedom: p = 1e-4


def test_priorities_apply_to_sequences() -> None:
    replay, _ = filled(Prioritized(alpha=1.0, beta=1.0, epsilon=1e-9), Sequences(10, 0))
    every: dict[int, float] = {}
    while len(every) < 40:
        batch = replay.sample(100)
        every.update(zip(batch.keys.tolist(), batch.obs[0, :, 0].tolist(), strict=True))
    keys = np.array(list(every))
    start = np.array(list(every.values()))
    assert replay.update_priorities(keys, start) == 40
    batch = replay.sample(1000)
    drawn = np.array([(batch.obs[0, :, 0] == s).mean() for s in start])
    np.testing.assert_allclose(drawn, start / start.sum(), atol=2e-3)  # stratified draws
    priorities = batch.obs[0, :, 0]
    np.testing.assert_allclose(batch.weights, priorities.min() / priorities, rtol=1e-5)


def test_keys_of_evicted_sequences_are_ignored() -> None:
    replay, game = filled(Prioritized(), Sequences(10, 5), steps=200)
    keys = replay.sample(50).keys
    for _ in range(2000):
        replay.add(**game.step())
    assert replay.update_priorities(keys, np.ones(50)) == 0
    assert replay.stats()["stale_updates"] == 50


def test_last_steps_of_an_unfinished_episode_are_not_drawn_yet() -> None:
    game = Game(np.random.default_rng(2), 1, (3,), ends=0.0)
    replay = Replay(columns(game), 100, sequences=Sequences(10, pad=True))
    for _ in range(9):
        replay.add(**game.step())
    with pytest.raises(ReplayError, match="add at least 10 steps of one episode first"):
        replay.sample(1)
    replay.add(**game.step())
    assert replay.sample(1).mask.all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 0}, "sequences of length 0 hold nothing; give at least 1"),
        ({"length": 5, "overlap": 5}, "overlap 5 must be between 0 and length - 1 = 4"),
        ({"length": 5, "burn_in": 5}, "burn_in 5 must be between 0 and length - 1 = 4"),
        ({"length": 5, "overlap": -1}, "overlap -1 must be between 0 and length - 1 = 4"),
    ],
)
def test_invalid_sequence_settings_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ReplayError, match=words):
        Sequences(**arguments)


def test_options_incompatible_with_sequences_are_refused() -> None:
    declared = {"obs": (np.float32, (3,)), "action": (np.int64, ())}
    with pytest.raises(ReplayError, match="n_step 3 does not go with sequences"):
        Replay(declared, 100, n_step=3, sequences=Sequences(5))
    replay = Replay(declared, 100, sequences=Sequences(5))
    step: dict[str, Any] = {"action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    obs = np.zeros(3, np.float32)
    with pytest.raises(ReplayError, match="priorities come with single steps"):
        replay.add(obs=obs, next_obs=obs, priority=1.0, **step)
    assert len(replay) == 0


@pytest.mark.parametrize("pad", [False, True])
def test_sequence_is_dropped_when_its_preceding_slot_is_evicted(pad: bool) -> None:
    """The second slot of the stream is of an older policy than the first."""
    declared = {"obs": (np.float32, (1,)), "action": (np.int64, ())}
    drawn = Sequences(6, overlap=5, pad=pad)
    replay = Replay(declared, 100, unroll=8, sequences=drawn, max_policy_lag=5, seed=0)
    for i in range(24):
        replay.version = 0 if 8 <= i < 16 else 100
        obs = np.full(1, i, np.float32)
        replay.add(obs=obs, next_obs=obs + 1, action=i, reward=0, terminated=False, truncated=False)
    assert replay.stats()["evicted"] == {"lag": 8}
    actions = replay.sample(100).action
    assert set(actions[0]) == {0, 1, 2, 16, 17, 18}
    assert (np.diff(actions, axis=0) == 1).all()

"""Future rows of an episode, and rows loaded from snapshots, against lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.replay import Prioritized, Replay, ReplayError, Sequences

COLUMNS = {"obs": (np.float32, (2,)), "action": (np.int64, ())}
SMALL: dict[str, Any] = {"capacity": 200, "envs": 2, "unroll": 4}


def play(replay: Replay, steps: int, ends: int) -> None:
    """Observations count the steps of each of two environments, whose episodes have ``ends``."""
    for step in range(steps):
        obs = np.array([[step, 0], [step, 1]], np.float32)
        over = np.full(2, step % ends == ends - 1)
        replay.add(
            obs=obs,
            action=np.zeros(2, np.int64),
            reward=np.full(2, step),
            terminated=over,
            truncated=np.zeros(2, bool),
            next_obs=obs + np.array([1, 0], np.float32),
        )


@pytest.mark.parametrize("n_step", [1, 3])
def test_future_rows_are_drawn_evenly_from_the_rest_of_the_episode(n_step: int) -> None:
    rng = np.random.default_rng(0)
    with Replay(COLUMNS, **SMALL, n_step=n_step, seed=0) as replay:
        play(replay, steps=34, ends=10)  # four of the last episode
        counts = np.zeros((34, 10))
        for _ in range(400):
            batch = replay.sample(64)
            later = replay.future(batch.keys, 6, rng)
            assert np.array_equal(later.obs[:, 1], batch.obs[:, 1])
            now, then = batch.obs[:, 0].astype(int), later.obs[:, 0].astype(int)
            np.add.at(counts, (now, then - now), 1)
        for step in range(34):
            choices = min(6, 10 - step % 10, 34 - step)
            assert (counts[step, choices:] == 0).all()
            share = counts[step, :choices] / counts[step].sum()
            assert share == pytest.approx(np.full(choices, 1 / choices), abs=0.1)


def test_future_rows_of_a_long_episode_are_drawn_up_to_the_horizon() -> None:
    rng = np.random.default_rng(0)
    with Replay(COLUMNS, 4000, envs=2, unroll=4, seed=0) as replay:
        play(replay, steps=1500, ends=700)
        distances = []
        for _ in range(200):
            batch = replay.sample(64)
            later = replay.future(batch.keys, 300, rng)
            now, then = batch.obs[:, 0].astype(int), later.obs[:, 0].astype(int)
            assert np.array_equal(now // 700, then // 700)
            assert np.array_equal(later.obs[:, 1], batch.obs[:, 1])
            distances.append((then - now)[(now % 700 < 400) & (now < 1200)])
        far = np.concatenate(distances)
        assert (far.min(), far.max()) == (0, 299)
        shares = np.histogram(far, np.arange(0, 301, 30))[0] / len(far)
        assert shares == pytest.approx(np.full(10, 0.1), abs=0.02)


def test_future_rows_of_evicted_rows_are_refused() -> None:
    rng = np.random.default_rng(0)
    with Replay(COLUMNS, **SMALL, seed=0) as replay:
        play(replay, 30, 10)
        keys = replay.sample(8).keys
        play(replay, 300, 10)
        with pytest.raises(ReplayError, match="8 of 8 rows were overwritten"):
            replay.future(keys, 4, rng)
        with pytest.raises(ReplayError, match="horizon 0"):
            replay.future(replay.sample(8).keys, 0, rng)
    with (
        Replay(COLUMNS, **SMALL, sequences=Sequences(3)) as replay,
        pytest.raises(ReplayError, match="sequence"),
    ):
        replay.future([0], 4, rng)


def test_snapshot_rows_can_be_drawn_with_other_settings(tmp_path: Path) -> None:
    with Replay(COLUMNS, **SMALL, n_step=2) as saved:
        play(saved, 150, 10)  # the oldest have left
        saved.save(tmp_path / "data")
        stored = set()
        for _ in range(60):
            stored |= {(step, env) for step, env in saved.sample(200)["obs"].tolist()}
    with Replay.load_rows(tmp_path / "data", sampler=Prioritized(), n_step=3, seed=1) as replay:
        drawn = set()
        for _ in range(60):
            batch = replay.sample(200)
            drawn |= {(step, env) for step, env in batch.obs.tolist()}
            inside = batch.obs[:, 0] % 10 < 7
            ahead = batch.next_obs[:, 0] - batch.obs[:, 0]
            assert (ahead[inside & (batch.obs[:, 0] < 147)] == 3).all()
        assert drawn == stored
        assert replay.update_priorities(batch.keys, np.ones(200)) == 200
        with pytest.raises(ReplayError, match="new"):
            replay.restore(tmp_path / "data")
    parts = Sequences(4, overlap=2)
    with Replay.load_rows(tmp_path / "data", sequences=parts, sampler=Prioritized()) as replay:
        steps = replay.sample(64)["obs"][..., 0]
        assert (np.diff(steps, axis=0) == 1).all()
        assert (steps[0] % 10 <= 6).all()
    with pytest.raises(ReplayError, match=r"replay\.json"):
        Replay.load_rows(tmp_path / "nowhere")
    with Replay(COLUMNS, **SMALL) as saved:
        play(saved, 20, 10)
        saved.save(tmp_path / "plain")
    with pytest.raises(ReplayError, match="which rows follow each other"):
        Replay.load_rows(tmp_path / "plain", n_step=2)
    with Replay.load_rows(tmp_path / "plain") as replay:
        assert len(replay) == 40


def test_frame_stacks_of_a_snapshot_equal_those_added(tmp_path: Path) -> None:
    columns = {"obs": (np.uint8, (3, 8, 8)), "action": (np.int64, ())}
    with Replay(columns, 60, frame_stack=3, unroll=5) as saved:
        for step in range(60):
            first = step - step % 10
            seen = [np.full((8, 8), max(first, step + i)) for i in range(-2, 2)]
            frames = np.stack(seen).astype(np.uint8)
            saved.add(
                obs=frames[:3],
                action=0,
                reward=step,
                terminated=step % 10 == 9,
                truncated=False,
                next_obs=frames[1:],
            )
        saved.save(tmp_path / "data")
    for options in ({"n_step": 4}, {"sequences": Sequences(4)}):
        with Replay.load_rows(tmp_path / "data", **options) as replay:
            batch = replay.sample(50)
            obs = batch.obs[..., 0, 0].astype(int)
            step = obs[..., 2]
            begins = step - step % 10
            for older in range(3):
                assert np.array_equal(obs[..., 2 - older], np.maximum(begins, step - older))
            ahead = 1 if "sequences" in options else np.minimum(4, 10 - step % 10)
            assert np.array_equal(batch.next_obs[..., 2, 0, 0], step + ahead)

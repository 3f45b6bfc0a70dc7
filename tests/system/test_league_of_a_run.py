"""The league of a real run: what it saves, and what a resumed one continues with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.launch import run
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.pool import PolicyPool, PoolMember

pytestmark = [pytest.mark.system, pytest.mark.timeout(150)]

# Two actors play half of their rows against the pool; opponents change every 20 games.
LEAGUE = (
    *("actors.count=2", "actors.envs=8", "actors.unroll=8"),
    *("league.mirror=0.5", "league.chairs=3", "league.games=20", "league.snapshot_win_rate=null"),
)
COUNTERS = ("env_steps", "trained_steps", "learner_steps", "episodes", "version", "returns")


def train(folder: Path, target: str, *options: str, resume: str = "no") -> Checkpoint:
    """Trains to the end; returns the last checkpoint."""
    overrides = [*LEAGUE, f"run.dir={folder}", "run.grace_s=60", *options]
    assert run.train(target, overrides, resume, False) == 0  # type: ignore[arg-type]
    return checkpoint_format.load(folder / "checkpoints" / "last")


def members(folder: Path) -> list[PoolMember]:
    """Returns the members of a run's pool, without the time, which no run has in common."""
    return [member._replace(time_s=0.0) for member in PolicyPool(folder / "pool").members()]


def without_times(state: Any) -> Any:
    """Returns the state of a league without the training time of members."""
    draws = [{**draw, "member": {**draw["member"], "time_s": 0.0}} for draw in state["draws"]]
    return {**state, "draws": draws}


@pytest.mark.parametrize(
    ("target", "draw"),
    [
        ("kuhn", "pfsp:squared"),
        pytest.param("leduc", "uniform:2", marks=pytest.mark.slow),
        pytest.param("connect_four", "pfsp:variance", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_league_in_lockstep_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, target: str, draw: str
) -> None:
    # Snapshots cause further checkpoints in between.
    options = (
        *("transport.kind=inproc", f"league.draw={draw}", "league.snapshot_steps=200"),
        "checkpoint.every_steps=50",
    )
    whole = train(tmp_path / "whole", target, *options, "stop.learner_steps=200")
    half = train(tmp_path / "parts", target, *options, "stop.learner_steps=100")
    parts = train(tmp_path / "parts", target, *options, "stop.learner_steps=200", resume="must")

    np.testing.assert_array_equal(whole.weights, parts.weights)
    assert not np.array_equal(half.weights, parts.weights)
    for name in whole.arrays.keys() - {"team/lockstep"}:
        np.testing.assert_array_equal(whole.arrays[name], parts.arrays[name])
    for name in COUNTERS:
        assert whole.meta["progress"][name] == parts.meta["progress"][name]

    # Draws, results and members, too, and there were some.
    assert without_times(whole.meta["league"]) == without_times(parts.meta["league"])
    assert members(tmp_path / "whole") == members(tmp_path / "parts")
    assert len(members(tmp_path / "parts")) > half.meta["league"]["members"] >= 2
    assert parts.meta["league"]["drawn"] > half.meta["league"]["drawn"] > 3

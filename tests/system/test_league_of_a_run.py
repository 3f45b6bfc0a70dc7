"""The league of a real run: what it saves, and what a resumed one continues with."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from league_checks import DrawNumbers, assert_continued, assert_pool_grew, league_state, pool_ids
from penstock.core.run_dir import in_use
from penstock.launch import run
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.pool import PolicyPool, PoolMember
from train_command import Command, Penstock, assert_balanced, last, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(150)]

# Two actors play half of their rows against the pool; opponents change every four games.
LEAGUE = (
    *("actors.count=2", "actors.envs=8", "actors.unroll=8"),
    *("league.mirror=0.5", "league.chairs=3", "league.games=4", "league.snapshot_win_rate=null"),
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


KILLED = (
    *("actors.count=1", "actors.envs=16", "actors.unroll=8", "eval.every_steps=null"),
    *("league.mirror=0.5", "league.chairs=3", "league.games=50", "league.snapshot_steps=5000"),
    *("stop.env_steps=1e9", "checkpoint.every_steps=300", "run.interval_s=0.5", "run.grace_s=20"),
)
MOMENTS = 20
SETTLE_S = 30.0


def kill(command: Command, *, with_learner: bool) -> None:
    """Kills a run's supervisor, whose end lets the learner save; or the learner with it."""
    learner = command.pid_of("learner-0")
    if with_learner and learner:
        os.kill(command.process.pid, signal.SIGSTOP)
        os.kill(learner, signal.SIGKILL)
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.communicate()


def trained_updates(folder: Path) -> int:
    """Returns the optimizer steps of a run's last checkpoint."""
    meta = checkpoint_format.read_meta(folder / "checkpoints" / "last")
    return int(meta["progress"]["learner_steps"])


def wait_for_report(command: Command, folder: Path) -> None:
    """Waits until a run that was just started has reported metrics."""
    lines = len(metrics(folder))
    command.wait_until(lambda: len(metrics(folder)) > lines)


def wait_for_end(folder: Path) -> None:
    """Waits until all processes of a killed run have ended."""
    ends_s = time.monotonic() + SETTLE_S
    while in_use(folder):
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_league_that_is_killed_at_any_moment_keeps_pool_results_and_draws(
    penstock: Penstock, tmp_path: Path
) -> None:
    rng = random.Random(46)
    folder = tmp_path / "run"
    arguments = ("train", "kuhn", *KILLED, f"run.dir={folder}", "--resume", "auto", "--json")
    numbers = DrawNumbers()
    session = -1
    members_before: dict[str, list[str]] = {}
    resumes = 0

    for _ in range(MOMENTS):
        # It trains for a while, and is killed; sometimes it has only begun.
        command = penstock(*arguments)
        if rng.random() < 0.8:
            wait_for_report(command, folder)
        time.sleep(rng.uniform(0.0, 3.0))
        kill(command, with_learner=rng.random() < 0.5)
        wait_for_end(folder)

        # The pool has what it had, and what the checkpoint knows.
        assert_pool_grew(members_before, folder / "pool")
        members_before = pool_ids(folder / "pool")
        saved = league_state(folder)
        if saved is None:
            continue
        assert len(members_before["main"]) >= saved["members"]
        numbers.add(saved, new_process=saved["session"] > session)
        session = saved["session"]
        if not trained_updates(folder):
            continue

        # A resumed run that ends before its first batch has the state of the checkpoint.
        resumes += 1
        code, summary, err = penstock(*arguments, "stop.learner_steps=1").end()
        assert code == 0, err
        assert summary["exit_reason"] == "learner_steps"
        resumed = league_state(folder)
        assert resumed is not None
        assert_continued(saved, resumed, folder / "pool", games=50)
        numbers.add(resumed, new_process=True)
        session = resumed["session"]
        assert_pool_grew(members_before, folder / "pool")

    # Every step of a run that ends is accounted for.
    steps = checkpoint_format.read_meta(folder / "checkpoints/last")["progress"]["trained_steps"]
    code, summary, err = penstock(*arguments, f"stop.env_steps={steps + 20_000}").end()
    assert code == 0, err
    assert_balanced(summary)
    assert resumes >= MOMENTS // 4
    assert len(pool_ids(folder / "pool")["main"]) > 4


POOL = (
    *("actors.count=1", "actors.envs=16", "actors.unroll=8", "eval.every_steps=null"),
    *("league.mirror=0.5", "league.snapshot_steps=5000", "run.interval_s=0.2"),
)


def test_steps_of_before_a_reset_are_dropped_as_lag_and_accounted_for(
    penstock: Penstock, tmp_path: Path
) -> None:
    options = (*POOL, "league.reset=true", "stop.env_steps=40000", "run.dir=run")
    code, summary, err = penstock("train", "kuhn", *options, "--json").end()

    assert code == 0, err
    assert_balanced(summary)
    assert summary["accounting"]["dropped"]["lag"] > 0
    assert len(pool_ids(tmp_path / "run/pool")["main"]) >= 4


def test_a_full_disk_keeps_the_pool_and_the_run_goes_on(penstock: Penstock, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = (*POOL, "stop.env_steps=null", "run.dir=run", "--json")
    command = penstock("train", "kuhn", *options)

    def members() -> int:
        return len(pool_ids(folder / "pool").get("main", []))

    command.wait_until(lambda: members() > 1)
    learner, (_, most) = command.pid_of("learner-0"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(learner, resource.RLIMIT_FSIZE, (100, most))  # no file of it may be larger
    full, steps = members(), last(folder)["trained_steps"]
    command.wait_until(lambda: last(folder)["trained_steps"] > steps + 20_000)
    assert members() <= full + 1  # one may have been under way

    resource.prlimit(learner, resource.RLIMIT_FSIZE, (most, most))
    kept = pool_ids(folder / "pool")
    command.wait_until(lambda: members() > full + 2)
    assert_pool_grew(kept, folder / "pool")
    os.kill(command.process.pid, signal.SIGTERM)
    code, summary, err = command.end()
    assert code == 143, err
    assert_balanced(summary)
    assert "the pool stays as it was, and the run continues" in err

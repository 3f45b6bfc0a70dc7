"""Games between members of a pool, in a run and by `penstock league`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.league.payoffs import FILE, Payoffs
from penstock.learner.pool import PolicyPool
from train_command import Penstock, assert_balanced

pytestmark = [pytest.mark.system, pytest.mark.timeout(150)]

RUN = (
    *("actors.envs=64", "actors.unroll=8", "league.snapshot_steps=20000", "run.interval_s=0.2"),
    *("league.snapshot_win_rate=null", "eval.episodes=2", "eval.video=false", "run.dir=run"),
)


def least_games(pool: Path) -> int:
    """Returns the games of the pair that has played the fewest, 0 without a pair."""
    ids = [member.id for member in PolicyPool(pool).members()]
    payoffs = Payoffs(pool)
    pairs = [(row, column) for row in ids for column in ids if row < column]
    return min((payoffs.meeting(*pair).counts.games for pair in pairs), default=0)


def test_the_evaluator_plays_members_against_each_other(penstock: Penstock, tmp_path: Path) -> None:
    pool = tmp_path / "run" / "pool"
    command = penstock("train", "rock_paper_scissors", "--json", *RUN, "league.snapshot_steps=1e9")
    command.wait_until(lambda: len(PolicyPool(pool).members()) == 1)
    command.stop()
    assert not (pool / FILE).exists()

    command = penstock("train", "rock_paper_scissors", "--json", *RUN, "--resume", "auto")
    command.wait_until(lambda: len(PolicyPool(pool).members()) >= 3)
    command.wait_until(lambda: (pool / FILE).exists())
    command.process.terminate()
    _, summary, err = command.end()
    assert_balanced(summary)
    assert "Traceback" not in err
    # Members are new and have few games, or none.
    assert Payoffs(pool).wins([member.id for member in PolicyPool(pool).members()]).sum() > 0


def test_training_by_the_equilibrium_meets_members_that_have_weight(
    penstock: Penstock, tmp_path: Path
) -> None:
    options = ("league.draw=nash", "league.mirror=0", "league.reset=true", "league.games=20")
    command = penstock("train", "kuhn", "--json", *RUN, *options, "stop.env_steps=200000")
    code, summary, err = command.end()
    assert code == 0, err
    assert_balanced(summary)
    # Unrolls that were played before a reset are dropped, and accounted for.
    assert summary["accounting"]["dropped"]["lag"] > 0
    pool = PolicyPool(tmp_path / "run" / "pool")
    assert len(pool.members()) > 3
    assert (pool.folder / FILE).exists()


def test_league_rates_the_members_of_a_run(penstock: Penstock, tmp_path: Path) -> None:
    options = ("stop.env_steps=100000", "eval.every_steps=null")
    code, _, err = penstock("train", "rock_paper_scissors", "--json", *RUN, *options).end()
    assert code == 0, err
    members = PolicyPool(tmp_path / "run" / "pool").members()
    assert len(members) > 2

    code, report, err = penstock("league", "run", "--rate", "50", "--json").end()
    assert code == 0, err
    assert least_games(tmp_path / "run" / "pool") == 50
    assert {each["id"] for each in report["members"]} == {each.id for each in members}
    for each in report["members"]:
        low, high = each["interval"]
        assert low <= each["rating"] <= high

    text = shown(penstock, "league", "run")
    assert "win rate of the row against the column" in text


def shown(penstock: Penstock, *arguments: str) -> str:
    """Returns what a command prints."""
    command = penstock(*arguments)
    out, err = command.process.communicate(timeout=60)
    assert command.process.returncode == 0, err
    return out

"""Policies that play both seats of a game learn to play it well, by independent referees."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

import penstock
from exploitability import POKER, PokerJudge, alone, members_of
from penstock.envs.games.connect_four import ConnectFour
from penstock.evaluation.league_report import report
from penstock.league.payoffs import Payoffs
from penstock.league.solve import nash_weights
from penstock.learner.pool import PolicyPool

pytestmark = [
    pytest.mark.learning,
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]


def trained(folder: Path, preset: str, *options: str) -> Any:
    """Train a preset, and return the policy; actions are sampled."""
    command = [sys.executable, "-m", "penstock", "train", preset, "run.dir=run", *options]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return penstock.load_policy(folder / "run", sample=True)


def share_won_against_random_play(policy: Any) -> float:
    """Returns the share of games of connect four that a policy wins against random choices."""
    count = 500
    games = ConnectFour(count)
    observations, _ = games.reset(seed=1)

    # Half of the games are played from each seat.
    seat = np.arange(count) % 2
    own = 2 * np.arange(count) + seat
    others = own + 1 - 2 * seat
    outcomes = np.full(count, np.nan)
    while np.isnan(outcomes).any():
        actions, _ = policy(observations)
        actions[others] = games.bot("random", others)
        observations, _, terminated, _, info = games.step(actions)
        first_ends = terminated[own] & np.isnan(outcomes)
        outcomes[first_ends] = info["outcome"][own][first_ends]
    return float((outcomes > 0).mean())


def test_mirror_play_of_connect_four_beats_random_play_within_three_minutes(
    tmp_path: Path,
) -> None:
    policy = trained(tmp_path, "connect_four", "stop.minutes=3")
    assert share_won_against_random_play(policy) >= 0.95


def test_games_that_connect_learn_connect_four_against_themselves_and_a_pool(
    tmp_path: Path,
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    program = str(Path(__file__).parents[1] / "duel_games.py")
    duels = ("128", "connect_four:ConnectFour")
    options = ("league.mirror=0.5", "league.games=50", "league.snapshot_steps=50000")
    limits = ("stop.env_steps=300000", "stop.minutes=4")
    bind = ("--bind", f"tcp://127.0.0.1:{port}")
    command = [sys.executable, "-m", "penstock", "serve-env", "connect_four", "run.dir=run", *bind]

    games = subprocess.Popen(
        [sys.executable, program, str(port), *duels], stdout=subprocess.DEVNULL
    )
    try:
        run = [*command, *options, *limits]
        subprocess.run(run, cwd=tmp_path, capture_output=True, check=True)
    finally:
        games.kill()
        games.wait()
    policy = penstock.load_policy(tmp_path / "run", sample=True)
    assert share_won_against_random_play(policy) >= 0.8


def judged(run: Path) -> tuple[PokerJudge, list[str]]:
    """Returns what judges the pool of a run of Kuhn poker, and the ids of its members."""
    pool = PolicyPool(run / "pool")
    members = members_of(run, pool)
    judge = PokerJudge(POKER["penstock/Kuhn-v0"], [member.policy for member in members])
    return judge, [member.id for member in members]


def test_the_mixture_of_kuhn_players_in_mirror_play_is_hard_to_exploit(tmp_path: Path) -> None:
    """Untrained play has 0.458; the newest player circles round the equilibrium."""
    trained(tmp_path, "kuhn", "stop.env_steps=5e6", "league.snapshot_steps=25e4")
    judge, members = judged(tmp_path / "run")
    newest = [judge.exploitability(alone(index)) for index in range(1, len(members))]
    mixture = judge.exploitability([1 / len(members)] * len(members))
    assert mixture <= 0.05
    assert fmean(newest) > 2 * mixture


def test_psro_of_kuhn_poker_is_hard_to_exploit_with_twelve_members(tmp_path: Path) -> None:
    """Exact best responses reach 0.01 with nine; each here learns for half a million steps."""
    options = (
        *("league.draw=nash", "league.mirror=0", "league.reset=true", "league.games=100"),
        *("league.snapshot_steps=500e3", "league.snapshot_win_rate=null", "stop.env_steps=5.6e6"),
        *("algo.entropy_cost=0.05", "learner.lr=2e-3", "actors.envs=256"),
    )
    trained(tmp_path, "kuhn", *options)
    run = tmp_path / "run"
    report(run, 5000, lambda line: None)  # the last member has few games yet
    judge, members = judged(run)
    assert len(members) <= 12
    weights = nash_weights(Payoffs(run / "pool"), members)
    assert judge.exploitability([weights[member] for member in members]) <= 0.05

"""Policies that play both seats of a game learn to play it well, by independent referees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import penstock
from penstock.envs.games.connect_four import ConnectFour
from penstock.envs.games.kuhn import KuhnPoker
from poker_trees import Deal, History, Kuhn, Rules, exploitability, histories

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


def test_mirror_play_of_connect_four_beats_random_play_within_three_minutes(
    tmp_path: Path,
) -> None:
    policy = trained(tmp_path, "connect_four", "stop.minutes=3")
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
    assert (outcomes > 0).mean() >= 0.95


def test_mirror_play_of_kuhn_poker_is_hard_to_exploit(tmp_path: Path) -> None:
    """Untrained play has 0.458; the last of a million games in mirror play is still not optimal."""
    policy = trained(tmp_path, "kuhn", "stop.env_steps=5e6")
    count = 6000
    games = KuhnPoker(count)
    bets: dict[tuple[int, History], float] = {}
    rules = Kuhn()
    for history in histories(rules):
        if not rules.legal(history):
            continue
        observations, _ = games.reset(seed=1)
        for action in history:
            observations, *_ = games.step(np.full(2 * count, action))
        actions, _ = policy(observations)
        player = rules.player(history)
        cards = observations["observation"][player::2, :3].argmax(1)
        for card in range(3):
            bets[card, history] = float(actions[player::2][cards == card].mean())

    def played(_: Rules, deal: Deal, history: History) -> npt.NDArray[np.float64]:
        bet = bets[deal[rules.player(history)], history]
        return np.array([1 - bet, bet])

    assert exploitability(rules, played) < 0.2

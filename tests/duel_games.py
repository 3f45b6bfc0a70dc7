"""Duels that drive their own loop: a program that plays them through `penstock serve-env`.

    python duel_games.py PORT [GAMES [NAME]]

NAME is an environment of Penstock with two seats, whose spaces and sides it says. It connects again
whenever it has lost the service, and prints the result of seat 0 of each game that it has finished:
-1, 0 or 1. It plays until it is ended.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv

from penstock.core.loading import load
from penstock.envs.space_json import to_json

sys.path.append(str(Path(__file__).parents[1] / "clients" / "python"))

from penstock_game import FIRST, TERMINATED, TRUNCATED, Game, Lost


def main() -> None:
    """Play until the process is ended."""
    arguments = [
        *sys.argv[1:],
        *("8", "rock_paper_scissors:RockPaperScissors")[len(sys.argv) - 2 :],
    ]
    port, games, name = arguments
    duels: VectorEnv = load(f"penstock.envs.games.{name}", "game")(int(games))
    game = Game(
        "127.0.0.1",
        int(port),
        seats=duels.num_envs,
        observation=to_json(duels.single_observation_space),
        action=to_json(duels.single_action_space),
        sides=duels.metadata["sides"],
        wait_s=math.inf,
    )
    while True:
        try:
            play(game, duels)
        except Lost:
            game.reconnect()


def play(game: Game, duels: VectorEnv) -> None:
    """Play new games until the service is lost."""
    rows = game.rows(range(duels.num_envs))
    show(rows, duels.reset()[0])
    rows.flags[:] = FIRST
    returns = np.zeros(duels.num_envs)
    ended = np.zeros(duels.num_envs, np.bool_)
    while True:
        faults = game.step(rows)
        assert not faults, faults
        for seat in np.flatnonzero(ended)[::2]:
            print(int(np.sign(returns[seat] - returns[seat + 1])), flush=True)
        returns[ended] = 0.0

        # The step after the end of a game begins the next one, whatever the actions are.
        observations, rewards, terminated, truncated, _ = duels.step(rows.action)
        show(rows, observations)
        rows.reward[:] = rewards
        returns += rewards
        rows.flags[:] = np.where(terminated, TERMINATED, np.where(truncated, TRUNCATED, 0))
        rows.flags[ended] = FIRST
        ended = terminated | truncated


def show(rows: Any, observations: Any) -> None:
    """Write observations, of one array or of several by their names, into rows."""
    parts = observations if isinstance(observations, dict) else {"obs": observations}
    for name, array in parts.items():
        rows.obs[name] = array


if __name__ == "__main__":
    main()

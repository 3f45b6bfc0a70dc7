"""CartPole as games that drive their own loop: a program that plays through `penstock serve-env`.

    python pole_games.py PORT [SEATS]

It says its spaces, connects again whenever it has lost the service, and prints the return of each
episode that it has finished. It plays until it is ended.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import gymnasium
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "clients" / "python"))

from penstock_game import (  # type: ignore[import-not-found, unused-ignore]
    FIRST,
    TERMINATED,
    TRUNCATED,
    Game,
    Lost,
)

# The bounds of gymnasium's environment, with one that JSON has in place of infinity.
LIMITS = [4.8, 1e30, 0.41887903213500977, 1e30]
OBSERVATION = {"Box": [[-limit for limit in LIMITS], LIMITS, [4], "<f4"]}
ACTION = {"Discrete": [2, 0]}


def main() -> None:
    """Play until the process is ended."""
    port = int(sys.argv[1])
    seats = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    poles = gymnasium.make_vec("CartPole-v1", seats, vectorization_mode="vector_entry_point")
    game = Game(
        "127.0.0.1", port, seats=seats, observation=OBSERVATION, action=ACTION, wait_s=math.inf
    )
    while True:
        try:
            play(game, poles)
        except Lost:
            print("lost", flush=True)
            game.reconnect()


def play(game: Game, poles: gymnasium.vector.VectorEnv) -> None:
    """Play new episodes until the service is lost."""
    rows = game.rows(range(poles.num_envs))
    rows.obs["obs"], _ = poles.reset()
    rows.flags[:] = FIRST
    returns = np.zeros(poles.num_envs)
    ended = np.zeros(poles.num_envs, np.bool_)
    while True:
        faults = game.step(rows)
        assert not faults, faults
        for episode_return in returns[ended]:
            print(episode_return, flush=True)
        returns[ended] = 0.0

        # The step after the end of an episode begins the next one, whatever the action is.
        rows.obs["obs"], rows.reward[:], terminated, truncated, _ = poles.step(rows.action)
        returns += rows.reward
        rows.flags[:] = np.where(terminated, TERMINATED, np.where(truncated, TRUNCATED, 0))
        rows.flags[ended] = FIRST
        ended = terminated | truncated


if __name__ == "__main__":
    main()

"""Duels that drive their own loop: a program that plays them through `penstock serve-env`.

    python duel_games.py PORT [GAMES [NAME]]

NAME is an environment of Penstock with two seats, whose spaces and sides it says in HELLO. It
connects whenever it can, also again after it has lost the connection, and prints the result of seat
0 of each game that it finishes: -1, 0 or 1. It ends on SIGTERM.
"""

from __future__ import annotations

import sys
from contextlib import closing
from itertools import islice

import numpy as np

from penstock.configs.load import resolve
from penstock.envs.make import make
from penstock.envs.space_json import to_json
from pole_games import Lost, connected, play


def main() -> None:
    """Play until the process is ended."""
    port, games, name = (
        *sys.argv[1:],
        *("4", "penstock/RockPaperScissors-v0")[len(sys.argv) - 2 :],
    )
    env = make(resolve(name).env, 2 * int(games))
    vector = env._vector
    observation, action = map(to_json, env.info.spaces)
    hello = {"observation": observation, "action": action, "sides": [*env.info.seating.sides]}
    while True:
        with closing(connected(int(port), vector.num_envs, **hello)) as game:
            try:
                returns = play(game, vector)
                while pair := [*islice(returns, 2)]:
                    print(int(np.sign(pair[0] - pair[1])), flush=True)
            except Lost:
                pass


if __name__ == "__main__":
    main()

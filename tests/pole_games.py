"""CartPole as games that drive their own loop: a program that plays through `penstock serve-env`.

    python pole_games.py PORT [SEATS [EPISODES_A_CONNECTION [SECONDS_A_STEP]]]

It connects whenever it can, also again after it has lost the connection, and prints the return of
each episode that it finishes. It ends on SIGTERM, and where EPISODES_A_CONNECTION is not 0 each
connection ends after so many episodes of its first seat.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing

import gymnasium
import numpy as np

from game_client import END, FIRST, TERMINATED, TRUNCATED, GameClient

# The pause before another attempt to connect, doubled each time up to the last one.
PAUSES_S = (0.05, 1.0)


class Lost(Exception):
    """The connection has ended."""


def connected(port: int, seats: int, **hello: object) -> GameClient:
    """A connection, as soon as the service takes one."""
    pause_s, longest_s = PAUSES_S
    while True:
        try:
            return GameClient(port, seats=seats, **hello)
        except (OSError, AssertionError, ValueError):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)


def play(game: GameClient, envs: gymnasium.vector.VectorEnv, step_s: float = 0.0) -> Iterator[float]:
    """Play one connection, and yield the returns of finished episodes. Raises Lost at its end."""
    seats = envs.num_envs
    observations, _ = envs.reset()
    flags = np.full(seats, FIRST)
    rewards = np.zeros(seats)
    returns = np.zeros(seats)
    actions = np.zeros(seats, np.int64)
    while True:
        began_s = time.monotonic()
        try:
            answered = game.act(observations, flags.tolist(), rewards=rewards.tolist())
        except AssertionError as error:
            [(kind, _)] = error.args
            if kind not in (0, END):
                raise
            raise Lost from error
        except OSError as error:
            raise Lost from error

        actions[:] = 0
        for seat, action in answered.items():
            actions[seat] = action
        ended = flags >= TERMINATED
        yield from returns[ended]
        returns[ended] = 0.0

        # The step after the end of an episode begins the next one.
        observations, rewards, terminated, truncated, _ = envs.step(actions)
        flags = np.where(terminated, TERMINATED, np.where(truncated, TRUNCATED, 0))
        flags[ended] = FIRST
        returns += rewards
        if step_s:
            time.sleep(max(0.0, began_s + step_s - time.monotonic()))


def main() -> None:
    """Play until the process is ended."""
    port, seats, episodes, step_s = (*map(float, sys.argv[1:]), *(8.0, 0.0, 0.0)[len(sys.argv) - 2 :])
    envs = gymnasium.make_vec("CartPole-v1", int(seats), vectorization_mode="vector_entry_point")
    while True:
        with closing(connected(int(port), int(seats))) as game:
            try:
                for count, episode_return in enumerate(play(game, envs, step_s), 1):
                    print(episode_return, flush=True)
                    if count == episodes:
                        break
            except Lost:
                print("lost", flush=True)


if __name__ == "__main__":
    main()

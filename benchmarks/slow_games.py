"""CartPole-v1 with steps that are slow in five ways, for `benchmarks/advice.py`."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv

SLEEP_S = 0.002
ITERATIONS = 30_000  # of an empty loop in Python: about 0.3 ms
RARE, RARE_SLEEP_S = 8, 0.02  # one step in so many sleeps so long

# It answers each byte with one, after its work. The end of its input ends it.
CHILD = """
import sys, time
while sys.stdin.buffer.raw.read(1):
    {work}
    sys.stdout.buffer.raw.write(b"x")
"""
COMPUTES = f"for _ in range({ITERATIONS}): pass"
SLEEPS = f"time.sleep({SLEEP_S})"


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Calls ``work`` before each step, and ``end`` when it is closed."""

    def __init__(self, work: Callable[[], object], end: Callable[[], object] = int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._work, self._end = work, end

    def step(self, action: Any) -> Any:
        self._work()
        return super().step(action)

    def close(self) -> None:
        self._end()
        super().close()


class SleepingVector(SyncVectorEnv):
    """Sleeps in each step, once for all environments."""

    def step(self, actions: Any) -> Any:
        time.sleep(SLEEP_S)
        return super().step(actions)


def sleeping() -> Slow:
    return Slow(lambda: time.sleep(SLEEP_S))


def computing() -> Slow:
    return Slow(_compute)


def mixed() -> Slow:
    return Slow(lambda: time.sleep(RARE_SLEEP_S if random.randrange(RARE) == 0 else 0.0))


def asking_one_that_computes() -> Slow:
    return _asking(COMPUTES)


def asking_one_that_sleeps() -> Slow:
    return _asking(SLEEPS)


def sleeping_vector(num_envs: int) -> SleepingVector:
    games = [lambda: gymnasium.make("CartPole-v1")] * num_envs
    return SleepingVector(games, autoreset_mode=AutoresetMode.NEXT_STEP)


def _compute() -> None:
    for _ in range(ITERATIONS):
        pass


def _asking(work: str) -> Slow:
    """A step asks a program of its own over a pipe, and waits for the answer."""
    command = [sys.executable, "-S", "-E", "-c", CHILD.format(work=work)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0)

    def ask() -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(b"x")
        child.stdout.read(1)

    def end() -> None:
        child.kill()
        child.communicate()

    return Slow(ask, end)

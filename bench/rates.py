"""The rate of a piece of work, measured in rounds, whose spread shows the noise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

ROUNDS = 5


class Work(NamedTuple):
    """A piece of work to repeat."""

    call: Callable[[], object]
    amount: float
    """The amount that one call does, in the unit of the rate."""
    settle: Callable[[], object] = bool
    """Waits for work that calls have left running, on a GPU."""


class Round(NamedTuple):
    """The figures of one round."""

    rate: float
    """Amount per second by the clock."""
    core_s: float
    """Core-seconds of this process for an amount of 1."""


def rounds_of(works: Mapping[str, Work], seconds: float) -> dict[str, list[Round]]:
    """Measure each work for about ``seconds``, in `ROUNDS` rounds.

    Works take turns, so that other load of the machine meets all of them.
    """
    rounds: dict[str, list[Round]] = {name: [] for name in works}
    for work in works.values():
        work.call()
        work.settle()

    for _ in range(ROUNDS):
        for name, work in works.items():
            rounds[name].append(one_round(work, seconds / ROUNDS))
    return rounds


def one_round(work: Work, seconds: float) -> Round:
    """Repeat a work for ``seconds``, at least once."""
    calls = 0
    began_core_s = time.process_time()
    began_s = time.perf_counter()
    while calls == 0 or time.perf_counter() < began_s + seconds:
        work.call()
        calls += 1
    work.settle()

    wall_s = time.perf_counter() - began_s
    core_s = time.process_time() - began_core_s
    amount = calls * work.amount
    return Round(rate=amount / wall_s, core_s=core_s / amount)


def as_json(rounds: list[Round]) -> dict[str, Any]:
    """Returns rounds as JSON: a list ``rates`` and a list ``core_s``, one number a round each."""
    return {
        "rates": [each.rate for each in rounds],
        "core_s": [each.core_s for each in rounds],
    }

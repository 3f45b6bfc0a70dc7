"""Schedules: numbers that change while a buffer is used.

A schedule is called with the number of transitions that its sampler has drawn so far. This unit
does not depend on the batch size, the number of learners or the writers, and a rate limiter counts
in it: with S samples per insert, `S * n` drawn transitions are `n` environment steps; with batches
of B, they are `S * n / B` learner steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.replay.errors import ReplayError


class Schedule(Protocol):
    """Any callable: number of transitions drawn so far -> value."""

    def __call__(self, drawn: int, /) -> float: ...


@dataclass(frozen=True)
class Constant:
    """Always the same value."""

    value: float

    def __call__(self, drawn: int, /) -> float:
        return self.value


@dataclass(frozen=True)
class Linear:
    """Linear from ``start`` to ``end`` over the first ``over`` drawn transitions, then ``end``."""

    start: float
    end: float
    over: int

    def __post_init__(self) -> None:
        if self.over < 1:
            raise ReplayError(
                f"Linear over {self.over} transitions has no slope; give at least 1, or Constant"
            )

    def __call__(self, drawn: int, /) -> float:
        if drawn >= self.over:
            return self.end
        return self.start + (self.end - self.start) * (drawn / self.over)


def as_schedule(value: float | Schedule) -> Schedule:
    """The schedule itself, or a `Constant` for a number."""
    return value if callable(value) else Constant(float(value))

"""Which faults come when: a pure function of a seed, so that a failure can be repeated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

SHORTEST_S, LONGEST_S = 0.2, 1.5  # of what lasts: a stop, a full disk, a partition
GAP_S = (0.05, 0.5)  # between what follows a fault and the next one


@dataclass(frozen=True)
class Fault:
    """``pick`` from 0 to 1 chooses among the victims that live; ``seed`` is for what else it
    draws, such as the bytes of hostile messages."""

    number: int
    kind: str
    pick: float
    seconds: float
    gap_s: float
    seed: int


def schedule(seed: int, kinds: Mapping[str, float], count: int) -> list[Fault]:
    """``count`` faults, their kinds drawn by weight."""
    rng = random.Random(seed)
    names, weights = list(kinds), list(kinds.values())
    return [
        Fault(
            number,
            rng.choices(names, weights)[0],
            rng.random(),
            rng.uniform(SHORTEST_S, LONGEST_S),
            rng.uniform(*GAP_S),
            rng.getrandbits(32),
        )
        for number in range(count)
    ]

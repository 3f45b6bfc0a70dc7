"""Limits the share of a core that a loop uses, by waiting between its turns."""

from __future__ import annotations

import time
from collections.abc import Callable


class LoopPace:
    """Computes how long a loop must wait after each turn, so that it keeps to its share of a core.

    A turn that costs little is followed by a short wait. Call it in the thread of the loop.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.thread_time) -> None:
        """``share`` of a core, from 0 to 1. ``clock`` counts processor time: that of the thread, or
        of all threads that work for it."""
        self._rest_per_s = (1.0 - share) / share
        self._clock = clock
        self._before_s = clock()

    def rest_s(self, longest_s: float) -> float:
        """Seconds to rest, for the processor time since the last call; at most ``longest_s``."""
        before_s, self._before_s = self._before_s, self._clock()
        return min(longest_s, (self._before_s - before_s) * self._rest_per_s)

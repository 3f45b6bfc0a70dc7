"""Limits the share of a core that a loop uses, by waiting between its turns."""

from __future__ import annotations

import time
from collections.abc import Callable


class LoopPace:
    """Computes how long a loop must wait after each turn, so that it keeps to its share of a core.

    A turn that costs little is followed by a short wait. Call it in the thread of the loop.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.thread_time) -> None:
        """Begin to count.

        Args:
            share: the share of a core that the loop may use, above 0 and at most 1.
            clock: counts seconds of processor time, of the loop's thread or of all threads that
                work for it.
        """
        self._rest_per_used_s = (1.0 - share) / share
        self._clock = clock
        self._last_call_s = clock()

    def rest_s(self, longest_s: float) -> float:
        """Returns the seconds to rest for the processor time used since the last call.

        They are at most ``longest_s``.
        """
        now_s = self._clock()
        used_s = now_s - self._last_call_s
        self._last_call_s = now_s
        return min(longest_s, used_s * self._rest_per_used_s)

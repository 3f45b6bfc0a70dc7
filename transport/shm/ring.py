"""A ring of slot ids between one writer and one reader, in memory that two processes may share.

Two counters that only grow, each with one owner, on cache lines of their own: the pusher stores the
cell, then `tail`; the popper reads `tail`, then the cell, then stores `head`. On x86-64 stores
become visible in order, so a reader that sees the counter sees the cell and the slot's bytes. Other
processors get a fence from an uncontended lock on each side. A process killed between two stores
leaves the ring as it was before the push.
"""

from __future__ import annotations

import platform
import threading

WORDS_PER_LINE = 8
COUNTER_WORDS = 2 * WORDS_PER_LINE

_ORDERED_STORES = platform.machine() in ("x86_64", "AMD64")
_fence_lock = threading.Lock()


def fence() -> None:
    """Order the stores before it and the loads after it, where the processor does not."""
    if not _ORDERED_STORES:
        with _fence_lock:
            pass


class Ring:
    """At most ``capacity`` ids; the protocol above it never lends more slots than exist."""

    def __init__(self, words: memoryview, offset: int, capacity: int) -> None:
        """``words``: int64 view of the arena; ``offset``: in words, a multiple of a line."""
        self._words = words
        self._tail = offset
        self._head = offset + WORDS_PER_LINE
        self._cells = offset + COUNTER_WORDS
        self._capacity = capacity

    @staticmethod
    def size_words(capacity: int) -> int:
        return COUNTER_WORDS + -(-capacity // WORDS_PER_LINE) * WORDS_PER_LINE

    def __len__(self) -> int:
        return int(self._words[self._tail] - self._words[self._head])

    def push(self, value: int) -> None:
        words = self._words
        tail = words[self._tail]
        words[self._cells + tail % self._capacity] = value
        fence()
        words[self._tail] = tail + 1

    def pop(self) -> int | None:
        words = self._words
        head = words[self._head]
        if words[self._tail] == head:
            return None
        fence()
        value = words[self._cells + head % self._capacity]
        words[self._head] = head + 1
        return int(value)

    def reset(self) -> None:
        """Only while the other side is known to be gone."""
        self._words[self._tail] = self._words[self._head] = 0

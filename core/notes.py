"""Sentences for the user, carried by `logging`: INFO and above of the logger "penstock" and its
children.

Where a run is supervised they become its notes: shown by its view, and written to
`logs/events.jsonl`. They do not propagate to the root logger, whose handlers are the program's own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOGGER = logging.getLogger("penstock")
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False


class _NoteHandler(logging.Handler):
    """Passes on what its own thread logs: each run of a program has a thread of its own."""

    def __init__(self, note: Callable[[str], object]) -> None:
        super().__init__()
        self._note = note
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread == self._thread

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


@contextmanager
def notes_to(note: Callable[[str], object]) -> Iterator[None]:
    """Call ``note`` with each sentence that this thread logs within the ``with`` block."""
    handler = _NoteHandler(note)
    _LOGGER.addHandler(handler)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)

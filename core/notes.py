"""Notes: sentences for the user, carried by `logging`.

A note is a record of level INFO or above of the logger "penstock" or one of its children. The notes
of a run are shown by its view and written to `logs/events.jsonl`. A role's process reports its
notes to the supervisor. Notes do not propagate to the root logger, whose handlers belong to the
user's program.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _NoteLogger(logging.Logger):
    """A logger that stays enabled when the user's code configures `logging`.

    That may disable all existing loggers (`logging.config`) or all below a level
    (`logging.disable`).
    """

    @property
    def disabled(self) -> bool:
        return False

    @disabled.setter
    def disabled(self, value: bool) -> None:
        pass

    def isEnabledFor(self, level: int) -> bool:
        return level >= self.getEffectiveLevel()


def note_logger(name: str) -> logging.Logger:
    """Returns the logger ``name`` of a Penstock module whose notes must reach the user."""
    # `getLogger` makes a new logger of the class that is set.
    previous_class = logging.getLoggerClass()
    logging.setLoggerClass(_NoteLogger)
    try:
        return logging.getLogger(name)
    finally:
        logging.setLoggerClass(previous_class)


_LOGGER = note_logger("penstock")
_LOGGER.setLevel(logging.INFO)
_LOGGER.propagate = False


class _NoteHandler(logging.Handler):
    """Calls ``note`` with the text of each record of one thread; ``thread`` None: of all."""

    def __init__(self, note: Callable[[str], object], thread: int | None) -> None:
        super().__init__()
        self._note = note
        self._thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        return self._thread in (None, record.thread)

    def emit(self, record: logging.LogRecord) -> None:
        self._note(record.getMessage())


@contextmanager
def notes_to(note: Callable[[str], object], every_thread: bool = False) -> Iterator[None]:
    """Call ``note`` with each sentence that is logged within the ``with`` block.

    A program may supervise several runs, each in a thread of its own. So only the sentences of the
    calling thread count, or with ``every_thread`` those of all threads.
    """
    handler = _NoteHandler(note, None if every_thread else threading.get_ident())
    _LOGGER.addHandler(handler)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)

"""Imports at the start of a process: without garbage collections, which would find nothing in them
and take a tenth of their time, and with an end at once where they are interrupted."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector in the ``with`` block.

    All objects of the process that exist at the end of the block, not only those that it has made,
    are exempt from later collections (`gc.freeze`): modules stay until the process ends, and a full
    collection of torch's takes a tenth of a second. So use it at the start of a process, before
    there is data in reference cycles, which would never be freed. Nothing happens where the
    collector is disabled already, as in a block within another.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process at once, with exit code 130, at a Ctrl-C in the ``with`` block.

    There is nothing to save yet, and a KeyboardInterrupt within an import may come out as another
    error: pydantic makes a SchemaError of it.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

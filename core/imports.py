"""Imports with the garbage collector paused, which would find nothing in them and takes a tenth of
their time."""

from __future__ import annotations

import gc
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

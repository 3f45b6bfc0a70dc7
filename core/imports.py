"""Imports without the garbage collector, which finds nothing in them and takes a tenth of their
time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_later() -> Iterator[None]:
    """No collections in the ``with`` block, and none of its objects afterwards: what modules define
    stays, and a full collection of torch's modules takes a tenth of a second."""
    if not gc.isenabled():  # within another block, or by the user's will
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

"""Ends a program in which a call of the user's code does not return.

A thread looks at the stack of the main one. The call is the outermost frame that was entered from
Penstock; while it is the same frame, it is the same call, unless progress within it is reported.
Nothing is wrapped, so the watched code runs as in training.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from penstock.core.place import package_of, place_of
from penstock.core.processes import end_programs

# The stack is read at this interval.
POLL_S = 0.2
# Seconds after the limit until the program is ended from C. A call that holds the interpreter lock
# lets no Python thread run.
BACKSTOP_S = 5.0


@contextmanager
def reporting_hung_calls(
    limit_s: float, tell: Callable[[str], object]
) -> Iterator[Callable[[], object]]:
    """Watch the calling thread in the ``with`` block, and report a call that does not return.

    Args:
        limit_s: seconds after which a call is reported.
        tell: called from another thread, with a clause that names the call and where it is. It may
            end the program, which is the only way to end such a call.

    Yields:
        A function to call after progress within a call, such as one reset of many.
    """
    is_done = threading.Event()
    has_progressed = threading.Event()
    _arm(limit_s)
    thread = threading.Thread(
        target=_watch,
        kwargs={
            "thread_id": threading.get_ident(),
            "limit_s": limit_s,
            "tell": tell,
            "is_done": is_done,
            "has_progressed": has_progressed,
        },
        daemon=True,
    )
    thread.start()
    try:
        yield has_progressed.set
    finally:
        is_done.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def end_all(code: int) -> None:
    """End this program at once, with its threads and all programs that it has started."""
    end_programs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _watch(
    *,
    thread_id: int,
    limit_s: float,
    tell: Callable[[str], object],
    is_done: threading.Event,
    has_progressed: threading.Event,
) -> None:
    """Read the stack of a thread until it is done, and report the first call that hangs."""
    call: FrameType | None = None
    since_s = 0.0
    while not is_done.wait(POLL_S):
        _arm(limit_s)
        frame = sys._current_frames().get(thread_id)
        now_s = time.monotonic()
        if frame is None:
            continue

        present_call = call_of(frame)
        if present_call is not call or has_progressed.is_set():
            call = present_call
            since_s = now_s
            has_progressed.clear()
        elif now_s - since_s >= limit_s:
            tell(f"{_name(call)} has not come back for {now_s - since_s:.0f} s{_at(frame)}")
            return


def _arm(limit_s: float) -> None:
    """Let C end the program after the limit and `BACKSTOP_S`, unless this is called again."""
    faulthandler.dump_traceback_later(limit_s + BACKSTOP_S, exit=True)


def call_of(frame: FrameType) -> FrameType:
    """Returns the outermost frame that was entered from Penstock, of the stack of ``frame``.

    If the innermost frame is Penstock's own, as during a call of code that is not Python, it is
    that one.
    """
    call = frame
    while package_of(call) != "penstock" and call.f_back is not None:
        if package_of(call.f_back) == "penstock":
            return call
        call = call.f_back
    return call


def _name(call: FrameType) -> str:
    """Returns the call's name for a sentence."""
    name = call.f_code.co_name
    module = str(call.f_globals.get("__name__", "?"))
    if name == "<module>" or module.startswith("importlib"):
        return "an import"
    return f"{call.f_code.co_qualname}()"


def _at(frame: FrameType) -> str:
    where = place_of(frame)
    return f" and is at {where}" if where else ""

"""The place in the user's own code where a thread is, or an error arose: `game.py:8, in step`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from penstock.configs.errors import UserError

OWN_PACKAGES = ("__main__", "penstock", "gymnasium")
INSTALLED = {"site-packages", "dist-packages"}


def place(error: BaseException) -> str:
    """The innermost line of the user's own code in an error's traceback.

    Else that of a library which the user chose; empty where there is neither.
    """
    return _innermost(traceback.walk_tb(error.__traceback__))


def exit_refused(what: str, error: SystemExit) -> UserError:
    """The mistake of the user's code that ends the process in which it is called."""
    code = "" if error.code is None else repr(error.code)
    where = place(error)
    at = f" at {where}" if where else ""
    return UserError(
        f"{what} called sys.exit({code}){at}, which ends the process that runs it; raise an "
        "exception that says what is wrong"
    )


def place_of(frame: FrameType) -> str:
    """The same for the present stack of a thread, by its innermost frame."""
    return _innermost(reversed(list(traceback.walk_stack(frame))))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """``frames`` with their lines, the outermost first."""
    places: dict[bool, str] = {}  # by whether the code is an installed package
    for frame, line in frames:
        package = package_of(frame)
        if package not in OWN_PACKAGES and package not in sys.stdlib_module_names:
            path = Path(frame.f_code.co_filename)
            installed = not INSTALLED.isdisjoint(path.parts)
            places[installed] = f"{path.name}:{line}, in {frame.f_code.co_name}"
    return places.get(False) or places.get(True, "")


def package_of(frame: FrameType) -> str:
    """The name of the outermost package that contains a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

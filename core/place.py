"""The place in the user's own code where a thread is, or where an error was raised.

A place is a text such as `game.py:8, in step`. An error's traceback for the user has the frames of
the user's code alone, without those of Penstock.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from penstock.configs.errors import UserError

# Packages whose code is not the user's. `__main__` is the program of the command.
OWN_PACKAGES = ("__main__", "penstock", "gymnasium", "typer", "click")
# Folders of installed packages.
INSTALLED = {"site-packages", "dist-packages"}
# The modules that call environments have names with this prefix.
ENVIRONMENTS = "penstock.envs."
# A longer text of an error is cut.
TEXT_CHARS = 300


def place(error: BaseException) -> str:
    """Returns the innermost line of the user's own code in an error's traceback.

    Without a line of that code it is the innermost one of a library that the user chose, and
    without that it is empty.
    """
    return _innermost(traceback.walk_tb(raised(error).__traceback__))


def raised(error: BaseException) -> BaseException:
    """Returns the error that the user's code has raised.

    It is ``error`` itself but in one case: Python makes a RuntimeError of a StopIteration that
    leaves a generator (PEP 479). Then it is the StopIteration.
    """
    cause = error.__cause__
    is_converted = isinstance(error, RuntimeError) and isinstance(cause, StopIteration)
    return cause if is_converted and cause is not None else error


def brief(error: BaseException) -> str:
    """Returns type and text of an error on one line: `KeyError: 'speed'`."""
    error = raised(error)
    text = " ".join(str(error).split())
    text = text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 3]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def brief_with_place(error: BaseException) -> str:
    """Returns type, text and place of an error: `KeyError: 'speed' (game.py:8, in __init__)`."""
    where = place(error)
    return f"{brief(error)} ({where})" if where else brief(error)


def is_of_environment(error: BaseException) -> bool:
    """Returns whether code that Penstock calls as an environment has raised ``error``.

    That is so if the innermost frame of Penstock calls environments, and has called other code.
    """
    modules = [
        str(frame.f_globals.get("__name__", ""))
        for frame, _ in traceback.walk_tb(raised(error).__traceback__)
    ]
    ours = [n for n, module in enumerate(modules) if module.startswith("penstock.")]
    return bool(ours) and ours[-1] < len(modules) - 1 and modules[ours[-1]].startswith(ENVIRONMENTS)


def users_traceback(error: BaseException) -> str:
    """Returns an error and its causes as Python prints them, with frames of the user's code only.

    The frames before the user's first one, and those of Penstock and gymnasium, are left out. The
    text is empty if the error has no frame of the user's code; a SyntaxError needs none, as it
    names the line itself.
    """
    error = raised(error)
    shown = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = shown
    each: BaseException | None = error
    while part is not None and each is not None:
        part.stack = traceback.StackSummary.extract(_users_frames(each))
        each = each.__cause__ or each.__context__
        part = part.__cause__ or part.__context__
    is_told = bool(shown.stack) or isinstance(error, SyntaxError)
    return "".join(shown.format()).rstrip() if is_told else ""


def users_error(text: str, error: BaseException) -> UserError:
    """The mistake that ``text`` explains, with the frames of the user's code that raised
    ``error``."""
    explained = UserError(text)
    explained.traceback = users_traceback(error)
    return explained


def exit_refused(what: str, error: SystemExit) -> UserError:
    """Returns the UserError for user's code that called sys.exit, which ends the process it is in.

    ``what`` names the code at the beginning of the sentence.
    """
    code = "" if error.code is None else repr(error.code)
    where = place(error)
    at = f" at {where}" if where else ""
    return users_error(
        f"{what} called sys.exit({code}){at}, which ends the process that runs it; raise an "
        "exception that says what is wrong",
        error,
    )


def place_of(frame: FrameType) -> str:
    """Returns the place, as of `place`, where a thread is whose innermost frame is ``frame``."""
    return _innermost(reversed(list(traceback.walk_stack(frame))))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """``frames`` with their lines, the outermost first."""
    places: dict[bool, str] = {}  # by whether the code is an installed package
    for frame, line in frames:
        if _is_users(frame):
            path = Path(frame.f_code.co_filename)
            installed = not INSTALLED.isdisjoint(path.parts)
            places[installed] = f"{path.name}:{line}, in {frame.f_code.co_name}"
    return places.get(False) or places.get(True, "")


def _users_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Returns the frames of an error's traceback that a user is shown, with their lines.

    They are those from the user's first one on, without frames of `OWN_PACKAGES`. Frames of
    Python's library stay, as the user's code has called it.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    begin = next((n for n, (frame, _) in enumerate(frames) if _is_users(frame)), len(frames))
    return [each for each in frames[begin:] if package_of(each[0]) not in OWN_PACKAGES]


def _is_users(frame: FrameType) -> bool:
    """Returns whether a frame is of the user's code or of a library that it uses."""
    package = package_of(frame)
    return package not in OWN_PACKAGES and package not in sys.stdlib_module_names


def package_of(frame: FrameType) -> str:
    """Returns the name of the outermost package that contains a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

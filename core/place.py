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
    return _innermost(traceback.walk_tb(original_error(error).__traceback__))


def original_error(error: BaseException) -> BaseException:
    """Returns the error that the user's code has raised.

    It is ``error`` itself but in one case: Python makes a RuntimeError of a StopIteration that
    leaves a generator (PEP 479). Then it is the StopIteration.
    """
    cause = error.__cause__
    is_converted = isinstance(error, RuntimeError) and isinstance(cause, StopIteration)
    return cause if is_converted and cause is not None else error


def brief(error: BaseException) -> str:
    """Returns type and text of an error on one line: `KeyError: 'speed'`."""
    error = original_error(error)
    text = " ".join(str(error).split())
    if len(text) > TEXT_CHARS:
        text = f"{text[: TEXT_CHARS - 3]}..."
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
        for frame, _ in traceback.walk_tb(original_error(error).__traceback__)
    ]
    own_frames = [n for n, module in enumerate(modules) if module.startswith("penstock.")]
    if not own_frames:
        return False

    innermost = own_frames[-1]
    has_called_other_code = innermost < len(modules) - 1
    return has_called_other_code and modules[innermost].startswith(ENVIRONMENTS)


def users_traceback(error: BaseException) -> str:
    """Returns an error and its causes as Python prints them, with frames of the user's code only.

    The frames before the user's first one, and those of Penstock and gymnasium, are left out. The
    text is empty if the error has no frame of the user's code; a SyntaxError needs none, as it
    names the line itself.
    """
    error = original_error(error)
    printed = traceback.TracebackException.from_exception(error)

    # Replace the stack of the error and of each of its causes. Both chains have the same links.
    printed_link: traceback.TracebackException | None = printed
    error_link: BaseException | None = error
    while printed_link is not None and error_link is not None:
        printed_link.stack = traceback.StackSummary.extract(_users_frames(error_link))
        error_link = error_link.__cause__ or error_link.__context__
        printed_link = printed_link.__cause__ or printed_link.__context__

    if not printed.stack and not isinstance(error, SyntaxError):
        return ""
    return "".join(printed.format()).rstrip()


def users_error(text: str, error: BaseException) -> UserError:
    """Returns a UserError with ``text`` and the traceback of the user's code that raised ``error``.

    ``text`` is a sentence that explains the mistake.
    """
    mistake = UserError(text)
    mistake.traceback = users_traceback(error)
    return mistake


def exit_refused(what: str, error: SystemExit) -> UserError:
    """Returns the UserError for user's code that called sys.exit, which ends the process it is in.

    ``what`` names the code at the beginning of the sentence.
    """
    code = "" if error.code is None else repr(error.code)
    where = place(error)
    place_clause = f" at {where}" if where else ""

    text = (
        f"{what} called sys.exit({code}){place_clause}, which ends the process that runs it; raise "
        "an exception that says what is wrong"
    )
    return users_error(text, error)


def place_of(frame: FrameType) -> str:
    """Returns the place, as of `place`, where a thread is whose innermost frame is ``frame``."""
    return _innermost(reversed(list(traceback.walk_stack(frame))))


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns the place of the innermost frame of the user's own code, or else of a library.

    ``frames`` are frames with their lines, the outermost first.
    """
    own_place = ""
    library_place = ""
    for frame, line in frames:
        if not _is_users(frame):
            continue

        path = Path(frame.f_code.co_filename)
        text = f"{path.name}:{line}, in {frame.f_code.co_name}"
        if INSTALLED.isdisjoint(path.parts):
            own_place = text
        else:
            library_place = text
    return own_place or library_place


def _users_frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """Returns the frames of an error's traceback that a user is shown, with their lines.

    They are those from the user's first one on, without frames of `OWN_PACKAGES`. Frames of
    Python's library stay, as the user's code has called it.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    first = next((n for n, (frame, _) in enumerate(frames) if _is_users(frame)), len(frames))
    return [
        (frame, line) for frame, line in frames[first:] if package_of(frame) not in OWN_PACKAGES
    ]


def _is_users(frame: FrameType) -> bool:
    """Returns whether a frame is of the user's code or of a library that it uses."""
    package = package_of(frame)
    return package not in OWN_PACKAGES and package not in sys.stdlib_module_names


def package_of(frame: FrameType) -> str:
    """Returns the name of the outermost package that contains a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

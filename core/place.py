"""The place in the user's own code where a thread is, or an error arose: `game.py:8, in step`; and
the traceback of an error by the frames of that code alone."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from penstock.configs.errors import UserError

OWN_PACKAGES = ("__main__", "penstock", "gymnasium", "typer", "click")
INSTALLED = {"site-packages", "dist-packages"}
ENVIRONMENTS = "penstock.envs."  # modules from which environments are called
TEXT_CHARS = 300  # of an error's text in a sentence


def place(error: BaseException) -> str:
    """The innermost line of the user's own code in an error's traceback.

    Else that of a library which the user chose; empty where there is neither.
    """
    return _innermost(traceback.walk_tb(raised(error).__traceback__))


def raised(error: BaseException) -> BaseException:
    """The error that the user's code has raised: a StopIteration, where a generator that it passed
    through has made a RuntimeError of it (PEP 479)."""
    cause = error.__cause__
    is_converted = isinstance(error, RuntimeError) and isinstance(cause, StopIteration)
    return cause if is_converted and cause is not None else error


def brief(error: BaseException) -> str:
    """Type and text of an error on one line: `KeyError: 'speed'`."""
    error = raised(error)
    text = " ".join(str(error).split())
    text = text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 3]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def brief_with_place(error: BaseException) -> str:
    """The same with its place: `KeyError: 'speed' (game.py:8, in __init__)`."""
    where = place(error)
    return f"{brief(error)} ({where})" if where else brief(error)


def is_of_environment(error: BaseException) -> bool:
    """Whether code that Penstock calls as an environment has raised an error."""
    modules = [
        str(frame.f_globals.get("__name__", ""))
        for frame, _ in traceback.walk_tb(raised(error).__traceback__)
    ]
    ours = [n for n, module in enumerate(modules) if module.startswith("penstock.")]
    return bool(ours) and ours[-1] < len(modules) - 1 and modules[ours[-1]].startswith(ENVIRONMENTS)


def users_traceback(error: BaseException) -> str:
    """An error as Python prints it, from the first frame of the user's code on, without those of
    Penstock and gymnasium; its causes likewise. Empty where it has no such frame."""
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
    """The mistake of the user's code that ends the process in which it is called."""
    code = "" if error.code is None else repr(error.code)
    where = place(error)
    at = f" at {where}" if where else ""
    return users_error(
        f"{what} called sys.exit({code}){at}, which ends the process that runs it; raise an "
        "exception that says what is wrong",
        error,
    )


def place_of(frame: FrameType) -> str:
    """The same for the present stack of a thread, by its innermost frame."""
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
    """The frames of a traceback from the user's first one on, and their lines."""
    frames = list(traceback.walk_tb(error.__traceback__))
    begin = next((n for n, (frame, _) in enumerate(frames) if _is_users(frame)), len(frames))
    return [each for each in frames[begin:] if package_of(each[0]) not in OWN_PACKAGES]


def _is_users(frame: FrameType) -> bool:
    package = package_of(frame)
    return package not in OWN_PACKAGES and package not in sys.stdlib_module_names


def package_of(frame: FrameType) -> str:
    """The name of the outermost package that contains a frame's code."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

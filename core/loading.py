"""Loads code that the user names, also from the current folder, and explains why that fails."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from gymnasium.error import DependencyNotInstalled

from penstock.configs.errors import UserError
from penstock.core.place import brief_with_place, exit_refused, users_error

# The package to install for a module whose package has another name.
_PACKAGES = {
    "Box2D": "penstock[box2d]",
    "ale_py": "penstock[atari]",
    "cv2": "opencv-python",
    "envpool": "penstock[envpool]",
    "flax": "gymnasium[jax]",
    "jax": "gymnasium[jax]",
    "minatar": "penstock[minatar]",
    "mpe2": "penstock[pettingzoo]",
    "mujoco": "penstock[mujoco]",
    "pettingzoo": "penstock[pettingzoo]",
    "pygame": "penstock[box2d]",
    "vizdoom": "penstock[vizdoom]",
}
# Extras of Penstock that gymnasium has too, with other versions.
_OWN_EXTRAS = ("box2d", "mujoco")


def import_module(name: str, purpose: str, setting: str = "env.kwargs") -> ModuleType:
    """Import the module ``name``, which may be in the current folder.

    Args:
        name: the module's full name.
        purpose: what the module is for; a message begins with it.
        setting: the option where the mistake may be, as of `explaining_errors`.

    Raises:
        UserError: there is no such module, or its code failed.
    """
    with explaining_errors(purpose, setting), _without_arguments():
        _find_users_modules()
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Another module, which this one imports, may be missing; `explaining_errors` says so.
            absent = error.name
            if not absent or not f"{name}.".startswith(f"{absent}."):
                raise

            if name.endswith(".py"):
                hint = f"name it without .py: {name.removesuffix('.py')}"
            else:
                hint = _near_files(absent)
                hint = hint or "correct its name, start in its folder, or install it"
            raise UserError(
                f"{purpose}: there is no module {absent} in {Path.cwd()} or installed; {hint}"
            ) from error


def load(path: str, purpose: str, setting: str = "env.kwargs") -> Callable[..., Any]:
    """Load the class or function that ``path`` names as `module:name`.

    ``purpose`` and ``setting`` are as of `import_module`.

    Raises:
        UserError: the module cannot be imported, or has no class or function of that name.
    """
    module_name, _, name = path.partition(":")
    module = import_module(module_name, purpose, setting)
    value: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(value):
        hint = shadowed_file(module) or nearest(name, callables(module))
        raise UserError(f"{purpose}: module {module_name} has no class or function {name}; {hint}")
    return value


def shadowed_file(module: ModuleType) -> str:
    """Returns a clause on a file of the current folder that another module of its name hides.

    It is empty if there is no such file, or if ``module`` was imported from it.
    """
    file = getattr(module, "__file__", None)
    path = Path(f"{module.__name__.replace('.', '/')}.py")
    if not path.is_file() or (file is not None and path.samefile(file)):
        return ""
    return f"it is {file or 'built into Python'}, and not {path} of this folder; rename {path}"


def callables(module: ModuleType) -> list[str]:
    """Returns the names of a module's classes and functions."""
    return [name for name, value in vars(module).items() if callable(value)]


def nearest(name: str, names: Collection[str]) -> str:
    """Returns a clause that suggests what of ``names`` may have been meant by ``name``.

    Without a similar one it lists all of them, unless they are too many for a sentence.
    """
    by_lowercase = {candidate.lower(): candidate for candidate in sorted(names)}
    matches = get_close_matches(name.lower(), by_lowercase, n=3)
    if matches:
        return f"the nearest is {' or '.join(by_lowercase[match] for match in matches)}"
    if 0 < len(names) <= 30:
        return f"choose from {', '.join(sorted(names))}"
    return "correct its name"


def parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function or a class; none if Python cannot inspect it."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def check_keywords(
    function: Callable[..., Any],
    keywords: Collection[str],
    purpose: str,
    *,
    more: Collection[str] = (),
    reserved: Mapping[str, str] | None = None,
) -> None:
    """Refuse keywords that a function does not take.

    A function that takes ``**kwargs``, or that Python cannot inspect, takes any.

    Args:
        function: a function or a class.
        keywords: the names of the keywords that the user has set.
        purpose: what the function is for; a message begins with it.
        more: names that it takes besides its own parameters.
        reserved: as of `check_options`.

    Raises:
        UserError: a keyword is refused.
    """
    # The names that the function takes; None: any.
    own_parameters = parameters(function)
    takes_any = not own_parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in own_parameters.values()
    )
    takes = None if takes_any else {*own_parameters, *more} - {"self"}

    check_options(keywords, takes, purpose, reserved or {})


def check_options(
    options: Collection[str],
    takes: Collection[str] | None,
    purpose: str,
    reserved: Mapping[str, str],
) -> None:
    """Refuse options that the user cannot set.

    Args:
        options: the names of the options that the user has set.
        takes: the names of the options that exist; None: any.
        purpose: what the options are for; a message begins with it.
        reserved: options that Penstock passes itself, each with a clause on what to set instead.

    Raises:
        UserError: one of ``options`` is reserved, or does not exist.
    """
    for name in options:
        if name in reserved:
            raise UserError(f"{purpose}: {name} is not set here; {reserved[name]}")
        if takes is not None and name not in takes:
            settable = set(takes) - set(reserved)
            raise UserError(f"{purpose}: there is no option {name}; {nearest(name, settable)}")


@contextmanager
def explaining_errors(purpose: str, setting: str = "env.kwargs") -> Iterator[None]:
    """Turn an exception of the user's code in the ``with`` block into a UserError.

    Its message is one sentence; the exception stays attached as its cause.

    Args:
        purpose: what the code is for; the message begins with it.
        setting: the option where the mistake may be.

    Raises:
        UserError: the code raised an exception, called sys.exit, or lacks a package.
    """
    try:
        yield
    except UserError:
        raise
    except SystemExit as error:
        raise exit_refused(purpose, error) from error
    except DependencyNotInstalled as error:
        text = " ".join(str(error).split())
        for extra in _OWN_EXTRAS:
            text = text.replace(f"gymnasium[{extra}]", f"penstock[{extra}]")
        raise UserError(f"{purpose}: {text}, then try again") from error
    except ModuleNotFoundError as error:
        raise users_error(f"{purpose}: {_missing(error)}", error) from error
    except Exception as error:
        raise users_error(
            f"{purpose} failed with {brief_with_place(error)}; correct {setting}, or the code that "
            "raised it",
            error,
        ) from error


@contextmanager
def _without_arguments() -> Iterator[None]:
    """Hide the arguments of this program, which are not meant for a module that parses them."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def _find_users_modules() -> None:
    """Let imports find modules in the current folder, after all that are installed.

    It is done only to import what the user has named or allowed. A current folder may have come
    from elsewhere, as a run does, and libraries try to import modules that are not installed.
    """
    with suppress(FileNotFoundError):  # a folder that was removed holds no module
        folder = os.getcwd()
        if folder not in sys.path and "" not in sys.path:
            sys.path.append(folder)


def _near_files(module: str) -> str:
    """Returns a clause that suggests modules of the current folder with a similar name.

    It is empty if there is none, or if the folder has a module of that very name.
    """
    files = {path.stem: path.name for path in Path().glob("*.py")}
    files |= {path.parent.name: f"{path.parent.name}/" for path in Path().glob("*/__init__.py")}
    top_module = module.partition(".")[0]
    if top_module in files:
        return ""

    matches = get_close_matches(top_module, files, n=3, cutoff=0.7)
    if not matches:
        return ""
    return f"the nearest there is {' or '.join(files[name] for name in matches)}"


def _missing(error: ModuleNotFoundError) -> str:
    """Returns a clause on what to do about a missing module: correct its name, or install it."""
    name = error.name or str(error)
    module = name.partition(".")[0]
    if module not in _PACKAGES and (hint := _near_files(module)):
        return f"there is no module {name} in {Path.cwd()} or installed; {hint}"
    package = _PACKAGES.get(module, module)
    return f'{module} is not installed; run `pip install "{package}"`, then try again'

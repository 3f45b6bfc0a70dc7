"""Rendering environments without a display, and the errors of missing libraries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from traceback import walk_tb

from gymnasium.error import DependencyNotInstalled

from penstock.configs.errors import UserError
from penstock.envs.loading import explained

INSTALL = 'pip install "penstock[video]"'
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")
DISPLAYS = (*SCREENS, "SDL_VIDEODRIVER")

_MUJOCO_GL = "MUJOCO_GL"
_HEADLESS = {"egl": "EGL", "osmesa": "OSMesa"}  # what MuJoCo calls it, and the library
_OPENGL = (
    "OpenGL.",
    "gymnasium.envs.mujoco.mujoco_rendering",
    "mujoco.egl",
    "mujoco.osmesa",
    "mujoco.rendering",
)


def do_without_display() -> None:
    """Tell the libraries that games draw with, if there is no display; before they are imported."""
    if not any(os.environ.get(name) for name in DISPLAYS):
        os.environ["SDL_VIDEODRIVER"] = "dummy"  # or pygame looks for a display, and complains
    if _MUJOCO_GL in os.environ or any(os.environ.get(name) for name in SCREENS):
        return
    found = [name for name, library in _HEADLESS.items() if find_library(library)]
    if found:
        os.environ[_MUJOCO_GL] = found[0]  # or MuJoCo looks for a display, and fails


@contextmanager
def drawing(env_id: str) -> Iterator[None]:
    """Turn the error of a missing rendering library into one sentence; other errors pass unchanged.

    Raises UserError.
    """
    try:
        yield
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = error.__cause__ or error
        if isinstance(missing, ImportError) and missing.name == "pygame":
            raise UserError(
                f"{env_id} draws itself with pygame, which is not installed; run `{INSTALL}`"
            ) from error
        with explained(f"drawing {env_id}"):
            raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if cause is not None and _of_opengl(cause):
            raise UserError(_no_opengl(env_id, cause)) from error
        raise


def _of_opengl(error: BaseException) -> bool:
    """Whether MuJoCo's way of drawing raised it."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(module.startswith(_OPENGL) for module in modules)


def _no_opengl(env_id: str, error: BaseException) -> str:
    how = f"{_MUJOCO_GL}={os.environ[_MUJOCO_GL]}" if _MUJOCO_GL in os.environ else "no display"
    why = " ".join(str(error).split()) or type(error).__name__
    return (
        f"MuJoCo cannot draw {env_id} with {how} ({why}); without a display it needs EGL, on "
        f"Debian and Ubuntu apt install libegl1 libgl1, and {_MUJOCO_GL}=egl or unset"
    )

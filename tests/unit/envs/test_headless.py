"""Rendering without a display, and the errors for missing libraries."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.envs import make, rendering


@pytest.mark.parametrize(
    ("given", "libraries", "expected"),
    [
        ({}, ("EGL", "OSMesa"), "egl"),
        ({}, ("OSMesa",), "osmesa"),
        ({}, (), None),
        ({"MUJOCO_GL": "glfw"}, ("EGL",), "glfw"),
        ({"DISPLAY": ":0"}, ("EGL",), None),
        ({"SDL_VIDEODRIVER": "dummy"}, ("EGL",), "egl"),
    ],
)
def test_mujoco_without_a_display_uses_the_available_backend(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    libraries: tuple[str, ...],
    expected: str | None,
) -> None:
    for name in (*rendering.DISPLAYS, "MUJOCO_GL"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendering, "find_library", lambda name: name if name in libraries else None)
    rendering.do_without_display()
    assert os.environ.get("MUJOCO_GL") == expected
    assert ("SDL_VIDEODRIVER" in os.environ) == ("DISPLAY" not in given)


def test_missing_pygame_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)  # as if it were not installed
    game = make(resolve("cartpole").env, 1, filmed=True)
    game.reset_into(0, np.empty((1, 4), np.float32))
    with pytest.raises(UserError) as error, rendering.drawing("CartPole-v1"):
        game.pictures()
    game.close()
    assert str(error.value) == (
        "CartPole-v1 draws itself with pygame, which is not installed; "
        'run `pip install "penstock[video]"`'
    )


MUJOCO = """
from penstock.configs.load import resolve
from penstock.envs import make
from penstock.envs.rendering import drawing
with drawing("HalfCheetah-v5"):
    make(resolve("halfcheetah").env, 1, filmed=True)
"""
NEEDED = (
    "; without a display it needs EGL, on Debian and Ubuntu apt install libegl1 libgl1, and "
    "MUJOCO_GL=egl or unset"
)


@pytest.mark.slow
def test_mujoco_that_cannot_draw_is_refused_with_its_requirements() -> None:
    """Which it finds out when it is imported."""
    pytest.importorskip("mujoco")
    command = [sys.executable, "-c", MUJOCO]
    environment = {**os.environ, "MUJOCO_GL": "paper"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stderr.splitlines()[-1].partition("UserError: ")[2]
    assert said.startswith("MuJoCo cannot draw HalfCheetah-v5 with MUJOCO_GL=paper (invalid value")
    assert said.endswith(f"){NEEDED}")


def test_mujoco_without_opengl_is_refused_when_drawing_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    with pytest.raises(UserError) as error, rendering.drawing("Game-v0"):
        exec("raise ImportError('no  EGL\\ndevice')", {"__name__": "mujoco.egl"})
    said = "MuJoCo cannot draw Game-v0 with no display (no EGL device)"
    assert str(error.value) == f"{said}{NEEDED}"


def test_errors_of_the_environment_itself_pass_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), rendering.drawing("Game-v0"):
        raise ZeroDivisionError
    with pytest.raises(UserError, match=r"^wrong kwargs$"), rendering.drawing("Game-v0"):
        raise UserError("wrong kwargs") from TypeError()

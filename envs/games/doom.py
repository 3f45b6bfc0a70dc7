"""Doom through ViZDoom: `penstock/Doom-v0`, any of its scenarios, in gray frames of half its size.

ViZDoom runs each game in a separate process. Without further measures that process outlives a
killed parent, 10 MB of shared memory outlive both, and files appear in the current folder. Here the
process is killed with its parent, and its memory and its folder are unlinked as soon as it has
opened them.

Rewards are the scenario's own. An episode that ends by the clock is truncated. ViZDoom shows
nothing after an episode's end, so the final observation is the one before.
"""

from __future__ import annotations

import itertools
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import vizdoom
from gymnasium.spaces import Box, Discrete

Frame = npt.NDArray[np.uint8]

# The names of ViZDoom's shared memory, as the kernel lists them.
SHARED_MEMORY = re.compile(r"/dev/shm/ViZDoom(?:SM|MQCtr|MQDoom)[0-9A-Za-z]{10}$", re.MULTILINE)
# The size of an observation is half that of ViZDoom's smallest screen.
HEIGHT = 60
WIDTH = 80

# A parent's death signal holds over exec, so a small program sets it and then becomes Doom.
_START = """#!/bin/sh
cd {folder} && exec {python} -ISc '
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
' {doom} "$@"
"""


class DoomEnv(gymnasium.Env[Frame, np.integer[Any]]):
    """One game. Observations are uint8 [1, 60, 80], actions combinations of buttons."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35}  # noqa: RUF012

    def __init__(
        self,
        scenario: str = "basic",
        frame_skip: int = 4,
        buttons_at_once: int = 1,
        render_mode: str | None = None,
    ) -> None:
        """Start a game in a process of its own.

        Args:
            scenario: name of a scenario of ViZDoom, or path of a `.cfg`.
            frame_skip: tics (1/35 s) for which an action's buttons are held.
            buttons_at_once: an action is any set of at most as many buttons, the empty one too.
            render_mode: "rgb_array" draws in colour, for `render`; observations stay the same.

        Raises:
            ValueError: for a scenario that does not exist.
        """
        path = Path(scenario)
        if path.suffix != ".cfg":
            path = Path(vizdoom.scenarios_path) / f"{scenario}.cfg"
        if not path.is_file():
            raise ValueError(f"there is no scenario {scenario}; choose from {', '.join(_names())}")

        self.render_mode = render_mode
        self.frame_skip = frame_skip
        self.metadata = {**self.metadata, "render_fps": 35 / frame_skip}
        screen_format = vizdoom.ScreenFormat.GRAY8
        if render_mode:
            screen_format = vizdoom.ScreenFormat.RGB24
        self._game = game = vizdoom.DoomGame()
        game.load_config(str(path))
        game.set_mode(vizdoom.Mode.PLAYER)
        game.set_window_visible(False)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(screen_format)

        # Each action says of every button whether it is held, as ViZDoom wants it.
        buttons = range(game.get_available_buttons_size())
        button_sets = [
            button_set
            for size in range(buttons_at_once + 1)
            for button_set in itertools.combinations(buttons, size)
        ]
        self._actions = [
            [float(button in button_set) for button in buttons] for button_set in button_sets
        ]

        self.observation_space = Box(0, 255, (1, HEIGHT, WIDTH), np.uint8)
        self.action_space = Discrete(len(button_sets))
        # The last observation, which is also the final one of an episode.
        self._last = np.zeros((1, HEIGHT, WIDTH), np.uint8)
        _start(game)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._game.set_seed(seed)
        self._game.new_episode()
        return self._observe(), {}

    def step(self, action: np.integer[Any]) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        reward = self._game.make_action(self._actions[action], self.frame_skip)
        over = self._game.is_episode_finished()
        truncated = over and self._game.is_episode_timeout_reached()
        terminated = over and not truncated
        return self._observe(), reward, terminated, truncated, {}

    def render(self) -> Any:
        state = self._game.get_state() if self.render_mode else None
        return None if state is None else np.array(state.screen_buffer)

    def close(self) -> None:
        self._game.close()

    def _observe(self) -> Frame:
        """Returns the observation, uint8 ``[1, 60, 80]``; the last one after an episode's end."""
        state = self._game.get_state()
        # Always a new array: gymnasium complains of the same one, as callers may keep it.
        if state is None:
            self._last = self._last.copy()
        else:
            self._last = _halved(state.screen_buffer)[None]
        return self._last


def _start(game: vizdoom.DoomGame) -> None:
    """Start ViZDoom, and remove the names of its shared memory.

    The memory exists until both sides have ended, however they end.
    """
    mapped_before = _mapped()
    with tempfile.TemporaryDirectory(prefix="penstock-doom-") as folder:
        doom = Path(vizdoom.__file__).with_name("vizdoom")
        values = {"folder": folder, "python": sys.executable, "doom": str(doom)}
        quoted_values = {name: shlex.quote(value) for name, value in values.items()}
        script = Path(folder, "doom")
        script.write_text(_START.format_map(quoted_values))
        script.chmod(0o700)

        game.set_vizdoom_path(str(script))
        game.set_doom_config_path("/dev/null")
        game.init()

    for path in _mapped() - mapped_before:
        path.unlink(missing_ok=True)


def _mapped() -> set[Path]:
    """Returns ViZDoom's shared memory that this process has mapped, by ViZDoom's names."""
    names = SHARED_MEMORY.findall(Path("/proc/self/maps").read_text())
    return {Path(name) for name in names}


def _halved(screen: Frame) -> Frame:
    """Returns the mean of each 2x2 pixels of a screen in gray.

    Args:
        screen: uint8 ``[height, width]``, or ``[height, width, 3]`` in colour.
    """
    gray = _gray(screen) if screen.ndim == 3 else screen
    row_sums = gray[::2].astype(np.uint16)
    row_sums += gray[1::2]
    means = row_sums[:, ::2] + row_sums[:, 1::2]
    means >>= 2
    return means.astype(np.uint8)


def _gray(screen: Frame) -> Frame:
    """Returns a screen in gray as ViZDoom's own gray screen, to the last bit.

    The order of the sum matters.
    """
    red, green, blue = np.moveaxis(screen, -1, 0)
    gray: Frame = (red * 0.21 + green * 0.72 + blue * 0.07).astype(np.uint8)
    return gray


def _names() -> list[str]:
    """Returns the names of ViZDoom's scenarios."""
    return sorted(path.stem for path in Path(vizdoom.scenarios_path).glob("*.cfg"))

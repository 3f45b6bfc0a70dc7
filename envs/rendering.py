"""Pictures of environments for videos, apart from the observations of the policy.

The policy always plays in the environment that it was trained in, so that a video shows its true
behaviour. An environment that can render itself is asked to (`render_mode="rgb_array"`). Atari's
vector form cannot: a second emulator plays along, given the same seed and actions, and its colour
screen is filmed.

`do_without_display` and `drawing` are for hosts without a display or without the libraries that an
environment renders with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes.util import find_library
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.error import DependencyNotInstalled
from gymnasium.vector import VectorEnv, VectorWrapper

from penstock.configs.errors import UserError
from penstock.core.loading import explaining_errors

if TYPE_CHECKING:
    from ale_py import AtariVectorEnv

RENDER_MODE = "rgb_array"
ATARI_FRAMES_PER_S = 60
# Steps per second of an environment whose metadata says nothing.
DEFAULT_STEPS_PER_S = 30.0
# Stands for seed 0, which ale-py takes for no seed at all.
NO_SEED = 2**30

INSTALL = 'pip install "penstock[video]"'
# Environment variables that name a display.
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY")
# Those that tell pygame where to draw.
DISPLAYS = (*SCREENS, "SDL_VIDEODRIVER")

# The environment variable that tells MuJoCo how to draw.
_MUJOCO_GL = "MUJOCO_GL"
# Ways to draw without a display, by MuJoCo's name, each with its library.
_HEADLESS = {"egl": "EGL", "osmesa": "OSMesa"}
# Beginnings of the names of modules whose errors are about OpenGL.
_OPENGL = (
    "OpenGL.",
    "gymnasium.envs.mujoco.mujoco_rendering",
    "mujoco.egl",
    "mujoco.osmesa",
    "mujoco.rendering",
)

Picture = npt.NDArray[np.uint8]


def draws(creator: object) -> bool:
    """Returns whether a class, or an environment, declares that it renders pictures."""
    metadata: Any = getattr(creator, "metadata", None)
    return isinstance(metadata, dict) and RENDER_MODE in metadata.get("render_modes", ())


def draws_otherwise(creator: object) -> bool:
    """Returns whether a class, or an environment, declares only render modes such as text."""
    metadata: Any = getattr(creator, "metadata", None)
    modes = metadata.get("render_modes", ()) if isinstance(metadata, dict) else ()
    return bool(modes) and RENDER_MODE not in modes


def pictures(vector: VectorEnv) -> list[Picture]:
    """Returns pictures of the last step of a vector of one environment.

    Returns:
        uint8 ``[H, W, 3]`` each, oldest first; empty if the vector was not made to render.

    Raises:
        UserError: if the environment renders a value that is no picture.
    """
    if getattr(vector, "render_mode", None) != RENDER_MODE or draws_otherwise(vector):
        return []

    try:
        rendered = vector.render()
    except NotImplementedError:
        return []
    if rendered is None:
        return []
    return [_checked(np.asarray(picture)) for picture in rendered if picture is not None]


def pictures_per_s(vector: VectorEnv) -> float:
    """Returns the pictures per second at the speed for human players."""
    steps_per_s = float(vector.metadata.get("render_fps") or DEFAULT_STEPS_PER_S)
    return steps_per_s * float(getattr(vector, "pictures_per_step", 1))


def _checked(picture: npt.NDArray[Any]) -> Picture:
    """Returns a picture as uint8. Raises UserError for a value that is no picture."""
    if picture.dtype.kind not in "ui" or picture.ndim != 3 or picture.shape[2] != 3:
        raise UserError(
            f"render() of the environment returned {picture.dtype} of shape {[*picture.shape]}, "
            "and a picture is uint8 of shape [height, width, 3]; correct it"
        )
    return picture.astype(np.uint8, copy=False)


def do_without_display() -> None:
    """Tell the libraries that environments draw with to do without a display, if there is none.

    Call it before they are imported.
    """
    has_screen = any(os.environ.get(name) for name in SCREENS)

    # Otherwise pygame looks for a display, and complains.
    if not any(os.environ.get(name) for name in DISPLAYS):
        os.environ["SDL_VIDEODRIVER"] = "dummy"

    # Otherwise MuJoCo looks for a display, and fails.
    if _MUJOCO_GL in os.environ or has_screen:
        return
    installed = [name for name, library in _HEADLESS.items() if find_library(library)]
    if installed:
        os.environ[_MUJOCO_GL] = installed[0]


@contextmanager
def drawing(env_id: str) -> Iterator[None]:
    """Explain an error in the ``with`` block that comes from a missing rendering library.

    Other errors pass unchanged.

    Raises:
        UserError: one sentence, which says what to install.
    """
    try:
        yield
    except (DependencyNotInstalled, ModuleNotFoundError) as error:
        missing = error.__cause__ or error
        if isinstance(missing, ImportError) and missing.name == "pygame":
            raise UserError(
                f"{env_id} draws itself with pygame, which is not installed; run `{INSTALL}`"
            ) from error
        with explaining_errors(f"drawing {env_id}"):
            raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, UserError) else error
        if cause is not None and _is_of_opengl(cause):
            raise UserError(_no_opengl(env_id, cause)) from error
        raise


def _is_of_opengl(error: BaseException) -> bool:
    """Returns whether the error was raised where MuJoCo draws."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return any(module.startswith(_OPENGL) for module in modules)


def _no_opengl(env_id: str, error: BaseException) -> str:
    """Returns the sentence about an error where MuJoCo draws."""
    how = f"{_MUJOCO_GL}={os.environ[_MUJOCO_GL]}" if _MUJOCO_GL in os.environ else "no display"
    why = " ".join(str(error).split()) or type(error).__name__
    return (
        f"MuJoCo cannot draw {env_id} with {how} ({why}); without a display it needs EGL, on "
        f"Debian and Ubuntu apt install libegl1 libgl1, and {_MUJOCO_GL}=egl or unset"
    )


class FilmedAtari(VectorWrapper[Any, Any, Any, Any, Any]):
    """One game of `AtariVectorEnv`, whose `render` returns all frames of a step in colour.

    A second emulator plays the same game with the same seed and actions. After each step both must
    agree on the frame number, the lives and the reward.
    """

    render_mode = RENDER_MODE

    def __init__(self, vector: AtariVectorEnv, options: Mapping[str, Any]) -> None:
        """Take over ``vector``, which was made with ``options``."""
        from ale_py import Action, ALEInterface

        super().__init__(vector)
        steps_per_s = ATARI_FRAMES_PER_S / options["frameskip"]
        self.metadata = {**vector.metadata, "render_fps": steps_per_s}
        self.pictures_per_step = options["frameskip"]
        self._options = options

        # The second emulator knows a game's actions once the game is loaded.
        self._ale = ALEInterface()
        self._load(NO_SEED)
        if options["full_action_space"]:
            self._actions = self._ale.getLegalActionSet()
        else:
            self._actions = self._ale.getMinimalActionSet()
        self._noop = Action.NOOP
        self._fire = Action.FIRE
        # Whether a reset presses fire.
        self._fires = options["use_fire_reset"] and Action.FIRE in self._actions

        self._seeded = False
        # Whether the last step ended the episode.
        self._over = False
        # Frames of the episode, without those of its reset.
        self._elapsed = 0
        # Frames of the last step, oldest first.
        self._frames: list[Picture] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset both emulators. The first reset needs a seed, which they share."""
        if seed is not None:
            seed = seed or NO_SEED
            self._load(seed)
            self._seeded = True
        elif not self._seeded:
            raise ValueError("a game that is filmed needs a seed, which two emulators share")

        observations, info = self.env.reset(seed=seed, options=options)
        self._over = False
        self._begin(info)
        return observations, info

    def step(self, actions: npt.NDArray[Any]) -> Any:
        """Step both emulators. After an episode's end both only reset."""
        observations, reward, terminated, truncated, info = self.env.step(actions)
        if self._over:
            self._begin(info)
        else:
            self._act(choice=int(actions[0]), reward=float(reward[0]), info=info)
        self._over = bool(terminated[0] or truncated[0])
        return observations, reward, terminated, truncated, info

    def render(self) -> tuple[Picture, ...]:
        """The frames of the last step, uint8 ``[210, 160, 3]`` each, oldest first."""
        return tuple(self._frames)

    def get_action_meanings(self) -> list[str]:
        """The names of the actions, in their order."""
        return [action.name.lower() for action in self._actions]

    def _load(self, seed: int) -> None:
        """Load the game into the second emulator, which plays by ``seed`` from now on."""
        from ale_py import roms

        self._ale.setFloat("repeat_action_probability", self._options["repeat_action_probability"])
        self._ale.setInt("random_seed", seed)
        self._ale.loadROM(str(roms.get_rom_path(self._options["game"])))

    def _begin(self, info: Mapping[str, Any]) -> None:
        """Begin an episode in the second emulator.

        It draws as many frames without an action as the first one has drawn.

        Args:
            info: of the first emulator's reset.
        """
        self._ale.reset_game()
        noop_frames = int(info["episode_frame_number"][0])
        if self._fires:
            self._ale.act(self._fire)
            noop_frames -= 1
        for _ in range(noop_frames):
            self._ale.act(self._noop)

        self._elapsed = 0
        self._frames = [self._ale.getScreenRGB()]
        self._check(info)

    def _act(self, *, choice: int, reward: float, info: Mapping[str, Any]) -> None:
        """Take a step in the second emulator, and film its frames.

        Args:
            choice: the action, counted from 0.
            reward: of the first emulator's step.
            info: of the first emulator's step.
        """
        episode_frames = self._options["max_num_frames_per_episode"]
        own_reward = 0.0
        self._frames = []
        for _ in range(self._options["frameskip"]):
            own_reward += self._ale.act(self._actions[choice])
            self._frames.append(self._ale.getScreenRGB())
            self._elapsed += 1
            if self._ale.game_over() or self._elapsed >= episode_frames:
                break

        self._check(info)
        if own_reward != reward:
            raise _have_diverged()

    def _check(self, info: Mapping[str, Any]) -> None:
        """Raise UserError unless both emulators have the same frame number and lives."""
        frame_number = self._ale.getEpisodeFrameNumber()
        lives = self._ale.lives()
        if (frame_number, lives) != (info["episode_frame_number"][0], info["lives"][0]):
            raise _have_diverged()


def _have_diverged() -> UserError:
    return UserError(
        "the emulator that is filmed and the one that is played have gone apart: a video would "
        "not show what was played; try another --seed, and report it with the version of ale-py"
    )

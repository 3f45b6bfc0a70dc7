"""Car racing from pixels: `penstock/CarRacing-v0`, gymnasium's CarRacing-v3 several times as fast.

Nearly all of gymnasium's time goes into drawing: 8 ms a frame, physics 0.1 ms. So skipped frames
are not drawn here, and of the 800 pieces of road and grass only those near the window are examined
one by one. The drawn picture is the same, to the last pixel.

Observations are uint8 [stack, 84, 84]: gray, without the row of indicators; an episode begins with
its first frame, repeated. Actions are two numbers in -1 ... 1: steering, then the pedals, gas above
0 and brake below. Rewards are gymnasium's, summed over the frames of a step.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.envs.box2d import car_racing
from gymnasium.spaces import Box

Frame = npt.NDArray[np.uint8]

# Pixels of an observation, each way.
SIZE = 84
# The first column of gymnasium's screen that is observed.
_LEFT = (car_racing.STATE_W - SIZE) // 2
# The weights of red, green and blue in gray, of ITU-R BT.601.
_GRAY = np.array([0.299, 0.587, 0.114], np.float32)


class CarRacing(gymnasium.Env[Frame, npt.NDArray[np.float32]]):
    """One car, on a new track in every episode."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12.5}  # noqa: RUF012

    def __init__(
        self,
        frame_skip: int = 4,
        stack: int = 3,
        max_frames: int = 1000,
        render_mode: str | None = None,
    ) -> None:
        """Make the environment.

        Args:
            frame_skip: frames (1/50 s) for which an action is held.
            stack: observed frames that an observation consists of, the newest last.
            max_frames: an episode is truncated after as many frames.
            render_mode: as of gymnasium's CarRacing.
        """
        self.render_mode = render_mode
        self.observation_space = Box(0, 255, (stack, SIZE, SIZE), np.uint8)
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)
        self.frame_skip = frame_skip
        self._max_frames = max_frames
        self._car: Any = _Car(render_mode=render_mode)

        # Frames of the episode, with those that were skipped.
        self._age = 0
        # The observation.
        self._frames = np.zeros((stack, SIZE, SIZE), np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Frame, dict[str, Any]]:
        super().reset(seed=seed)
        self._age = 0
        screen, info = self._car.reset(seed=seed)
        self._frames = np.repeat(_gray(screen)[None], len(self._frames), 0)
        return self._frames, info

    def step(
        self, action: npt.NDArray[np.float32]
    ) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        """Hold an action for some frames; only the last one is drawn."""
        steering, pedals = action
        gas = max(pedals, 0.0)
        brake = max(-pedals, 0.0)
        car_action = np.array([steering, gas, brake], np.float32)

        total_reward = 0.0
        last_frame = min(self.frame_skip, self._max_frames - self._age)
        for frame in range(1, last_frame + 1):
            self._car.unseen = frame < last_frame
            screen, reward, terminated, _, info = self._car.step(car_action)
            total_reward += float(reward)
            if terminated:
                screen = self._car.seen()
                break
        self._age += frame

        self._frames = np.concatenate([self._frames[1:], _gray(screen)[None]])
        truncated = self._age >= self._max_frames
        return self._frames, total_reward, bool(terminated), truncated, info

    def render(self) -> Any:
        return self._car.render()

    def close(self) -> None:
        self._car.close()


class _Car(car_racing.CarRacing):
    """Gymnasium's own environment, which draws less.

    Its attributes and those of gymnasium's class are in checkpoints by their names
    (`penstock.envs.saved_state`).
    """

    unseen = False
    """Whether the next steps need not draw."""

    def seen(self) -> Frame:
        """Draw the present screen, which was skipped."""
        self.unseen = False
        screen: Frame = self._render("state_pixels")
        return screen

    def reset(self, **kwargs: Any) -> Any:
        self.unseen = False
        return super().reset(**kwargs)

    def _create_track(self) -> bool:
        """Create a track; returns whether that succeeded, as gymnasium's own method.

        It lists all pieces of grass and road in the order in which they are drawn.
        """
        base: Any = super()
        succeeded: bool = base._create_track()

        tile = np.array([(1, 0), (0, 0), (0, 1), (1, 1)])
        places = [(x, y) for x in range(-20, 20, 2) for y in range(-20, 20, 2)]
        grass = [(tile + place) * car_racing.GRASS_DIM for place in places]

        # Each piece has corners and a colour, None for that of grass.
        self._pieces = [([tuple(corner) for corner in piece], None) for piece in grass]
        self._pieces += [
            ([(x, y) for x, y, *_ in corners], color) for corners, color in self.road_poly
        ]
        self._corners = np.array([corners for corners, _ in self._pieces])
        return succeeded

    def _render(self, mode: str) -> Any:
        """Draw in gymnasium's ``mode``, unless the picture is an observation that is skipped."""
        is_observed = mode == "state_pixels"
        if is_observed and self.unseen:
            return None
        self._indicators = not is_observed
        return super()._render(mode)

    def _render_road(self, zoom: float, translation: tuple[float, float], angle: float) -> None:
        """Draw the field, and those pieces of grass and road that may be in the window."""
        end = car_racing.PLAYFIELD
        field = [(end, end), (end, -end), (-end, -end), (-end, end)]
        view = (zoom, translation, angle)
        draw: Any = self._draw_colored_polygon
        draw(self.surf, field, self.bg_color, *view, clip=False)

        for i in np.flatnonzero(self._is_near(*view)):
            corners, color = self._pieces[i]
            shade = self.grass_color if color is None else [int(value) for value in color]
            draw(self.surf, corners, shade, *view)

    def _is_near(
        self, zoom: float, translation: tuple[float, float], angle: float
    ) -> npt.NDArray[np.bool_]:
        """Returns which pieces have a corner in the window, or as near to it as gymnasium draws.

        Args:
            zoom: pixels per unit of the track.
            translation: of the track in the window, in pixels.
            angle: by which the track is turned, in radians.

        Returns:
            bool ``[pieces]``.
        """
        cos = math.cos(angle)
        sin = math.sin(angle)
        rotation = np.array([[cos, sin], [-sin, cos]])
        pixels = self._corners @ (rotation * zoom) + translation

        margin = car_racing.MAX_SHAPE_DIM
        window = np.array([car_racing.WINDOW_W, car_racing.WINDOW_H])
        inside = (pixels >= -margin) & (pixels <= window + margin)
        return np.asarray(inside.all(-1).any(-1))

    def _render_indicators(self, width: int, height: int) -> None:
        """Draw gymnasium's indicators, which observations do not show."""
        if self._indicators:
            base: Any = super()
            base._render_indicators(width, height)


def _gray(screen: Frame) -> Frame:
    """Returns the part of a screen above the indicators in gray, uint8 ``[84, 84]``."""
    road = screen[:SIZE, _LEFT : _LEFT + SIZE]
    return (road @ _GRAY).astype(np.uint8)

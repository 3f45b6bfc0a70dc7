"""A window that shows a game, and the person who plays a seat of it by keys.

How keys become actions is the game's to say (`penstock.envs.seats.keys_of`). In a game of choices
the game waits until a key of a legal choice is pressed; a seat with one legal choice takes it. In a
game of buttons time goes on, and the keys that are held press them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core.observations import views
from penstock.evaluation.evaluate import Flags, PlayedEnvs
from penstock.models.fitting import mask_of

MOST_PICTURES_PER_S = 120.0
POLLS_PER_S = 30
"""Looks for a key while the game waits for one."""

Picture = npt.NDArray[np.uint8]


class ClosedWindowError(Exception):
    """The window was closed while the game waited for a key."""


class Window:
    """A window of pygame that shows pictures at a pace. `open_window` makes it."""

    def __init__(self, title: str, pictures_per_s: float) -> None:
        import pygame

        self._title = title
        self._pictures_per_s = min(pictures_per_s, MOST_PICTURES_PER_S)
        self._clock = pygame.time.Clock()
        self._pressed: deque[str] = deque()
        self._is_closed = False
        self.held: set[str] = set()
        """Names of the keys that are held."""

    def show(self, pictures: list[Picture]) -> bool:
        """Show pictures one after another, and return whether the window is still open."""
        import pygame

        for picture in pictures:
            size = (picture.shape[1], picture.shape[0])
            screen = pygame.display.get_surface()
            if screen is None or screen.get_size() != size:
                screen = pygame.display.set_mode(size)
                pygame.display.set_caption(self._title)

            # pygame has the horizontal axis first.
            pygame.surfarray.blit_array(screen, picture.swapaxes(0, 1))
            pygame.display.flip()
            self._clock.tick(self._pictures_per_s)

        self._read_events()
        return not self._is_closed

    def entitle(self, text: str) -> None:
        """Show a text in the title, after the name of the window."""
        import pygame

        pygame.display.set_caption(f"{self._title}: {text}")

    def forget_keys(self) -> None:
        """Forget the keys that were pressed until now."""
        self._read_events()
        self._pressed.clear()

    def wait_for_key(self) -> str:
        """Returns the name of the next key that is pressed, or was and has not been taken.

        Raises ClosedWindowError if the window is closed meanwhile.
        """
        self._read_events()
        while not self._pressed:
            if self._is_closed:
                raise ClosedWindowError
            self._clock.tick(POLLS_PER_S)
            self._read_events()
        return self._pressed.popleft()

    def _read_events(self) -> None:
        """Take note of keys, and of the window's end."""
        import pygame

        for event in pygame.event.get():
            if event.type == pygame.QUIT:
                self._is_closed = True
            elif event.type == pygame.KEYDOWN:
                key = pygame.key.name(event.key)
                self._pressed.append(key)
                self.held.add(key)
            elif event.type == pygame.KEYUP:
                self.held.discard(pygame.key.name(event.key))


@contextmanager
def open_window(run_dir: str, title: str, pictures_per_s: float) -> Iterator[Window]:
    """Open a window, until the block ends.

    Args:
        run_dir: of the policy that plays, for the error.
        title: of the window.
        pictures_per_s: the pace at which pictures are shown, at most `MOST_PICTURES_PER_S`.

    Raises:
        UserError: if there is no usable display.
    """
    import pygame

    try:
        pygame.display.init()
    except pygame.error as error:
        raise UserError(
            f"the display cannot be used ({error}); make a video with `penstock record {run_dir}`"
        ) from error

    try:
        yield Window(title, pictures_per_s)
    finally:
        pygame.display.quit()


class Person:
    """Plays one seat by keys, as a policy over one environment would."""

    def __init__(self, window: Window, keys: Mapping[str, int], game: PlayedEnvs) -> None:
        """Begin before the first step.

        Args:
            window: has the keys.
            keys: the choice, or the button, of each key by its name.
            game: whose only row is the person's.

        Raises:
            UserError: if actions are neither one of several choices nor buttons.
        """
        counts = game.info.counts
        if len(counts) != 1 and {*counts} != {2}:
            raise UserError(
                f"keys take one of several choices, or press buttons, and this game has actions of "
                f"{game.info.action_space}; leave out --seat to watch the agent"
            )
        self._window = window
        self._keys = keys
        self._game = game
        self._counts = counts
        self._mask = mask_of(game.info)
        self._only_resets = False  # whether the next step takes no action, after an episode's end

    def choose(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the action for the observation ``[1, *shape]``, when the person has chosen it.

        Raises ClosedWindowError if the window is closed meanwhile.
        """
        if len(self._counts) > 1:
            buttons = [self._keys[key] for key in self._window.held if key in self._keys]
            pressed = np.zeros((1, len(self._counts)), np.int32)
            pressed[0, buttons] = 1
            return pressed

        is_out = self._game.playing is not None and not self._game.playing[0]
        if self._only_resets or is_out:
            return np.zeros(1, np.int32)

        legal = self._legal_choices(obs)
        if len(legal) == 1:
            return np.array(legal, np.int32)
        while True:
            choice = self._keys.get(self._window.wait_for_key())
            if choice in legal:
                return np.array([choice], np.int32)

    def begin(self, begins: Flags) -> None:
        """Play on where an episode begins, bool ``[1]``: at the next observation."""
        if begins[0]:
            self._only_resets = False

    def on_end(self, result: str) -> None:
        """An episode has ended: show its ``result`` until a key is pressed, then play the next.

        Raises ClosedWindowError if the window is closed meanwhile.
        """
        self._window.entitle(f"{result}; press a key")
        self._window.forget_keys()
        self._window.wait_for_key()
        self._window.entitle("another game")
        self._only_resets = True

    def _legal_choices(self, obs: npt.NDArray[Any]) -> list[int]:
        """Returns the choices that an observation's mask allows."""
        if self._mask is None:
            return [*range(self._counts[0])]
        (masks,) = views((self._mask,), obs).values()
        return [int(choice) for choice in np.flatnonzero(masks[0])]

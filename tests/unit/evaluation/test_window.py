"""A person who plays a seat by keys, in a window that nobody sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actors.matches import Plan
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.envs import make, probe
from penstock.evaluation import video
from penstock.evaluation.opponents import OpponentSource
from penstock.evaluation.window import ClosedWindowError, Person, Window, open_window
from penstock.learner.checkpoints import exported

pygame = pytest.importorskip("pygame")

OPTIONS = ("algo.name=ppo", "model.hidden=[8]", "actors.inference=numpy")
FOUR = "penstock/ConnectFour-v0"


@pytest.fixture(autouse=True)
def _unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.fixture
def window() -> Iterator[Window]:
    with open_window("run", "a game", 1000.0) as opened:
        opened.show([np.zeros((32, 32, 3), np.uint8)])
        yield opened


def press(*keys: int, up: bool = False) -> None:
    for key in keys:
        pygame.event.post(pygame.event.Event(pygame.KEYUP if up else pygame.KEYDOWN, key=key))


@contextmanager
def person_in(window: Window, env_id: str, keys: dict[str, int]) -> Iterator[tuple[Person, Any]]:
    """A person at seat 0 against random play, and the observation of that seat."""
    config = resolve(env_id, [*OPTIONS])
    with closing(make(config.env, 1, whole_games=True)) as env:
        plan = Plan.against(env.info.seating, 1, [0])
        matches = OpponentSource("bot:random", None).matches(env, plan, 0)
        space = env.info.observation_space
        obs = np.empty((1, *space.shape), space.dtype)
        matches.reset_into(0, obs)
        yield Person(window, keys, matches), (matches, obs)


def test_the_game_waits_for_the_key_of_a_legal_choice(window: Window) -> None:
    with person_in(window, FOUR, {"1": 0, "7": 6}) as (person, (matches, obs)):
        press(pygame.K_x, pygame.K_7)
        action = person.choose(obs)
        assert action.tolist() == [6]

        # While the other moves there is one legal choice, and no key is needed.
        matches.step_into(action, obs)
        assert person.choose(obs).tolist() == [0]

        # A full column is not chosen.
        matches.step_into(np.zeros(1, np.int32), obs)
        mask_part = next(part for part in matches.info.parts if part.name == "action_mask")
        obs[0, mask_part.offset] = 0
        press(pygame.K_1, pygame.K_7)
        assert person.choose(obs).tolist() == [6]


def test_keys_that_are_held_press_the_buttons(window: Window) -> None:
    keys = {"left": 0, "right": 1, "up": 2}
    with person_in(window, "penstock/SlimeVolley-v0", keys) as (person, (_, obs)):
        assert person.choose(obs).tolist() == [[0, 0, 0]]
        press(pygame.K_LEFT, pygame.K_UP)
        assert window.show([])
        assert person.choose(obs).tolist() == [[1, 0, 1]]
        press(pygame.K_LEFT, up=True)
        assert window.show([])
        assert person.choose(obs).tolist() == [[0, 0, 1]]


def test_no_key_is_needed_to_reset_and_one_is_for_the_first_move_of_the_next_game(
    window: Window,
) -> None:
    with person_in(window, FOUR, {"7": 6}) as (person, (_, obs)):
        press_x = threading.Timer(0.1, press, [pygame.K_x])
        press_x.start()
        person.on_end("won")
        assert person.choose(obs).tolist() == [0]
        # After an episode that was cut this comes at once.
        person.begin(np.array([True]))
        press(pygame.K_7)
        assert person.choose(obs).tolist() == [6]


def test_closing_the_window_ends_the_wait_for_a_key(window: Window) -> None:
    with person_in(window, FOUR, {"1": 0}) as (person, (_, obs)):
        pygame.event.post(pygame.event.Event(pygame.QUIT))
        with pytest.raises(ClosedWindowError):
            person.choose(obs)
    assert not window.show([])


def test_actions_that_are_numbers_have_no_keys(window: Window) -> None:
    with (
        closing(make(EnvConfig(id="Pendulum-v1"), 1)) as env,
        pytest.raises(UserError, match="keys take one of several choices, or press buttons"),
    ):
        Person(window, {}, env)


def test_a_person_plays_whole_games_against_the_agent(tmp_path: Path) -> None:
    config = resolve(FOUR, [*OPTIONS])
    info = probe(config.env)
    weights = np.zeros(network_shape(config, info).layout.size, np.float32)
    agent = str(tmp_path / "agent.safetensors")
    exported.write(Path(agent), config, info.spaces, info, weights)

    ended = threading.Event()

    def keep_pressing() -> None:
        keys = [pygame.K_1 + column for column in range(7)]
        while not ended.wait(0.01):
            if pygame.display.get_init():
                press(*keys)

    presses = threading.Thread(target=keep_pressing, daemon=True)
    presses.start()
    began_s = time.monotonic()
    try:
        result = video.play(agent, 2, "best", None, 0, None, seat=1)
    finally:
        ended.set()
        presses.join()
    assert time.monotonic() - began_s < 120
    assert (result["against"], result["seats"]) == (agent, [1, 1])
    assert all(outcome in (-1, 0, 1) for outcome in result["outcomes"])
    text = video.describe(result)
    assert f"as seat 1 against {agent}" in text

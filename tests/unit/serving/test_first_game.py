"""The first game of a run: which spaces it may say."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from penstock.serving.first_game import FirstGame
from penstock.serving.messages import HEAD, GameMessageKind, json_message
from penstock.serving.port import Wire

FLOATS = {"Box": [0, 1, [2], "<f4"]}
CHOICE = {"Discrete": [2, 0]}
MASK = {"Dict": [["action_mask", {"MultiBinary": 2}]]}


def answer(observation: Any, action: Any) -> dict[str, Any]:
    """Returns the answer to a HELLO with these spaces."""
    messages: list[bytes] = []

    class Kept(Wire):
        send = staticmethod(messages.append)

        def close(self) -> None:
            pass

    async def greet() -> None:
        first_game = FirstGame(None)
        game = first_game.open(Kept(first_game))
        hello = {"protocol": 1, "observation": observation, "action": action}
        first_game.receive(game, json_message(GameMessageKind.HELLO, hello))

    asyncio.run(greet())
    [message] = messages
    content: dict[str, Any] = json.loads(message[HEAD.size :])
    return content


def test_a_game_with_spaces_is_told_to_connect_again() -> None:
    assert "connect again" in answer(FLOATS, CHOICE)["reason"]


REFUSED = {
    "only a mask": (MASK, CHOICE, "the observation has action_mask alone"),
    "too many inputs": ({"Discrete": [1_000_001, 0]}, CHOICE, "show them as numbers, in a Box"),
    "too many choices": (FLOATS, {"Discrete": [1_000_001, 0]}, "of 1 to 1,000,000 choices"),
    "unbounded actions": (FLOATS, {"Box": [0, 1e30, [1], "<f4"]}, "a Box of floats with finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_spaces_that_no_policy_is_trained_on_are_refused_in_words_of_a_game(case: str) -> None:
    observation, action, expected = REFUSED[case]
    error = answer(observation, action)["error"]
    assert expected in error
    assert "env.wrappers" not in error

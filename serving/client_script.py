"""The script by which `penstock check-client` plays the service: spaces, and how it answers.

Each part is one run of the echo game, with spaces of other kinds. All that a service may do happens
in every part: answers that are merged, divided, late or cut anywhere, a FAULT, an END, and a
connection that breaks.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from penstock.core.observations import MASK


class Answer(Enum):
    """How the rows of a round are answered."""

    TOGETHER = auto()  # one ACT of all rows
    REVERSED = auto()  # one ACT, the last seat first
    SINGLE = auto()  # an ACT for each row
    DRIBBLED = auto()  # an ACT, byte by byte
    LATE = auto()  # an ACT after a pause, in which nothing may come
    FAULT_FIRST = auto()  # a FAULT of one seat, then an ACT of the others
    FAULT_LAST = auto()  # an ACT, then a FAULT of one seat
    FAULT_ALL = auto()  # a FAULT of every seat
    END = auto()
    CUT = auto()  # half an ACT, and the end of the connection
    RESET = auto()  # of the connection


PLAIN = (Answer.TOGETHER, Answer.REVERSED, Answer.SINGLE, Answer.DRIBBLED, Answer.LATE)
"""These take turns, each in one round of five; turns of a seat are in one round of three."""
EVENTS = {
    7: Answer.FAULT_FIRST,
    16: Answer.END,
    25: Answer.FAULT_LAST,
    34: Answer.CUT,
    43: Answer.FAULT_ALL,
    52: Answer.RESET,
    61: Answer.FAULT_LAST,
}
"""What happens instead in these rounds, in each of which a row waits for an answer."""


def answer_of_round(number: int) -> Answer:
    """Returns how a round is answered."""
    return EVENTS.get(number, PLAIN[number % len(PLAIN)])


class ScriptPart(NamedTuple):
    """One run of the echo game."""

    name: str
    observation: spaces.Space[Any]
    action: spaces.Space[Any]


def parts() -> list[ScriptPart]:
    """Returns all parts. Every kind of space occurs, and every kind of padding."""
    position = spaces.Box(-1.0, 1.0, (4,), np.float32)
    image = spaces.Box(0, 255, (6, 5, 3), np.uint8)
    choices = spaces.MultiDiscrete([3, 5, 2], start=[1, 0, -1])

    # Whole numbers with bounds of their own for each element.
    low = np.array([[-3, 0, 100], [-(2**31), 7, -1]], np.int32)
    high = np.array([[3, 1, 2**31 - 1], [2**31 - 1, 7, 60]], np.int32)

    masked = spaces.Dict(
        {
            "board": spaces.Box(-1, 1, (3, 3), np.int8),
            "clock": spaces.Box(0.0, 1e30, (), np.float32),
            MASK: spaces.MultiBinary(5),
        }
    )
    nested = spaces.Tuple(
        [
            spaces.Discrete(3),
            spaces.Dict({"fine": spaces.Box(-1e30, 1e30, (2,), np.float64)}),
            spaces.Box(0, 1000, (3,), np.uint16),
        ]
    )

    return [
        ScriptPart("numbers", position, spaces.Discrete(5)),
        ScriptPart("an image", image, spaces.MultiDiscrete([3, 2, 4])),
        ScriptPart("a choice", spaces.Discrete(7, start=-2), spaces.Box(-2.0, 2.0, (3,))),
        ScriptPart("several choices", choices, spaces.MultiBinary(5)),
        ScriptPart("switches", spaces.MultiBinary((2, 3)), spaces.Discrete(4, start=10)),
        ScriptPart("whole numbers", spaces.Box(low, high, dtype=np.int32), spaces.Discrete(2)),
        ScriptPart("parts with a mask", masked, spaces.Discrete(5)),
        ScriptPart("nested parts", nested, spaces.MultiDiscrete([9, 9], start=[-4, 1])),
    ]

"""The messages between a game and the service: docs/games-protocol.md says what they mean.

All numbers are little-endian. Over TCP a message follows its length in bytes, a u32; over WebSocket
it is one binary message. In memory each has its length in front, whatever brought it.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.files import DAMAGE
from penstock.envs.space_json import SpaceError, from_json

PROTOCOL = 1
LENGTH = struct.Struct("<I")
KIND = struct.Struct("<I")
HEAD = struct.Struct("<II")  # length and kind
STEP_HEAD = struct.Struct("<III")  # length, kind and number of rows
# The most bytes of a message of JSON, and of any message, without the length.
JSON_NBYTES = 64 << 10
MESSAGE_NBYTES = 16 << 20
TEXT_LENGTH = 200  # characters of the token and of the name in HELLO
SHOWN_LENGTH = 80  # characters of a foreign text in a sentence
MOST_SIDED_SEATS = 256  # seats of one game whose sides HELLO gives


class GameMessageKind(IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    STEP = 3
    ACT = 4
    FAULT = 5
    END = 6


class RowFlag(IntFlag):
    """What a row of a STEP says about its seat."""

    FIRST = 1
    TERMINATED = 2
    TRUNCATED = 4
    LEAVES = 8


# Plain numbers for arithmetic with many rows: a member of an enum takes longer to look up.
FIRST = int(RowFlag.FIRST)
TERMINATED = int(RowFlag.TERMINATED)
TRUNCATED = int(RowFlag.TRUNCATED)
LEAVES = int(RowFlag.LEAVES)
ENDED = int(RowFlag.TERMINATED | RowFlag.TRUNCATED | RowFlag.LEAVES)
ALL_FLAGS = FIRST | ENDED


class MessageError(Exception):
    """A message that ends its connection: the field at fault, and a sentence."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(reason)
        self.field = field
        self.reason = reason


@dataclass(frozen=True)
class Hello:
    """What a game says of itself."""

    seats: int = 1
    token: str = ""
    observation: spaces.Space[Any] | None = None
    action: spaces.Space[Any] | None = None
    """Its spaces; None if it says nothing of them."""
    name: str = ""
    sides: tuple[int, ...] | None = None
    """The side of each seat of one of its games, counted from 0; None if it says nothing of it."""


def json_message(kind: GameMessageKind, content: dict[str, Any]) -> bytes:
    """Returns a message of JSON, with its length in front."""
    body = json.dumps(content, allow_nan=False).encode()
    return HEAD.pack(4 + len(body), kind) + body


def fault_message(seat: int | None, field: str, reason: str) -> bytes:
    """Returns a FAULT; without a ``seat`` the connection is closed after it."""
    return json_message(GameMessageKind.FAULT, {"seat": seat, "field": field, "error": reason})


def read_hello(body: bytes, most_space_nbytes: int) -> Hello:
    """Returns the content of a HELLO.

    Args:
        body: behind the kind.
        most_space_nbytes: the most memory that each of its spaces may take.

    Raises:
        MessageError: for anything that is no HELLO of this protocol.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MessageError("hello", f"HELLO is no JSON ({str(error)[:SHOWN_LENGTH]})") from error
    if not isinstance(content, dict):
        raise MessageError("hello", f"HELLO is a {type(content).__name__} and no object")

    protocol = content.get("protocol")
    if protocol != PROTOCOL or isinstance(protocol, bool):
        raise MessageError(
            "protocol",
            f"protocol is {str(protocol)[:SHOWN_LENGTH]}, and this service speaks {PROTOCOL}",
        )
    seats = content.get("seats", 1)
    if type(seats) is not int or seats < 1:
        raise MessageError(
            "seats", f"seats is {str(seats)[:SHOWN_LENGTH]}; give a whole number from 1 on"
        )
    return Hello(
        seats=seats,
        token=_text(content, "token"),
        observation=_space(content, "observation", most_space_nbytes),
        action=_space(content, "action", most_space_nbytes),
        name=_text(content, "name"),
        sides=_sides(content, seats),
    )


def _text(content: dict[str, Any], field: str) -> str:
    """Returns a field of HELLO that is a text, "" without it. Raises MessageError."""
    text = content.get(field)
    if text is None:
        return ""
    if not isinstance(text, str) or len(text) > TEXT_LENGTH:
        raise MessageError(field, f"{field} is no text of at most {TEXT_LENGTH} characters")
    return text


def _sides(content: dict[str, Any], seats: int) -> tuple[int, ...] | None:
    """Returns the field `sides` of a HELLO with so many seats, or None. Raises MessageError."""
    sides = content.get("sides")
    if sides is None:
        return None
    is_list = isinstance(sides, list) and 0 < len(sides) <= MOST_SIDED_SEATS
    if not is_list or not all(type(side) is int for side in sides):
        raise MessageError(
            "sides",
            f"sides is {str(sides)[:SHOWN_LENGTH]}; give the side of each seat of one game, as in "
            "[0, 1]",
        )
    if sorted({*sides}) != [*range(len({*sides}))]:
        raise MessageError(
            "sides", f"sides {str(sides)[:SHOWN_LENGTH]} are not counted from 0; give 0, 1, ..."
        )
    if seats % len(sides):
        raise MessageError(
            "seats",
            f"{seats} seats are no whole games of {len(sides)} seats, as sides says; give a "
            f"multiple of {len(sides)}",
        )
    return tuple(sides)


def _space(content: dict[str, Any], field: str, most_nbytes: int) -> spaces.Space[Any] | None:
    """Returns a field of HELLO that is a space, or None. Raises MessageError."""
    encoded = content.get(field)
    if encoded is None:
        return None
    try:
        return from_json(encoded, most_nbytes)
    except (*DAMAGE, AssertionError) as error:
        if isinstance(error, SpaceError):
            reason = str(error)
        elif isinstance(error, RecursionError):
            reason = "it is nested too deep"
        else:
            reason = f"no space is written as {json.dumps(encoded)}"
        raise MessageError(
            field,
            f"{field} is no space as docs/games-protocol.md describes: {reason[:SHOWN_LENGTH]}",
        ) from error


@lru_cache(maxsize=256)
def step_nbytes(count: int, row_nbytes: int) -> int:
    """Returns the bytes of a STEP of ``count`` rows, with the length in front."""
    return _step_offsets(count).rows + count * row_nbytes


class _StepOffsets(NamedTuple):
    """Where the parts of a STEP begin, counted from its length."""

    flags: int
    reward: int
    rows: int


def _step_offsets(count: int) -> _StepOffsets:
    """Returns the offsets in a STEP of ``count`` rows.

    Padding is counted from the kind, which follows the length.
    """
    flags = 8 + 4 * count
    reward = padded(flags + count, 4)
    rows = padded(reward + 4 * count, 8)
    return _StepOffsets(LENGTH.size + flags, LENGTH.size + reward, LENGTH.size + rows)


@lru_cache(maxsize=256)
def step_dtype(count: int, row_nbytes: int) -> np.dtype[Any]:
    """Returns a record that is a STEP of ``count`` rows, with the length in front."""
    offsets = _step_offsets(count)
    return np.dtype(
        {
            "names": ["length", "kind", "count", "seat", "flags", "reward", "rows"],
            "formats": [
                "<u4",
                "<u4",
                "<u4",
                ("<u4", (count,)),
                ("|u1", (count,)),
                ("<f4", (count,)),
                ("|u1", (count, row_nbytes)),
            ],
            "offsets": [0, 4, 8, 12, offsets.flags, offsets.reward, offsets.rows],
            "itemsize": step_nbytes(count, row_nbytes),
        }
    )


@lru_cache(maxsize=256)
def act_dtype(count: int, action_nbytes: int) -> np.dtype[Any]:
    """Returns a record that is an ACT of ``count`` rows, with the length in front."""
    rows = LENGTH.size + padded(8 + 4 * count, 8)
    return np.dtype(
        {
            "names": ["length", "kind", "count", "seat", "rows"],
            "formats": ["<u4", "<u4", "<u4", ("<u4", (count,)), ("|u1", (count, action_nbytes))],
            "offsets": [0, 4, 8, 12, rows],
            "itemsize": rows + count * action_nbytes,
        }
    )


def act_records(count: int, seats: npt.NDArray[np.uint32], rows: npt.NDArray[np.uint8]) -> Any:
    """Returns ACTs of ``count`` rows each.

    Args:
        count: rows of each.
        seats: of all rows, one ACT after another.
        rows: the actions, ``[len(seats), nbytes]``.
    """
    dtype = act_dtype(count, rows.shape[1])
    records = np.zeros(len(seats) // count, dtype)
    records["length"] = dtype.itemsize - LENGTH.size
    records["kind"] = GameMessageKind.ACT
    records["count"] = count
    records["seat"] = seats.reshape(-1, count)
    records["rows"] = rows.reshape(-1, count, rows.shape[1])
    return records


def padded(nbytes: int, align: int) -> int:
    """Returns ``nbytes`` rounded up to a multiple of ``align``."""
    return -(-nbytes // align) * align

"""Numbers by which an actor records who plays against it: a draw, or a scripted player.

A *draw* is one occupation of a chair: from the moment when a learner publishes a member of the pool
under the chair's policy id until it publishes the next one. The board's stamp tells draws apart: no
two chairs of a run have the same number in the same generation. A recorded number has 64 bits, and
no sign.
"""

from __future__ import annotations

from penstock.core.params import Stamp

NO_DRAW = 0
"""No result is to be counted: the newest weights play alone, or the row is not the first learning
one of its game."""
BOT_DRAW = 1 << 62
"""The number of the first scripted player; that of a draw is lower."""

_NUMBER_BITS = 32


def draw_number(stamp: Stamp) -> int:
    """Returns the number of the draw that was published under ``stamp``."""
    return stamp.generation << _NUMBER_BITS | stamp.version


def bot_draw(index: int) -> int:
    """Returns the number of a scripted player by its ``index`` in `envs.seats.Seating.bots`."""
    return BOT_DRAW + index


def bot_index(number: int) -> int | None:
    """Returns the index of the scripted player with this ``number``; None if it is a draw."""
    return number - BOT_DRAW if number >= BOT_DRAW else None

"""The error for mistakes that the user can correct, and received text in its messages."""

import operator
from typing import Any

PRINTABLE = 2000  # most characters of a received text in a message


class UserError(Exception):
    """A user's mistake: a sentence with the value, the rule and the next step. Exit code 2."""

    traceback: str = ""
    """Frames of the user's own code that raised the error which this one explains; empty for any
    other mistake."""


def whole_number(name: str, value: Any, least: int) -> int:
    """Returns an argument of the Python API as an int, also if it is one of numpy's.

    Args:
        name: name of the argument.
        value: its value.
        least: the least number that it may be.

    Raises:
        UserError: if it is no whole number, or below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1  # refused like any other that is too small
    if number < least:
        raise UserError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return number


def printable(text: str) -> str:
    """Returns a received text for a terminal or a log.

    It is of bounded length, and its control characters are escaped.
    """
    short = text if len(text) <= PRINTABLE else f"{text[:PRINTABLE]}..."
    if short.isprintable():
        return short
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in short)

"""The error for mistakes that the user can correct, and received text in its messages."""

PRINTABLE = 2000  # characters of a received text


class UserError(Exception):
    """A user's mistake: a sentence with the value, the rule and the next step. Exit code 2."""


def printable(text: str) -> str:
    """A received text for a terminal or a log: of bounded length, control characters escaped."""
    cut = text if len(text) <= PRINTABLE else f"{text[:PRINTABLE]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)

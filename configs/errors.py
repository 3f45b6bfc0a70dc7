"""The error that is the user's to mend, and how text of others becomes part of it."""

PRINTABLE = 2000  # characters of a received text


class UserError(Exception):
    """One sentence with the value, the rule and the next step; ends a command with exit code 2."""


def printable(text: str, most: int = PRINTABLE) -> str:
    """A received text for a terminal or a log: of bounded length, control characters escaped."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)

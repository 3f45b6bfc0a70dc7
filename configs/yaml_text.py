"""Reads YAML 1.2 as plain values with line numbers, and writes plain values as YAML.

Values are built from the node tree: `3e-4` is a number and `1e6` a whole number; `off`, `no` and
dates stay text; the keys of a map are text. ruamel.yaml is imported when the first text is read.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError

if TYPE_CHECKING:
    from ruamel.yaml import YAML

KeyPath = tuple[str, ...]
_WHOLE = re.compile(r"[-+]?\d+[eE]\+?\d{1,2}")  # a whole number, also where the schema has none
# Most characters of a text; larger ones take ruamel.yaml tens of seconds.
MOST_CHARS = 1 << 20
# Aliases of aliases multiply, so all values count, and the characters of each with those of its
# dotted name: a file from elsewhere may repeat one long key under hundreds of aliases.
MOST_VALUES = 100_000
MOST_VALUE_CHARS = 1 << 22
# Numbers to the base 60 of YAML 1.1 take a time that grows with the square of their length.
MOST_NUMBER_CHARS = 4300  # the number of digits that Python reads
# It stands for a # that begins no comment; it is for private use, so no text has it.
_HASH = "\U00100023"
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))


def parse(text: str, source: str, *, is_override: bool = False) -> tuple[Any, dict[KeyPath, int]]:
    """Parse a YAML text.

    Args:
        text: the text.
        source: its name, with which error messages begin.
        is_override: whether it is the value of an override, which has no comments: ``#`` is part
            of it.

    Returns:
        The value, and the line (from 1) of each key by its path.

    Raises:
        UserError: for invalid YAML, and for a text that is too large or whose aliases make it so.
            Its place has the line, except for an override.
    """
    if len(text) > MOST_CHARS:
        raise UserError(
            f"{source} has more than the {MOST_CHARS:,} characters of YAML that are read; keep "
            "large values in a file of their own, and name that"
        )

    from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError

    yaml = _yaml()
    reader = _Reader(yaml, lambda line: source if is_override else f"{source}:{line}")
    if is_override:
        text = text.replace("#", _HASH)

    try:
        # By YAML 1.2, 7.1, an anchor may be used again: an alias means the last one before it.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            root = yaml.compose(text)
        return (root if root is None else reader.value(root, ())), reader.lines
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = reader.place(mark.line + 1) if mark else source
        raise UserError(f"{place}: this is not YAML: {error.problem}; {_HINT}") from None
    except (YAMLError, ValueError, ArithmeticError, RecursionError) as error:
        problem = str(error).partition("\n")[0]
        if isinstance(error, RecursionError):
            problem = "values are nested too deeply, or an anchor (&name) contains itself (*name)"
        raise UserError(f"{source}: this is not YAML: {problem}; {_HINT}") from None


def write(values: Mapping[str, Any]) -> str:
    """Returns values as YAML that `parse` reads back as equal values."""
    buffer = io.StringIO()
    yaml = _yaml()
    yaml.default_flow_style = False
    yaml.width = 10_000
    yaml.allow_unicode = False  # escapes characters that YAML reads as line breaks
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # typed as None
    yaml.dump(dict(values), buffer)
    return buffer.getvalue()


_HINT = "correct it, or put text in quotes"


def _yaml() -> YAML:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True)


class _Reader:
    """Converts nodes to values and records their lines."""

    def __init__(self, yaml: YAML, place: Callable[[int], str]) -> None:
        """``place`` returns the place of a line, for messages."""
        self._scalar = yaml.constructor.construct_object
        self.place = place
        self.lines: dict[KeyPath, int] = {}

        # The values so far, and the characters in them and their names; aliases count each time.
        self._values = 0
        self._chars = 0

    def value(self, node: Any, path: KeyPath) -> Any:
        """Returns the value of a node at a path, and records the lines of the keys in it.

        Raises:
            ValueError: for a value that is too large, or that is no value of its tag.
            UserError: for a key that is no text, or occurs twice.
        """
        self._values += 1
        self._chars += sum(map(len, path)) + (len(node.value) if node.id == "scalar" else 0)
        if self._values > MOST_VALUES or self._chars > MOST_VALUE_CHARS:
            raise ValueError(
                f"more than {MOST_VALUES:,} values, or {MOST_VALUE_CHARS:,} characters in them and "
                "their names; use fewer aliases (*name)"
            )

        if node.id == "mapping":
            return self._map(node, path)
        if node.id == "sequence":
            return [self.value(item, (*path, str(i))) for i, item in enumerate(node.value)]
        if node.tag not in _PLAIN_TAGS:
            return _text_of(node)
        return self._plain_value(node)

    def _plain_value(self, node: Any) -> Any:
        """Returns the number, boolean or null of a node.

        Raises:
            ValueError: for a number that is too long, or a text with the tag of another type.
        """
        if len(node.value) > MOST_NUMBER_CHARS:
            raise ValueError(
                f"a number of {len(node.value):,} characters; at most {MOST_NUMBER_CHARS:,} are "
                "read"
            )
        try:
            value = self._scalar(node)
            str(value)  # raises ValueError for a number of more digits than Python writes
        except LookupError as error:  # ruamel.yaml raises it for a text with a tag such as !!bool
            kind = node.tag.rpartition(":")[2]
            raise ValueError(f"{node.value[:40]!r} is no {kind}") from error
        return int(value) if _WHOLE.fullmatch(node.value) else value

    def _map(self, node: Any, path: KeyPath) -> dict[str, Any]:
        """Returns the map of a node at a path.

        Raises:
            UserError: for a key that is no text, or occurs twice.
        """
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.id != "scalar":
                raise UserError(
                    f"{self.place(line)}: a key must be plain text; write `name: value`"
                )

            key = _text_of(key_node)
            if key in values:
                first_line = self.lines[(*path, key)]
                raise UserError(
                    f"{self.place(line)}: {'.'.join((*path, key))} is already set in line "
                    f"{first_line}; keep one of them"
                )

            self.lines[(*path, key)] = line
            values[key] = self.value(value_node, (*path, key))
        return values


def _text_of(scalar: Any) -> str:
    """Returns the text of a node, with the number signs of an override."""
    return str(scalar.value).replace(_HASH, "#")

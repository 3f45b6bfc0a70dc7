"""The dotted names of all options, and which of them an unknown name was meant to be."""

from __future__ import annotations

from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, NamedTuple, get_type_hints

from pydantic.fields import FieldInfo

from penstock.configs.schema import Config
from penstock.configs.section import Section
from penstock.configs.values import words


class Option(NamedTuple):
    """One option: its dotted name, what it accepts, and its field in the schema."""

    name: str
    words: str
    field: FieldInfo

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)


@cache
def sections() -> dict[str, type[Section]]:
    """Schema class of each section by its name."""
    return {name: kind for name, kind in get_type_hints(Config).items() if name in _fields(Config)}


@cache
def options() -> dict[str, Option]:
    """Every option by its dotted name, in the order of the schema."""
    found = {}
    for section, kind in sections().items():
        hints = get_type_hints(kind, include_extras=True)
        for attribute, field in _fields(kind).items():
            name = f"{section}.{field.alias or attribute}"
            found[name] = Option(name, words(hints[attribute]), field)
    return found


def nearest(unknown: str) -> str:
    """A clause that names the valid option nearest to an unknown dotted name, or the choices."""
    section, _, key = unknown.partition(".")
    if not key:
        return _nearest_section(section)
    own = [name.partition(".")[2] for name in options() if name.startswith(f"{section}.")]
    initials = "".join(word[:1] for word in key.split("_"))  # learning_rate is meant to be lr
    if close := [name for name in own if name == initials] or get_close_matches(key, own, n=1):
        return f"the nearest option is {section}.{close[0]}"
    elsewhere = [name for name in options() if name.partition(".")[2] == key]
    if elsewhere or (not own and (elsewhere := get_close_matches(unknown, options()))):
        best = max(elsewhere, key=lambda name: SequenceMatcher(None, name, unknown).ratio())
        return f"the nearest option is {best}"
    return f"{section} has {', '.join(own)}" if own else _nearest_section(section)


def _nearest_section(unknown: str) -> str:
    if as_key := [name for name in options() if name.partition(".")[2] == unknown]:
        return f"the nearest option is {as_key[0]}"
    if close := get_close_matches(unknown, sections(), n=1):
        return f"the nearest section is {close[0]}"
    return f"the sections are {', '.join(sections())}"


def _fields(kind: type[Section]) -> dict[str, FieldInfo]:
    return kind.model_fields

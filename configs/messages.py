"""Converts pydantic's errors to sentences with place, value, rule and next step."""

from __future__ import annotations

import json
import math
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from penstock.configs.keys import nearest, options
from penstock.configs.layers import Layers
from penstock.configs.section import Contradiction, Section
from penstock.configs.value_types import MOST, MOST_WHOLE
from penstock.configs.yaml_text import KeyPath

_LONGEST = 80  # characters of a value in a message
MOST_LINES = 20  # errors that are shown


def explain(error: ValidationError, layers: Layers, source: str) -> str:
    """Returns one line for each error, at most `MOST_LINES`.

    Args:
        error: pydantic's error.
        layers: the values that were checked, with their places.
        source: the place of values that were not set.
    """
    lines: dict[str, None] = {}  # each line once, in order
    details = error.errors(include_url=False)
    for i, detail in enumerate(details):
        if len(lines) >= MOST_LINES:
            lines[f"and {len(details) - i} more errors; correct these first"] = None
            break
        for line in _sentences(detail, layers, source):
            lines[line] = None
    return "\n".join(lines)


def _sentences(detail: ErrorDetails, layers: Layers, source: str) -> list[str]:
    """Returns the lines for one of pydantic's errors: place, value, rule and next step."""
    path = tuple(str(part) for part in detail["loc"])
    if detail["type"] == "contradiction":
        contradictions: list[Contradiction] = detail["ctx"]["contradictions"]
        return [f"{_places(each.keys, layers, source)}: {each.text}" for each in contradictions]

    if detail["type"] == "extra_forbidden":
        path = _only_path(path, detail["input"])
        name = ".".join(path)
        suggestion = nearest(name, layers.algo)
        return [f"{layers.place(path) or source}: there is no option {name}; {suggestion}"]

    if detail["type"] == "missing" and path[0] == "algo":
        name = ".".join(path)
        return [f"{source}: {name} is missing; it must be {options(layers.algo)[name].words}"]
    if detail["type"] == "missing":
        return [
            f"{source}: env.id is missing; name the environment, for example env.id=CartPole-v1"
        ]

    # The error may be inside the value of an option, such as a list; the line is about the option.
    known = options(layers.algo)
    depth = next((n for n in (2, 3) if ".".join(path[:n]) in known), min(len(path), 2))
    return [f"{layers.place(path) or source}: {_wrong_value(path[:depth], layers)}"]


def _wrong_value(path: KeyPath, layers: Layers) -> str:
    """Returns a sentence with the value at a path, and the rule that it breaks."""
    name = ".".join(path)
    value: Any = layers.values
    for key in path:
        value = value[key]

    option = options(layers.algo).get(name)
    if option is None:
        return f"{name} is {show(value)}; it must be a map of options, such as {_example(name)}"

    # The upper limit of all numbers is part of the rule only where a value exceeds it.
    rule = option.words.replace("`", "'")
    is_real = rule.startswith(("a number", "a finite number"))
    if is_real and isinstance(value, int | float) and MOST < abs(value) < math.inf:
        rule += f", of at most {MOST:g} in absolute value"
    is_count = rule.startswith("a whole number of at least")
    if is_count and isinstance(value, int | float) and MOST_WHOLE < value < math.inf:
        rule += f", of at most {MOST_WHOLE}"

    text = f"{name} is {show(value)}; it must be {rule}"
    return text if option.required else f"{text}; the default is {show(option.default)}"


def _example(section: str) -> str:
    """Returns the name of the first option of a section."""
    return next(name for name in options() if name.startswith(f"{section}."))


def _only_path(path: KeyPath, value: Any) -> KeyPath:
    """Extend the path into an unknown map while it has one key: the full name of an override."""
    while isinstance(value, dict) and len(value) == 1:
        ((key, value),) = value.items()
        path = (*path, key)
    return path


def _places(keys: tuple[str, ...], layers: Layers, source: str) -> str:
    """Returns the places that set some options; ``source`` where none of them was set."""
    places = (layers.places.get(tuple(key.split("."))) for key in keys)
    return " and ".join(dict.fromkeys(place for place in places if place)) or source


def show(value: Any) -> str:
    """Returns a value as text, shortened to 80 characters."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=_jsonable)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _jsonable(value: Any) -> Any:
    """Returns what stands in JSON for a value: for a schedule the map that a user writes."""
    return value.model_dump(by_alias=True) if isinstance(value, Section) else str(value)

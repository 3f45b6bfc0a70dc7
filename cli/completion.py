"""Completion of targets and overrides in a shell, through typer. Imports no torch."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from glob import escape, glob
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer

if TYPE_CHECKING:
    from penstock.configs.keys import Option

# The most characters of a help text; typer breaks longer ones into lines.
LONGEST = 72

Candidates = list[tuple[str, str]]  # each with a help text, which zsh and fish show


def targets(incomplete: str) -> Candidates:
    """Returns the presets and YAML files that begin with ``incomplete``.

    If none does, the shell completes file names by itself.
    """
    from penstock.configs.load import presets

    files = [path for end in ("yaml", "yml") for path in glob(f"{escape(incomplete)}*.{end}")]
    named = {name: shorten(text, LONGEST, placeholder=" ...") for name, text in presets().items()}
    found = [*named.items(), *((path, "a YAML file") for path in sorted(files))]
    return [candidate for candidate in found if candidate[0].startswith(incomplete)]


def overrides(context: typer.Context, incomplete: str) -> Candidates:
    """Returns the options of the config that begin with ``incomplete``, and their values after `=`.

    bash takes `=` as the end of a word: of `algo.name=p` it passes `algo.name` and `=` as words
    before `p`, and of `algo.name=` only the name. Other shells pass `algo.name=p` as one word.
    """
    given: list[str] = context.params.get("overrides") or []
    before = given[:-1] if given[-1:] == ["="] else given
    known = _options(context, incomplete, given)
    if before and before[-1] in known:
        return [(value, "") for value in _values(known[before[-1]])]
    key, equals, _ = incomplete.partition("=")
    fitting = [name for name in known if name == key or (not equals and name.startswith(key))]
    if len(fitting) != 1:
        return [(f"{name}=", _summary(known[name])) for name in fitting]
    values = [(f"{fitting[0]}={value}", "") for value in _values(known[fitting[0]])]
    # Of a single candidate the shell would go on to the next word.
    return values if len(values) > 1 or equals else [(f"{fitting[0]}=", ""), *values]


def _options(context: typer.Context, incomplete: str, given: list[str]) -> dict[str, Option]:
    """The options by name, of the algorithm that the words before have chosen."""
    from penstock.configs.algorithms import DEFAULT
    from penstock.configs.errors import UserError
    from penstock.configs.keys import options
    from penstock.configs.load import resolve

    # The words of bash, joined again.
    joined = "".join(f" {word}" if "." in word else word for word in given).split()
    if not any(word.startswith("algo.") for word in [*joined, incomplete]):
        return options(DEFAULT)
    chosen = [word.partition("=")[2] for word in joined if word.startswith("algo.name=")]
    if chosen:
        return options(chosen[-1])
    try:
        return options(resolve(str(context.params.get("target"))).algo.name)
    except UserError:
        return options(DEFAULT)


def _values(option: Option) -> list[str]:
    """Returns the choices of an option, or its default if it may have any value."""
    choices = list(dict.fromkeys(_choices(option.hint)))
    if choices or option.required:
        return choices

    default = option.default
    return [default if isinstance(default, str) else json.dumps(default, separators=(",", ":"))]


def _choices(hint: Any) -> Iterator[str]:
    """Yield the values that a type allows; none if they are not a short list."""
    if get_origin(hint) is Annotated:
        yield from _choices(get_args(hint)[0])
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) in (Union, types.UnionType):
        found = [choice for member in get_args(hint) for choice in _choices(member)]
        yield from found if found != ["null"] else []
    elif hint is bool:
        yield from ("true", "false")
    elif hint is type(None):
        yield "null"


def _summary(option: Option) -> str:
    """Returns the first sentence of an option's description, on one line of a terminal."""
    text = " ".join(option.description.split())
    return shorten(text.partition(". ")[0].rstrip("."), LONGEST, placeholder=" ...")

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

Candidates = list[tuple[str, str]]
"""Completions of a word, each with a help text, which zsh and fish show."""


def targets(incomplete: str) -> Candidates:
    """Returns the presets and YAML files that begin with ``incomplete``.

    If none does, the shell completes file names by itself.
    """
    from penstock.configs.load import presets

    files = [path for end in ("yaml", "yml") for path in glob(f"{escape(incomplete)}*.{end}")]
    candidates = [
        *((name, shorten(text, LONGEST, placeholder=" ...")) for name, text in presets().items()),
        *((path, "a YAML file") for path in sorted(files)),
    ]
    return [(word, text) for word, text in candidates if word.startswith(incomplete)]


def overrides(context: typer.Context, incomplete: str) -> Candidates:
    """Returns the options of the config that begin with ``incomplete``, and their values after `=`.

    bash takes `=` as the end of a word: of `algo.name=p` it passes `algo.name` and `=` as words
    before `p`, and of `algo.name=` only the name. Other shells pass `algo.name=p` as one word.
    """
    words: list[str] = context.params.get("overrides") or []
    options = _options(context, incomplete, words)

    # bash: the word before, apart from `=`, is an option. Complete its value.
    names = words[:-1] if words[-1:] == ["="] else words
    if names and names[-1] in options:
        return [(value, "") for value in _values(options[names[-1]])]

    # An option whose name is not complete.
    key, equals, _ = incomplete.partition("=")
    matches = [name for name in options if name == key or (not equals and name.startswith(key))]
    if len(matches) != 1:
        return [(f"{name}=", _summary(options[name])) for name in matches]

    # A single option: its values. After a single candidate the shell would go on to the next word,
    # so the name with `=` is a second one.
    name = matches[0]
    values = [(f"{name}={value}", "") for value in _values(options[name])]
    if len(values) > 1 or equals:
        return values
    return [(f"{name}=", ""), *values]


def _options(context: typer.Context, incomplete: str, words: list[str]) -> dict[str, Option]:
    """Returns the options by name, for the algorithm that the target or a word before chooses.

    ``words`` are the overrides before ``incomplete``, as the shell divides them.
    """
    from penstock.configs.algorithms import DEFAULT
    from penstock.configs.errors import UserError
    from penstock.configs.keys import options
    from penstock.configs.load import resolve

    # bash divides `algo.name=ppo` into three words. Join them again: a name contains a dot.
    settings = "".join(f" {word}" if "." in word else word for word in words).split()

    # Only options of algo.* depend on the algorithm. Resolving the target takes longer.
    if not any(word.startswith("algo.") for word in [*settings, incomplete]):
        return options(DEFAULT)

    algorithms = [word.partition("=")[2] for word in settings if word.startswith("algo.name=")]
    if algorithms:
        return options(algorithms[-1])
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
        choices = [choice for member in get_args(hint) for choice in _choices(member)]
        # An optional number or text has "null" beside values that cannot be listed.
        if choices != ["null"]:
            yield from choices
    elif hint is bool:
        yield from ("true", "false")
    elif hint is type(None):
        yield "null"


def _summary(option: Option) -> str:
    """Returns the first sentence of an option's description, on one line of a terminal."""
    text = " ".join(option.description.split())
    return shorten(text.partition(". ")[0].rstrip("."), LONGEST, placeholder=" ...")

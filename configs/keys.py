"""The dotted names of all options, and suggestions for unknown names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from typing import Any, Literal, NamedTuple, get_type_hints

from pydantic.fields import FieldInfo

from penstock.configs.algorithms import ALGORITHMS, DEFAULT, AlgoConfig
from penstock.configs.option_aliases import OFF_POLICY, meant
from penstock.configs.registry import Registry, Spec, registered
from penstock.configs.schema import Config
from penstock.configs.section import Section, description
from penstock.configs.value_types import either, words


class Option(NamedTuple):
    """One option of a config."""

    name: str
    words: str
    field: FieldInfo
    hint: Any
    kind: type[Section]
    attribute: str
    registered: str = ""

    @property
    def description(self) -> str:
        return " ".join(filter(None, (self.registered, description(self.kind, self.attribute))))

    @property
    def required(self) -> bool:
        return self.field.is_required()

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)


def sections() -> dict[str, tuple[type[Section], ...]]:
    """Returns the schema classes of each section by name; `algo` has one for each algorithm."""
    algos = tuple(spec.config for spec in ALGORITHMS.specs.values())
    return {name: algos if name == "algo" else (kind,) for name, kind in _kinds().items()}


@cache
def _kinds() -> dict[str, type[Section]]:
    hints = get_type_hints(Config)
    return {name: hints[name] for name in _fields(Config)}


def algorithms() -> tuple[str, ...]:
    """Returns the names of `algo.name`, the default first."""
    return tuple(ALGORITHMS.specs)


def options(algo: str = DEFAULT) -> dict[str, Option]:
    """Returns every option for the algorithm ``algo``, by its dotted name.

    They are in the order of the schema. An unknown ``algo`` stands for the default algorithm.
    """
    return _options_with(algo, registered())


@cache
def _options_with(algo: str, specs: tuple[Spec, ...]) -> dict[str, Option]:
    """Returns `options` while these ``specs`` are registered."""
    chosen = algorithms().index(algo) if algo in algorithms() else 0
    found: dict[str, Option] = {}
    for section, kinds in sections().items():
        kind = kinds[chosen] if len(kinds) > 1 else kinds[0]
        found |= {option.name: option for option in _options(section, kind)}
    found["algo.name"] = _choice("algo.name", algorithms(), AlgoConfig, "name")
    return found


def _options(section: str, kind: type[Section]) -> Iterator[Option]:
    """Yields the options of a section and of the sections in it."""
    hints = get_type_hints(kind, include_extras=True)
    for attribute, field in _fields(kind).items():
        name, hint = f"{section}.{field.serialization_alias or attribute}", hints[attribute]
        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _options(name, hint)
        elif registries := [each for each in field.metadata if isinstance(each, Registry)]:
            [registry] = registries
            yield _choice(name, registry.names, kind, attribute, registry.listed())
        else:
            yield Option(name, words(hint), field, hint, kind, attribute)


def _choice(
    name: str, choices: Sequence[str], kind: type[Section], attribute: str, registered: str = ""
) -> Option:
    """Returns an option whose value is one of the registered names."""
    text, field = either([f"`{choice}`" for choice in choices]), _fields(kind)[attribute]
    return Option(name, text, field, Literal[*choices], kind, attribute, registered)


def is_section(name: str) -> bool:
    """Whether options have names that begin with this one and a dot."""
    return any(option.startswith(f"{name}.") for option in options())


def nearest(unknown: str, algo: str = DEFAULT) -> str:
    """Returns a clause that suggests an option for an unknown dotted name.

    It is the equivalent of an option of another library, otherwise the option with the most similar
    name, otherwise the choices. ``algo`` is the chosen algorithm.
    """
    section, _, key = unknown.partition(".")
    known = options(algo)
    close = [] if section in sections() else get_close_matches(section, sections(), n=1)
    if close and f"{close[0]}.{key}" in known:
        return f"the nearest option is {close[0]}.{key}"
    if here := meant(key or section, algo):
        return f"the equivalent is {here}{_algorithms_of(here, algo)}"
    if not key:
        return _nearest_section(section, algo)
    own = [name.partition(".")[2] for name in known if name.startswith(f"{section}.")]
    if others := [other for other in algorithms() if unknown in options(other)]:
        return f"it is an option of algo.name {either(others)}, {algo} has {', '.join(own)}"
    if close := get_close_matches(key, own, n=1):
        return f"the nearest option is {section}.{close[0]}"
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if elsewhere or (not own and (elsewhere := get_close_matches(unknown, known))):
        best = max(elsewhere, key=lambda name: SequenceMatcher(None, name, unknown).ratio())
        return f"the nearest option is {best}"

    if clause := _near_other_library(key, algo):
        return clause
    return f"{section} has {', '.join(own)}" if own else _nearest_section(section, algo)


def _near_other_library(key: str, algo: str) -> str:
    """Returns a clause on the option of another library with a similar name; empty without one."""
    close = get_close_matches(key, OFF_POLICY, n=1)
    here = meant(close[0], algo) if close else None
    return f"the equivalent of {close[0]} is {here}{_algorithms_of(here, algo)}" if here else ""


def _algorithms_of(here: str, algo: str) -> str:
    """Returns a clause with the algorithms that have an option; empty if ``algo`` has it.

    ``equivalent`` is a text in which the option is the first name.
    """
    name = re.findall(r"[a-z]+\.[a-z_]+", here)[0]
    if name in options(algo):
        return ""
    return f", of algo.name {either([other for other in algorithms() if name in options(other)])}"


def _nearest_section(unknown: str, algo: str) -> str:
    for chosen in (algo, *algorithms()):
        if as_key := [name for name in options(chosen) if name.partition(".")[2] == unknown]:
            return f"the nearest option is {as_key[0]}{_algorithms_of(as_key[0], algo)}"
    if close := get_close_matches(unknown, sections(), n=1):
        return f"the nearest section is {close[0]}"
    return _near_other_library(unknown, algo) or f"the sections are {', '.join(sections())}"


def _fields(kind: type[Section]) -> dict[str, FieldInfo]:
    return kind.model_fields

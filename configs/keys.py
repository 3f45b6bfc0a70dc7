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
    """The dotted name, such as `learner.lr`."""
    words: str
    """Description of its values: the end of the sentence "it must be ..."."""
    field: FieldInfo
    """Its field in the schema."""
    hint: Any
    """The annotation of its values."""
    kind: type[Section]
    """The class of the section that defines it."""
    attribute: str
    """Its attribute in that class."""
    registered: str = ""
    """Description of the values that are registered for it; empty for other options."""

    @property
    def description(self) -> str:
        """What it does, in sentences."""
        return " ".join(filter(None, (self.registered, description(self.kind, self.attribute))))

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.field.is_required()

    @property
    def default(self) -> Any:
        """Its value where none is set."""
        return self.field.get_default(call_default_factory=True)


def sections() -> dict[str, tuple[type[Section], ...]]:
    """Returns the schema classes of each section by name; `algo` has one for each algorithm."""
    algo_kinds = tuple(spec.config for spec in ALGORITHMS.specs.values())
    return {name: algo_kinds if name == "algo" else (kind,) for name, kind in _kinds().items()}


@cache
def _kinds() -> dict[str, type[Section]]:
    """Returns the schema class of each section, by name, as the schema annotates it."""
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
    number = algorithms().index(algo) if algo in algorithms() else 0
    by_name: dict[str, Option] = {}
    for section, kinds in sections().items():
        kind = kinds[number] if len(kinds) > 1 else kinds[0]
        by_name |= {option.name: option for option in _options(section, kind)}

    by_name["algo.name"] = _choice("algo.name", algorithms(), kind=AlgoConfig, attribute="name")
    return by_name


def _options(section: str, kind: type[Section]) -> Iterator[Option]:
    """Yields the options of a section and of the sections in it."""
    hints = get_type_hints(kind, include_extras=True)
    for attribute, field in _fields(kind).items():
        name = f"{section}.{field.serialization_alias or attribute}"
        hint = hints[attribute]
        registries = [item for item in field.metadata if isinstance(item, Registry)]

        if isinstance(hint, type) and issubclass(hint, Section):
            yield from _options(name, hint)
        elif registries:
            [registry] = registries
            yield _choice(
                name,
                registry.names,
                kind=kind,
                attribute=attribute,
                registered=registry.listed(),
            )
        else:
            yield Option(name, words(hint), field=field, hint=hint, kind=kind, attribute=attribute)


def _choice(
    name: str, choices: Sequence[str], *, kind: type[Section], attribute: str, registered: str = ""
) -> Option:
    """Returns an option whose value is one of the registered names."""
    return Option(
        name=name,
        words=either([f"`{choice}`" for choice in choices]),
        field=_fields(kind)[attribute],
        hint=Literal[*choices],
        kind=kind,
        attribute=attribute,
        registered=registered,
    )


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

    # The section alone may be misspelt.
    sections_alike = [] if section in sections() else get_close_matches(section, sections(), n=1)
    if sections_alike and f"{sections_alike[0]}.{key}" in known:
        return f"the nearest option is {sections_alike[0]}.{key}"

    if equivalent := meant(key or section, algo):
        return f"the equivalent is {equivalent}{_algorithms_of(equivalent, algo)}"
    if not key:
        return _nearest_section(section, algo)

    section_keys = [name.partition(".")[2] for name in known if name.startswith(f"{section}.")]
    if others := [other for other in algorithms() if unknown in options(other)]:
        return (
            f"it is an option of algo.name {either(others)}, {algo} has {', '.join(section_keys)}"
        )
    if keys_alike := get_close_matches(key, section_keys, n=1):
        return f"the nearest option is {section}.{keys_alike[0]}"

    # Another section may have the key, or, if this section is unknown, an option of a similar name.
    elsewhere = [name for name in known if name.rpartition(".")[2] == key]
    if not elsewhere and not section_keys:
        elsewhere = get_close_matches(unknown, known)
    if elsewhere:
        best = max(elsewhere, key=lambda name: SequenceMatcher(None, name, unknown).ratio())
        return f"the nearest option is {best}"

    if clause := _near_other_library(key, algo):
        return clause
    if section_keys:
        return f"{section} has {', '.join(section_keys)}"
    return _nearest_section(section, algo)


def _near_other_library(key: str, algo: str) -> str:
    """Returns a clause on the option of another library with a similar name; empty without one."""
    names = get_close_matches(key, OFF_POLICY, n=1)
    equivalent = meant(names[0], algo) if names else None
    if equivalent is None:
        return ""
    return f"the equivalent of {names[0]} is {equivalent}{_algorithms_of(equivalent, algo)}"


def _algorithms_of(equivalent: str, algo: str) -> str:
    """Returns a clause with the algorithms that have an option; empty if ``algo`` has it.

    ``equivalent`` is a text in which the option is the first name.
    """
    name = re.findall(r"[a-z]+\.[a-z_]+", equivalent)[0]
    if name in options(algo):
        return ""
    return f", of algo.name {either([other for other in algorithms() if name in options(other)])}"


def _nearest_section(unknown: str, algo: str) -> str:
    """Returns a clause that suggests an option, or a section, for a name without a dot."""
    # The name may be an option without its section, of this or of another algorithm.
    for chosen in (algo, *algorithms()):
        names = [name for name in options(chosen) if name.partition(".")[2] == unknown]
        if names:
            return f"the nearest option is {names[0]}{_algorithms_of(names[0], algo)}"

    if sections_alike := get_close_matches(unknown, sections(), n=1):
        return f"the nearest section is {sections_alike[0]}"
    return _near_other_library(unknown, algo) or f"the sections are {', '.join(sections())}"


def _fields(kind: type[Section]) -> dict[str, FieldInfo]:
    return kind.model_fields

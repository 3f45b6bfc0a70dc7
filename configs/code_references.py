"""References: texts of a config that make a process import a module, open a file or an address.

A config may come from elsewhere: an actor receives it from the learner that it joins, and policy
files and run folders hold one. Other values of a config can at worst waste time and memory; a
reference runs code as this user, or has data of this user read, replaced or sent. So references are
refused unless `--allow` names them or their source is trusted: an actor that has authenticated its
learner (`check`), or a run folder with names that this user's runs have used
(`penstock.core.used_names`). A policy file is never trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from pydantic import JsonValue

from penstock.configs.errors import UserError
from penstock.configs.run import RunConfig, SinkOptions
from penstock.configs.schema import Config

SHOWN = 100  # characters of a received text in a sentence
_NAMES_CODE_OR_FILE = re.compile(r"[:/\\]")


class Reference(NamedTuple):
    """A text of a config that names code, a file or an address, and the option that contains it."""

    option: str
    text: str


def references(config: Config) -> list[Reference]:
    """Returns everything in ``config`` that an actor would import, call or open.

    These are `module:name` in `env.id` (a gymnasium id names only installed environments), all of
    `env.wrappers`, a network or an algorithm of the user's own, and any text among their options
    that could name a module, a class or a file.
    """
    named: list[Reference] = []
    if ":" in config.env.id:
        named.append(Reference("env.id", config.env.id))
    named += _texts("env.kwargs", config.env.kwargs)

    # A wrapper is a name, or a map of one name to its keyword arguments.
    for wrapper in config.env.wrappers:
        name, kwargs = (wrapper, {}) if isinstance(wrapper, str) else next(iter(wrapper.items()))
        named.append(Reference("env.wrappers", name))
        named += _texts(f"env.wrappers {name}", kwargs)

    if config.model.entry is not None:
        named.append(Reference("model.entry", config.model.entry))
        named += _texts("model.settings", config.model.settings)

    for name, value in config.algo.model_dump(exclude={"name", *config.algo.learner_files}).items():
        if name in config.algo.modules:
            named.append(Reference(f"algo.{name}", value))
        else:
            named += _texts(f"algo.{name}", value)
    return named


def references_in_training(config: Config) -> list[Reference]:
    """Returns `references`, and what only the command that trains the run uses.

    These are the classes that it imports; the addresses at which it listens; and the places outside
    the run's folder from which it reads, or to which it writes or sends.
    """
    named = references(config)
    for option in config.algo.learner_files:
        value = getattr(config.algo, option)
        paths = value if isinstance(value, list) else [value]
        named += [Reference(f"algo.{option}", path) for path in paths if path is not None]
    named += [Reference("run.callbacks", name) for name in config.run.callbacks]

    places = {
        "checkpoint.store": config.checkpoint.store,
        "league.pool": config.league.pool,
        "learner.reduce.interface": config.learner.reduce.interface,
        "transport.bind": config.transport.bind,
        "transport.curve": config.transport.curve,
    }
    named += [Reference(option, place) for option, place in places.items() if place is not None]
    named += [Reference("eval.against", name) for name in config.eval.against or ()]
    if config.transport.insecure:
        named.append(Reference("transport.insecure", "insecure=true"))

    named += _changed_sink_options(config.run)
    return named


def not_allowed(named: Iterable[Reference], allow: Sequence[str]) -> Iterator[Reference]:
    """Yields those of ``named`` whose texts match no pattern in ``allow``.

    Patterns may have `*` and `?`.
    """
    # A name could be a part of a text, and only one element of a list is a whole pattern.
    patterns = [allow] if isinstance(allow, str) else allow
    for reference in named:
        text = reference.text
        if text not in patterns and not any(fnmatchcase(text, pattern) for pattern in patterns):
            yield reference


def check(config: Config, allow: Sequence[str], *, trusted: bool, source: str) -> None:
    """Refuse a received config with a reference that is not allowed.

    Args:
        config: the received config.
        allow: patterns, with `*` and `?`, of which `env.id` and every reference must match one.
            Without patterns, ``trusted`` decides.
        trusted: whether ``source`` is authenticated.
        source: the sender of the config, for the message.

    Raises:
        UserError: for the first such reference; it says how to allow it.
    """
    if allow:
        # A reference may be named twice; `env.id` must match a pattern whatever it names.
        named = dict.fromkeys([Reference("env.id", config.env.id), *references(config)])
        for option, text in not_allowed(named, allow):
            raise UserError(
                f"{source} names {option} {quoted(text)}, which is none of --allow "
                f"{', '.join(allow)}; add --allow {quoted(text)} if you trust it"
            )
    elif not trusted:
        for option, text in references(config):
            raise UserError(
                f"{source} names {option} {quoted(text)}, which this actor would run or open, and "
                "the sender is not authenticated; connect to the run's folder or with --curve, or "
                f"give --allow {quoted(text)} or --insecure"
            )


def refusal(source: str, reference: Reference, why: str, way: str = "") -> UserError:
    """Returns the error for a reference in a policy file or a run folder.

    Args:
        source: the file or folder.
        reference: the reference that is refused.
        why: the reason, as a part of the sentence.
        way: how to allow it, where that is not by `--allow`.
    """
    option = quoted(reference.option)[1:-1]
    text = quoted(reference.text)
    way = way or f"give --allow {text}, or to a function of penstock allow=[{text}]"
    return UserError(f"{source} names {option} {text}, {why}; if you trust it, {way}")


def quoted(text: str) -> str:
    """Returns a received text quoted for a message.

    It is of bounded length, without control characters.
    """
    return ascii(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def _changed_sink_options(run: RunConfig) -> Iterator[Reference]:
    """Yields the options of sinks that are not the defaults."""
    for name, field in SinkOptions.model_fields.items():
        value = getattr(run, name)
        if value == field.default:
            continue

        # The text of a switch has its name, since the true of one must not allow another one.
        text = f"{name}={value}".lower() if isinstance(value, bool) else str(value)
        yield Reference(f"run.{name}", text)


def _texts(option: str, value: JsonValue) -> Iterator[Reference]:
    """Yields the texts in a JSON value that could name code or a file, including keys of maps."""
    if isinstance(value, str):
        if _NAMES_CODE_OR_FILE.search(value):
            yield Reference(option, value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(option, key)
            yield from _texts(option, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(option, inner)

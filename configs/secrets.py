"""Secrets of an environment: `${env:PENSTOCK_NAME}` in `env.kwargs` or `env.wrappers`.

The config contains the reference, and so does everything made from it: `config.yaml`, checkpoints,
metrics, W&B, and the config that a learner sends to actors on other hosts. A process that makes
environments resolves it from its own environment variables. Only variables whose names begin with
PENSTOCK_ may be referred to: otherwise a config from elsewhere could read any secret of this user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError

if TYPE_CHECKING:
    from penstock.configs.sections import EnvConfig

REFERENCE = re.compile(r"\$\{env:([^}]*)\}")
PREFIX = "PENSTOCK_"
SHORTEST = 4  # characters; shorter values would be replaced in unrelated text

_resolved: dict[str, str] = {}  # the reference of each value that this process has resolved


def resolve(env: EnvConfig) -> EnvConfig:
    """Returns the section with the values of the variables that it refers to.

    Raises:
        UserError: for a variable that is not set, or may not be referred to.
    """
    if next(references(env), None) is None:
        return env
    return env.model_copy(
        update={"kwargs": _replaced(env.kwargs), "wrappers": _replaced(env.wrappers)}
    )


def references(env: EnvConfig) -> Iterator[str]:
    """Yields the names of the variables that an environment refers to."""
    yield from _names([env.kwargs, env.wrappers])


def redacted(text: str) -> str:
    """Returns ``text`` with the reference in place of each value that this process has resolved."""
    for value, reference in _resolved.items():
        text = text.replace(value, reference)
    return text


def redacted_json(value: Any) -> Any:
    """Returns a JSON value with each text `redacted`, also keys of maps."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {redacted_json(key): redacted_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_json(item) for item in value]
    return value


def _names(value: Any) -> Iterator[str]:
    """Yields the names of the variables that a JSON value refers to."""
    if isinstance(value, str):
        yield from REFERENCE.findall(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _names(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _names(item)


def _replaced(value: Any) -> Any:
    """Returns a JSON value with the value of each variable in place of its reference."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda match: _secret(match[1], match[0]), value)
    if isinstance(value, dict):
        return {key: _replaced(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item) for item in value)
    return value


def _secret(name: str, reference: str) -> str:
    """Returns the value of an environment variable, which is redacted from now on.

    Args:
        name: name of the variable.
        reference: the text that refers to it.

    Raises:
        UserError: if the variable is not set, or may not be referred to.
    """
    if not name.startswith(PREFIX):
        raise UserError(
            f"the environment's arguments refer to {reference}, and names of variables must begin "
            f"with {PREFIX}; export {PREFIX}{name} and refer to that"
        )

    value = os.environ.get(name)
    if value is None:
        raise UserError(
            f"the environment's arguments refer to {reference}, which is not set on this host; "
            f"export {name}"
        )

    if len(value) >= SHORTEST:
        _resolved[value] = reference
    return value

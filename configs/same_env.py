"""Which game it is, by its settings: they stand beside what was learned or judged in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.configs.sections import EnvConfig


def settings(env: EnvConfig) -> dict[str, Any]:
    """JSON-ready; what `same_game` compares with."""
    return env.model_dump(mode="json")


def same_game(known: Mapping[str, Any], env: EnvConfig) -> bool:
    """Whether ``known``, from `settings`, is the game of ``env``. What an older version did not
    write down does not tell them apart."""
    return all(known.get(name, value) == value for name, value in settings(env).items())

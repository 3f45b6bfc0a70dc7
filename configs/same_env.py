"""Identity of an environment by its settings, stored with checkpoints and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.configs.sections import EnvConfig


def settings(env: EnvConfig) -> dict[str, Any]:
    """The settings as JSON, for `same_game`."""
    return env.model_dump(mode="json", exclude={"kind"})  # which decides defaults only


def same_game(known: Mapping[str, Any], env: EnvConfig) -> bool:
    """Whether ``known``, from `settings`, are the settings of ``env``. Settings that an older
    version did not store are ignored."""
    return all(known.get(name, value) == value for name, value in settings(env).items())

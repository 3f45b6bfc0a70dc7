"""Secrets of a config are resolved when an environment is made, and never written to a file."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from penstock.configs import secrets
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.sections import EnvConfig
from penstock.envs import make

SECRET = "swordfish-1234"
GIVEN: list[Any] = []


class Locked(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, **kwargs: Any) -> None:
        GIVEN.append(kwargs)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_resolved", {})
    monkeypatch.setenv("PENSTOCK_KEY", SECRET)
    monkeypatch.setenv("OTHER_KEY", "of another program")
    GIVEN.clear()


def test_the_environment_gets_the_value_and_the_config_keeps_the_reference() -> None:
    overrides = [
        "env.kwargs.key=${env:PENSTOCK_KEY}",
        "env.kwargs.deep={a: ['b ${env:PENSTOCK_KEY}']}",
    ]
    config = resolve(f"{__name__}:Locked", overrides)
    make(config.env, 1).close()
    assert [{"key": SECRET, "deep": {"a": [f"b {SECRET}"]}}] == GIVEN
    assert SECRET not in dump(config) + config.model_dump_json() + str(config.env.identity())
    assert "${env:PENSTOCK_KEY}" in dump(config)


def test_wrappers_get_the_value_of_a_secret() -> None:
    env = EnvConfig(id="x", wrappers=[{"a:b": {"key": "${env:PENSTOCK_KEY}"}}])
    assert secrets.resolve(env).wrappers == [{"a:b": {"key": SECRET}}]
    assert list(secrets.references(env)) == ["PENSTOCK_KEY"]


def test_config_without_a_secret_is_unchanged() -> None:
    env = EnvConfig(id="x", kwargs={"price": "$5 {env:HOME} ${HOME}"})
    assert secrets.resolve(env) is env


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("${env:PENSTOCK_UNSET}", "which is not set on this host; export PENSTOCK_UNSET"),
        ("${env:OTHER_KEY}", "export PENSTOCK_OTHER_KEY and refer to that"),
        ("${env:}", "names of variables must begin with PENSTOCK_"),
    ],
)
def test_invalid_secret_references_are_refused(reference: str, said: str) -> None:
    """Else the config of a stranger could send any variable of this user anywhere."""
    with pytest.raises(UserError, match=said):
        secrets.resolve(EnvConfig(id="x", kwargs={"key": reference}))


def test_resolved_secrets_are_redacted_from_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SHORT", "abc")
    env = EnvConfig(id="x", kwargs={"a": "${env:PENSTOCK_KEY}", "b": "${env:PENSTOCK_SHORT}"})
    secrets.resolve(env)
    assert secrets.redacted(f"key={SECRET}, abc") == "key=${env:PENSTOCK_KEY}, abc"
    told = {"why": [f"no {SECRET}", 3, None], "count": 1}
    assert secrets.redacted_json(told) == {"why": ["no ${env:PENSTOCK_KEY}", 3, None], "count": 1}

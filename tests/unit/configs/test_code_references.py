"""Which code a config from another user may make an actor run."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.configs.code_references import Reference, check, references
from penstock.configs.errors import UserError
from penstock.configs.load import presets, resolve
from penstock.configs.schema import Config

OWN = ["env.id=my_game:make_env"]
EVERYTHING: dict[str, Any] = {
    "env": {
        "id": "game:Env-v0",
        "kwargs": {"size": 3, "name": "red", "layers": [{"map": "/tmp/map.xml"}]},
        "wrappers": ["shop:Wrap", {"shop:Other": {"of": "shop:Third", "a:b": 1}}],
    },
    "model": {"entry": "nets:Net", "settings": {"inner": "nets:Inner"}},
    "algo": {"name": "custom", "entry": "algorithm", "settings": {"file": "a\\b"}},
}


@pytest.mark.parametrize("name", presets())
def test_presets_name_no_code(name: str) -> None:
    assert references(resolve(name)) == []


def test_every_option_that_names_code_or_a_file_is_found() -> None:
    assert references(Config.model_validate(EVERYTHING)) == [
        Reference("env.id", "game:Env-v0"),
        Reference("env.kwargs", "/tmp/map.xml"),
        Reference("env.wrappers", "shop:Wrap"),
        Reference("env.wrappers", "shop:Other"),
        Reference("env.wrappers shop:Other", "shop:Third"),
        Reference("env.wrappers shop:Other", "a:b"),
        Reference("model.entry", "nets:Net"),
        Reference("model.settings", "nets:Inner"),
        Reference("algo.entry", "algorithm"),
        Reference("algo.settings", "a\\b"),
    ]


@pytest.mark.parametrize(
    ("overrides", "allow", "trusted", "refused"),
    [
        ([], (), False, None),
        ([], (), True, None),
        (OWN, (), True, None),
        (OWN, (), False, "env.id 'my_game:make_env', which this actor would run or open"),
        (OWN, ("my_game:make_env",), False, None),
        (OWN, ("my_game:*",), False, None),
        (OWN, ("my_*",), True, None),
        (OWN, ("other:*",), True, "env.id 'my_game:make_env', which is none of --allow other:*"),
        (OWN, ("my_game",), False, "which is none of --allow my_game;"),
        ([], ("CartPole-v1",), False, None),
        ([], ("Acrobot-v1", "my_game:*"), True, "env.id 'CartPole-v1', which is none of --allow"),
        (["env.wrappers=[w:W]"], ("CartPole-v1",), True, "env.wrappers 'w:W', which is none of"),
        (["env.wrappers=[w:W]"], ("CartPole-v1", "w:W"), False, None),
        (["model.entry=nets:Net"], (), False, "model.entry 'nets:Net', which this actor would"),
    ],
)
def test_untrusted_code_references_are_refused(
    overrides: list[str], allow: tuple[str, ...], trusted: bool, refused: str | None
) -> None:
    config = resolve("my_game:make_env" if overrides == OWN else "CartPole-v1", overrides)
    if refused is None:
        check(config, allow, trusted=trusted, source="the learner")
        return
    with pytest.raises(UserError, match=re.escape(refused)):
        check(config, allow, trusted=trusted, source="the learner")

"""The JSON Schema of YAML files, by an independent validator."""

from __future__ import annotations

from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic_core import to_jsonable_python

from penstock.configs.algorithms import ALGORITHMS, AlgoConfig, AlgorithmSpec
from penstock.configs.errors import UserError
from penstock.configs.json_schema import json_schema
from penstock.configs.keys import algorithms, options
from penstock.configs.load import PRESETS, dump, presets, resolve
from penstock.configs.reduce import CODECS, CodecSpec
from penstock.configs.value_types import Count
from penstock.configs.yaml_text import parse

SCHEMA = json_schema()


def refused(text: str, schema: dict[str, Any] = SCHEMA) -> list[str]:
    """The paths of what a YAML text has wrong, by the schema."""
    errors = Draft202012Validator(schema).iter_errors(parse(text, "text")[0])
    return sorted({".".join(map(str, error.absolute_path)) for error in errors})


def test_schema_is_valid_for_its_draft() -> None:
    assert SCHEMA["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("preset", presets())
def test_every_preset_conforms_to_the_schema(preset: str) -> None:
    assert refused((PRESETS / f"{preset}.yaml").read_text()) == []
    assert refused(dump(resolve(preset))) == []


@pytest.mark.parametrize("algo", algorithms())
def test_schema_has_every_option_with_description_and_default(algo: str) -> None:
    for name, option in options(algo).items():
        section, *path = name.split(".")
        here = SCHEMA["$defs"][algo] if section == "algo" else SCHEMA["properties"][section]
        for key in path:
            here = here["properties"][key]
        assert here["description"] == option.description, name
        assert ("default" in here) != option.required, name
        if not option.required:
            assert here["default"] == to_jsonable_python(option.default, by_alias=True), name


ACCEPTED = """
base: pong
---
base: breakout
algo: {epochs: 4}
---
base: breakout
algo: {name: impala, rho_clip: 0.9}
---
algo: {rho_clip: 0.9}
---
algo:
env: {id: CartPole-v1, kwargs: null, wrappers: ["a:B", {a.b:C.d: {size: [1, {}]}}]}
learner: {lr: 1e-3, lr_decay_steps: 1e6, reduce: {codec: int8, block: 64}, nonfinite: null}
---
model: {kind: lstm, settings: null}
transport: {kind: zmq, bind: "tcp://*:7700"}
run: {wandb: project, tensorboard: true}
stop: {return: -3.5}
---
algo: {name: custom, entry: "my.module:Thing", settings: {depth: {any: [thing]}}}
---
base: kuhn
lines: {main: {league: {draw: main, mirror: 0.35}}, exploiter: {learner: {lr: 1e-3}}, third: null}
"""


@pytest.mark.parametrize("text", ACCEPTED.split("---\n"))
def test_schema_accepts_valid_files(text: str) -> None:
    assert refused(text) == []


REFUSED = {
    "learnr: {lr: 1e-3}": "",
    "learner: {learning_rate: 1e-3}": "learner",
    "learner: {lr: 0}": "learner.lr",
    "learner: {lr: fast}": "learner.lr",
    "learner: {lr: true}": "learner.lr",
    "learner: {nice: 20}": "learner.nice",
    "learner: {device: gpu}": "learner.device",
    "learner: {optimizer: lion}": "learner.optimizer",
    "learner: {lr: null}": "learner.lr",
    "learner: {nonfinite: {lr_factor: 1.5}}": "learner.nonfinite.lr_factor",
    "learner: {reduce: {codec: zip}}": "learner.reduce.codec",
    "learner: {reduce: {blok: 3}}": "learner.reduce",
    "actors: {count: 1.5}": "actors.count",
    "model: {hidden: []}": "model.hidden",
    "model: {hidden: [64, 0]}": "model.hidden.1",
    "transport: {bind: localhost}": "transport.bind",
    "env: {id: 3}": "env.id",
    "env: {wrappers: [a.B]}": "env.wrappers.0",
    "env: {wrappers: [{a.B: {}}]}": "env.wrappers.0",
    "env: {wrappers: [{'a:B': {}, 'a:C': {}}]}": "env.wrappers.0",
    "base: pongg": "base",
    "algo: {name: a2c}": "algo.name",
    "algo: {name: ppo, tau: 1.0}": "algo",
    "algo: {name: ppo, clip: 1}": "algo.clip",
    "algo: {epochs: 4}": "algo",  # impala's
    "{base: pong_apex, algo: {entropy_cost: 0.1}}": "algo",  # dqn's
    "{base: breakout, algo: {name: dqn, epochs: 4}}": "algo",
    "stop: {return_: 3}": "stop",
    "lines: {main: {learnr: {lr: 1e-3}}}": "lines.main",
}


@pytest.mark.parametrize("text", REFUSED)
def test_schema_refuses_invalid_files(text: str, tmp_path: Any) -> None:
    assert refused(text) == [REFUSED[text]]
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(UserError):
        resolve(str(file), ["env.id=CartPole-v1"] if "env" not in text else [])


class OwnAlgoConfig(AlgoConfig):
    name: str = "own"
    depth: Count = 3

    @property
    def trains_on(self) -> Any:
        return "unrolls"


def test_schema_includes_registered_algorithms_and_codecs() -> None:
    ALGORITHMS.register(AlgorithmSpec(OwnAlgoConfig, "nowhere:X"))
    CODECS.register(CodecSpec("own", "twice", "nowhere:X"))
    try:
        schema = json_schema()
    finally:
        ALGORITHMS.unregister("own")
        CODECS.unregister("own")
    text = "{algo: {name: own, depth: 4}, learner: {reduce: {codec: own}}}"
    assert refused(text, schema) == []
    assert refused(text) == ["algo.name", "learner.reduce.codec"]
    assert refused("algo: {name: own, depth: 0}", schema) == ["algo.depth"]

"""Which texts each type of option accepts."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.errors import UserError
from penstock.configs.keys import algorithms, options
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.configs.value_types import MOST, Seed, words


def value_of(key: str, text: str) -> Any:
    value: Any = resolve("Acrobot-v1", [f"{key}={text}"]).model_dump()
    for part in key.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learner.lr", "3e-4", 0.0003),
        ("learner.lr", "2.5E-4", 0.00025),
        ("learner.lr", ".5", 0.5),
        ("learner.lr", "1", 1.0),
        ("learner.lr", "'1e-3'", 0.001),
        ("stop.return", "-20.5", -20.5),
        ("stop.return", "475", 475.0),
        ("stop.env_steps", "1e6", 1_000_000),
        ("stop.env_steps", "2.5e6", 2_500_000),
        ("stop.env_steps", "1_000", 1000),
        ("stop.env_steps", "'1e6'", 1_000_000),
        ("stop.env_steps", "null", None),
        ("stop.env_steps", "", None),
        ("run.seed", "0", 0),
        ("run.seed", "4294967295", 2**32 - 1),
        ("actors.count", "010", 10),
        ("learner.grad_clip", "~", None),
        ("algo.normalize_advantages", "true", True),
        ("algo.normalize_advantages", "false", False),
        ("transport.codec", "none", "none"),
        ("model.hidden", "[64,64]", [64, 64]),
        ("model.hidden", "[1e2]", [100]),
        ("env.kwargs", "{a: 3e-4, b: [off, no]}", {"a": 0.0003, "b": ["off", "no"]}),
        ("env.kwargs", "{a: 1e5, b: 1.0e5, c: -2E+1}", {"a": 100_000, "b": 1e5, "c": -20}),
        ("env.wrappers", "[mine:Wrap]", ["mine:Wrap"]),
        ("env.wrappers", "[{a.b:Wrap: {k: 1}}]", [{"a.b:Wrap": {"k": 1}}]),
        ("run.dir", "runs/first", "runs/first"),
        ("run.dir", "2024-01-01", "2024-01-01"),
        ("run.dir", "'5'", "5"),
        ("run.dir", "=", "="),
        ("run.dir", "#1", "#1"),
        ("run.dir", "a #b", "a #b"),
        ("run.dir", "'a #b'", "a #b"),
        ("env.kwargs.color", "#ff0000", "#ff0000"),
        ("env.kwargs", "{a: #f00, '#b': [x #y, 3e-4]}", {"a": "#f00", "#b": ["x #y", 0.0003]}),
        ("learner.device", "cuda:1", "cuda:1"),
        ("transport.bind", "tcp://127.0.0.1:7700", "tcp://127.0.0.1:7700"),
        ("transport.bind", "ipc:///tmp/a", "ipc:///tmp/a"),
    ],
)
def test_a_value_means_what_a_person_expects(key: str, text: str, value: Any) -> None:
    read = value_of(key, text)
    assert repr(read) == repr(value)


@pytest.mark.parametrize(
    ("key", "text", "shown"),
    [
        ("learner.lr", "fast", "'fast'"),
        ("learner.lr", "0", "0"),
        ("learner.lr", "true", "true"),
        ("learner.lr", "", "null"),
        ("learner.lr", ".nan", "NaN"),
        ("learner.lr", ".inf", "Infinity"),
        ("learner.lr", "nan", "'nan'"),
        ("learner.lr", "[1]", "[1]"),
        ("algo.discount", "1.01", "1.01"),
        ("stop.return", "soon", "'soon'"),
        ("actors.count", "1.5", "1.5"),
        ("actors.count", "0", "0"),
        ("actors.count", "true", "true"),
        ("actors.count", ".inf", "Infinity"),
        ("actors.count", "many", "'many'"),
        ("actors.nice", "20", "20"),
        ("run.seed", "-1", "-1"),
        ("run.seed", "4294967296", "4294967296"),
        ("algo.normalize_advantages", "1", "1"),
        ("algo.normalize_advantages", "yes", "'yes'"),
        ("algo.normalize_advantages", "off", "'off'"),
        ("algo.name", "a2c", "'a2c'"),
        ("transport.codec", "null", "null"),
        ("model.hidden", "64", "64"),
        ("model.log_std_init", "500", "500"),
        ("model.log_std_init", "-21", "-21"),
        ("model.hidden", "[]", "[]"),
        ("model.hidden", "[64,x]", '[64, "x"]'),
        ("env.id", "5", "5"),
        ("env.id", "''", "''"),
        ("env.kwargs", "5", "5"),
        ("env.wrappers", "mine:Wrap", "'mine:Wrap'"),
        ("env.wrappers", "[Wrap]", '["Wrap"]'),
        ("env.wrappers", "[{a:B: {}, c:D: {}}]", '[{"a:B": {}, "c:D": {}}]'),
        ("env.wrappers", "[{a:B: 1}]", '[{"a:B": 1}]'),
        ("env.wrappers", "[3]", "[3]"),
        ("run.dir", "5", "5"),
        ("learner.device", "gpu", "'gpu'"),
        ("transport.bind", "localhost", "'localhost'"),
        ("transport.bind", "tcp://localhost", "'tcp://localhost'"),
    ],
)
def test_a_wrong_value_is_refused_with_the_rule(key: str, text: str, shown: str) -> None:
    with pytest.raises(UserError) as refused:
        value_of(key, text)
    option = options()[key]
    rule = option.words.replace("`", "'")
    expected = f"override {key}={text}: {key} is {shown}; it must be {rule}"
    assert str(refused.value).partition("; the default is ")[0] == expected


@given(st.integers(1, 2**62))
def test_every_whole_number_is_exact(number: int) -> None:
    assert value_of("stop.env_steps", str(number)) == number


@pytest.mark.parametrize(
    ("key", "value"), [("algo.value_cost", "1.1e30"), ("learner.eps", "1e300")]
)
def test_number_beyond_float32_is_refused(key: str, value: str) -> None:
    assert value_of(key, "1e30") == 1e30
    with pytest.raises(
        UserError, match=r"number .*0, of at most 1e\+30 in absolute value; the def"
    ):
        value_of(key, value)


@given(st.floats(min_value=1e-300, max_value=MOST))
def test_every_number_is_exact(number: float) -> None:
    assert value_of("learner.lr", repr(number)) == number
    assert value_of("stop.return", repr(-number)) == -number


@given(st.integers(0, 12), st.integers(1, 9))
def test_a_power_of_ten_is_a_whole_number(exponent: int, digit: int) -> None:
    assert value_of("stop.env_steps", f"{digit}e{exponent}") == digit * 10**exponent


@pytest.mark.parametrize("algo", algorithms())
def test_every_option_has_a_type_description_and_valid_default(algo: str) -> None:
    for name, option in options(algo).items():
        assert option.words, name
        assert option.description, name
        assert option.description.endswith("."), name
    needed: dict[str, dict[str, Any]] = {
        "custom": {"entry": "mine"},
        "distill": {"teachers": ["runs/a"]},
    }
    section = {"name": algo, **needed.get(algo, {})}
    model = {"core": "lstm"} if algo == "r2d2" else {}
    defaults = Config.model_validate({"env": {"id": "x"}, "algo": section, "model": model})
    assert defaults.algo.name == algo
    assert Config.model_validate(defaults.model_dump()) == defaults


def test_type_words_follow_the_annotation() -> None:
    assert words(Seed) == "a whole number from 0 to 4294967295"
    assert words(Seed | None) == "a whole number from 0 to 4294967295 or null"
    assert words(Annotated[bool, "anything"]) == "true or false"
    assert options()["learner.lr_scaling"].words == "`none`, `sqrt` or `linear`"
    assert options()["algo.name"].words == options("sac")["algo.name"].words
    assert (
        options()["algo.name"].words
        == "`impala`, `ppo`, `custom`, `dqn`, `pqn`, `r2d2`, `sac`, `td3` or `distill`"
    )


def test_a_config_is_frozen() -> None:
    cfg = resolve("cartpole", ["learner.lr=0.003"])
    with pytest.raises(ValueError, match="frozen"):
        cfg.learner.lr = 1.0
    assert cfg.learner.lr == 0.003

"""Options that change by agent steps, against values worked out by hand."""

from __future__ import annotations

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.schedules import LinearSchedule, over_run, value_at, with_values

RATE = "learner.lr={from: 3e-4, to: 1e-4, steps: 1000}"


def test_a_schedule_is_linear_and_stays_at_its_end() -> None:
    lr = resolve("x:f", [RATE]).learner.lr
    assert [value_at(lr, steps) for steps in (0, 250, 500, 1000, 10**9)] == pytest.approx(
        [3e-4, 2.5e-4, 2e-4, 1e-4, 1e-4]
    )
    assert value_at(0.5, 10**6) == 0.5


def test_schedule_may_rise() -> None:
    rising = LinearSchedule.model_validate({"from": 0.0, "to": 0.02, "steps": 10})
    assert rising.at(5) == pytest.approx(0.01)


def test_schedule_without_steps_spans_the_run_or_stays_at_its_start() -> None:
    for limit, at_500 in (("1000", 0.1), ("2000", 0.15), ("null", 0.2)):
        config = resolve(
            "x:f", ["algo.name=ppo", "algo.clip={from: 0.2, to: 0}", f"stop.env_steps={limit}"]
        )
        algo = over_run(config.algo, config.stop.env_steps)
        assert with_values(algo, 500).model_dump()["clip"] == pytest.approx(at_500)
        assert config.algo.model_dump()["clip"] == {"from": 0.2, "to": 0.0, "steps": None}


def test_schedule_with_steps_does_not_depend_on_the_length_of_the_run() -> None:
    config = resolve("x:f", [RATE, "stop.env_steps=77"])
    assert over_run(config.learner, 77) == config.learner


def test_a_section_gets_the_values_of_all_its_schedules() -> None:
    overrides = ["algo.name=ppo", "algo.clip={from: 0.2, to: 0.1, steps: 100}"]
    algo = resolve("x:f", [*overrides, "algo.entropy_cost={from: 0.02, to: 0, steps: 50}"]).algo
    at_25 = with_values(algo, 25).model_dump()
    assert (at_25["clip"], at_25["entropy_cost"]) == pytest.approx((0.175, 0.01))
    others = {k: v for k, v in algo.model_dump().items() if k not in ("clip", "entropy_cost")}
    assert others.items() <= at_25.items()


def test_part_of_a_schedule_may_be_overridden() -> None:
    lr = resolve("x:f", [RATE, "learner.lr.to=0"]).learner.lr
    assert lr == LinearSchedule.model_validate({"from": 3e-4, "to": 0, "steps": 1000})
    assert resolve("x:f", [RATE, "learner.lr=1e-3"]).learner.lr == 1e-3


def test_schedule_survives_yaml(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = resolve("cartpole_ppo", [RATE])
    path = tmp_path / "config.yaml"
    path.write_text(dump(config))
    assert resolve(str(path)) == config


def test_schedule_replaces_the_decay_of_a_preset() -> None:
    for given in (RATE, "learner={lr: {from: 1e-3, to: 0}}", "learner.lr.from=1e-3"):
        overrides = [given, "learner.lr.to=0"]
        learner = resolve("cartpole_ppo", overrides).learner
        assert (learner.lr_end_fraction, learner.lr_decay_steps) == (1.0, None)
    assert resolve("cartpole_ppo", ["learner.lr=1e-3"]).learner.lr_decay_steps == 10**6


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("learner.lr", "{from: 1e-3}", "a number above 0"),
        ("learner.lr", "{from: 1e-3, to: 0, kind: cosine}", "a number above 0"),
        ("learner.lr", "{from: 0, to: 1e-3}", "a number above 0"),
        ("learner.lr", "{from: 1e-3, to: -1}", "a number above 0"),
        ("learner.lr", "{from: 1e-3, to: 0, steps: 0}", "a number above 0"),
        ("algo.clip", "{from: 0.2, to: 1}", "a number above 0 and below 1"),
        ("algo.clip", "1", "a number above 0 and below 1"),
        ("algo.entropy_cost", "{from: x, to: 0}", "a number of at least 0"),
        ("algo.entropy_cost", "-1", "a number of at least 0"),
    ],
)
def test_invalid_schedule_is_refused_in_one_sentence(option: str, value: str, rule: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve("cartpole_ppo", [f"{option}={value}"])
    [line] = str(refused.value).splitlines()
    assert line.startswith(f"override {option}={value}: {option} is ")
    assert f"; it must be {rule} or a schedule {{from: A, to: B, steps: N}}" in line

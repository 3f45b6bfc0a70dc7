"""A resume under other options says so, and one by another algorithm is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.launch import run
from penstock.launch.folders import Resume
from penstock.launch.resumed import check_folder_named, differences


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    options = ("learner.lr=1e-3", "env.kwargs={sutton_barto_reward: true}")
    (tmp_path / "config.yaml").write_text(dump(resolve("cartpole", options)))
    return tmp_path


SAME = ("learner.lr=1e-3", "env.kwargs={sutton_barto_reward: true}", "run.dir=elsewhere")


def test_the_same_options_are_no_news(folder: Path) -> None:
    assert differences(folder, resolve("cartpole", SAME), "must") == ""


def test_what_differs_is_told_by_its_dotted_name(folder: Path) -> None:
    options = ("learner.lr=3e-4", "env.kwargs={}", "stop.minutes=2")
    assert differences(folder, resolve("cartpole", options), "auto") == (
        "resumed with other options than before: env.kwargs.sutton_barto_reward true -> null, "
        "learner.lr 0.001 -> 0.0003, stop.minutes null -> 2.0"
    )


def test_of_many_differences_the_first_are_told(folder: Path) -> None:
    more = [f"actors.{option}" for option in ("envs=8", "unroll=8", "count=3")]
    config = resolve("cartpole", (*SAME, *more, "run.seed=9", "run.grace_s=3", "run.interval_s=3"))
    said = differences(folder, config, "auto")
    assert said.count("->") == 4
    assert said.endswith(", and 2 more")


def test_another_algorithm_cannot_go_on(folder: Path) -> None:
    config = resolve("cartpole", ("algo.name=ppo",))
    with pytest.raises(UserError, match=r"trained by impala, .*; set algo\.name=impala, or run\.d"):
        differences(folder, config, "auto")
    (folder / "checkpoints" / "last").rmdir()
    assert differences(folder, config, "auto") == ""  # it begins anew


def test_weights_that_were_copied_into_a_folder_are_compared_with_nothing(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    assert differences(folder, resolve("cartpole"), "must") == ""


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_what_is_resumed_must_be_named(resume: Resume, tmp_path: Path) -> None:
    sentence = rf"--resume {resume} needs the folder .*; name the folder with run\.dir="
    with pytest.raises(UserError, match=sentence):
        run.train("cartpole", [], resume, as_json=True)
    check_folder_named(resolve("cartpole"), "no")
    check_folder_named(resolve("cartpole", [f"run.dir={tmp_path}"]), resume)

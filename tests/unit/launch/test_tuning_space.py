"""Search spaces of `penstock tune`: reading, sampling and errors."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.launch.tuning.space import (
    ChoiceList,
    NumberRange,
    Space,
    check_keeps_weights,
    overrides_of,
    read_space,
    with_fixed_cores,
)


def read(tmp_path: Path, text: str, *overrides: str, target: str = "cartpole_ppo") -> Space:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return read_space(path, target, overrides)


def test_space_of_ranges_and_choices_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "learner.lr: {low: 1e-4, high: 1e-2, log: true}\n"
        "algo.epochs: {low: 1, high: 4}\n"
        "algo.entropy_cost: {low: 0, high: 1}\n"
        "model.hidden: [[32], [64, 64]]\n",
    )
    assert found.parameters == {
        "learner.lr": NumberRange(1e-4, 1e-2, log=True),
        "algo.epochs": NumberRange(1, 4, whole=True),
        "algo.entropy_cost": NumberRange(0, 1),  # its ends are whole, its values need not be
        "model.hidden": ChoiceList(([32], [64, 64])),
    }
    assert len(found.configs) == 8
    assert not found.is_grid
    drawn = found.samples(300, seed=3)
    assert drawn == found.samples(300, seed=3)
    assert drawn != found.samples(300, seed=4)
    rates = [options["learner.lr"] for options in drawn]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    below = sum(rate < 1e-3 for rate in rates)  # the middle of the logarithms
    assert 110 < below < 190
    assert {options["algo.epochs"] for options in drawn} == {1, 2, 3, 4}
    assert any(0 < options["algo.entropy_cost"] < 1 for options in drawn)
    assert overrides_of(drawn[0])[3] in ("model.hidden=[32]", "model.hidden=[64, 64]")


def test_integer_options_are_sampled_as_integers(tmp_path: Path) -> None:
    text = "actors.envs: {low: 8.0, high: 64.0, log: true}\nenv.kwargs.level: {low: 1, high: 3}\n"
    found = read(tmp_path, text)
    for options in found.samples(50, seed=0):
        assert isinstance(options["actors.envs"], int)
        assert isinstance(options["env.kwargs.level"], int)


@pytest.mark.parametrize("log", [False, True])
def test_integers_are_drawn_as_by_ray_tune(log: bool) -> None:
    """Both ends too: rounded, each would be drawn half as often as a number between them."""
    rng = random.Random(0)
    drawn = [NumberRange(1, 4, log=log, whole=True).sample(rng) for _ in range(4000)]
    shares = [math.log((n + 1) / n) / math.log(5) if log else 1 / 4 for n in (1, 2, 3, 4)]
    for n, share in enumerate(shares, start=1):
        assert abs(drawn.count(n) / 4000 - share) < 0.03


def test_grid_has_all_combinations(tmp_path: Path) -> None:
    found = read(tmp_path, "learner.lr: [1e-3, 3e-3]\nrun.seed: [0, 1, 2]\n")
    assert found.is_grid
    grid = found.grid()
    assert len(grid) == 6
    assert grid[0] == {"learner.lr": 1e-3, "run.seed": 0}
    assert grid[-1] == {"learner.lr": 3e-3, "run.seed": 2}
    many = Space({name: ChoiceList(tuple(range(40))) for name in "ab"}, [])
    with pytest.raises(UserError, match=r"^the grid of the space has 1600 combinations"):
        many.grid()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "learner.lrr: [1]",
            r":1: there is no option learner.lrr; the nearest option is learner.l",
        ),
        ("learner.lr: [1e-3, fast]", r":1: learner.lr is 'fast'; it must be a number above 0"),
        ("learner.lr: [1e-3]\nalgo.clip: {low: 0.1, high: 2}", r":2: algo.clip is 2; it must be"),
        ("learner.lr: 1e-3", r":1: learner.lr is 0.001; it must be a list of choices, or"),
        ("learner.lr: []", r":1: learner.lr is \[\]; it must be a list of choices, or"),
        ("learner.lr: {low: 1, high: 2, step: 1}", r":1: learner.lr is .*; it must be a list"),
        ("learner.lr: {low: a, high: 2}", r":1: learner.lr is .*; it must be a list of choices"),
        ("learner.lr: {low: true, high: 2}", r":1: learner.lr is .*; it must be a list"),
        (f"learner.lr: {{low: 1, high: 1{400 * '0'}}}", r":1: learner.lr is .*; it must be a list"),
        ("learner.lr: {low: 2, high: 1}", r":1: learner.lr has low 2 and high 1; low must be"),
        ("algo.entropy_cost: {low: 0, high: 1, log: true}", r":1: algo.entropy_cost has low 0 on"),
        ("stop.env_steps: [1, 2]", r":1: stop.env_steps must be equal in all trials"),
        ("run.dir: [a, b]", r":1: run.dir must be equal in all trials"),
        ("actors.envs: [8, 16]", r":1: actors.envs is set on the command line as well; leave"),
        ("- 1", r" holds no map of options; write lines such as"),
        ("", r" holds no map of options; write lines such as"),
        ("learner.lr: [", r":\d: this is not YAML"),
    ],
)
def test_invalid_entries_are_named_with_their_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"space\.yaml{message}"):
        read(tmp_path, text, "actors.envs=32")


def test_all_invalid_entries_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, "learner.lr: [0]\nalgo.epochs: [0.5]\nrun.dir: [x]\n")
    assert len(str(error.value).splitlines()) == 3


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--space .*no\.yaml cannot be read: No such file"):
        read_space(tmp_path / "no.yaml", "cartpole", [])


@pytest.mark.parametrize(
    "name", ["model.hidden", "env.kwargs.size", "learner.optimizer", "algo", "learner"]
)
def test_pbt_refuses_to_mutate_options_that_change_the_network(name: str) -> None:
    with pytest.raises(UserError, match=f"^--pbt copies weights between trials, and {name}"):
        check_keeps_weights(Space({name: ChoiceList((1, 2))}, []))
    check_keeps_weights(Space({"learner.lr": ChoiceList((1, 2))}, []))


def test_numbers_are_clamped_to_their_range() -> None:
    found = NumberRange(1, 8, whole=True)
    assert [found.clipped(value) for value in (0.2, 2.6, 9.0)] == [1, 3, 8]
    assert math.isclose(NumberRange(0.1, 0.5).clipped(0.6), 0.5)


def test_a_trial_has_a_fixed_number_of_actors_and_threads() -> None:
    added = with_fixed_cores("my_game:make", ["learner.nice=1"])[1:]
    assert added == ["actors.count=2", "learner.threads=1"]
    assert with_fixed_cores("cartpole_ppo", []) == []

"""Errors in an environment or its name are refused in one sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.check_env import check, describe
from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import find_bad_observation, make
from user_shop import config, shopping


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from shopping(tmp_path, monkeypatch)


ERRORS = [
    (
        config("Cartpol-v1"),
        r"environment Cartpol-v1 is not registered; the nearest is CartPole-v\d",
    ),
    (config("Pong-v5"), r"environment Pong-v5 is not registered; the nearest is .*ALE/Pong-v5"),
    (config("ALE/Ponk-v5"), r"the nearest is ALE/Pong-v5"),
    (config("CartPole"), r"environment CartPole is not registered; the nearest is .*CartPole-v1"),
    (config("qqqqqq"), r"environment qqqqqq is not registered; correct its name"),
    (config("CartPole-v1", max_episode_step=5), r"no option max_episode_step; .*max_episode_steps"),
    (config("Acrobot-v1", max_episode_step=5), r"no option max_episode_step; .*max_episode_steps"),
    (config("CartPole-v1", num_envs=5), r"num_envs is not set here; set actors.envs$"),
    (config("shopping:box", high=np.inf), r"actions of Box.*must have finite bounds.*env.wrappers"),
    (
        config("shopping:box", high=3.4e38),
        r"actions of Box.*must have finite bounds, within ±1e\+30",
    ),
    (config("shopping:box", high=6.5504e4, dtype="float16"), r"must have finite bounds"),
    (config("shopping:box", high=-1.0), r"actions of Box.*the lower below the upper"),
    (config("shopping:box", dtype="int32"), r"MultiBinary and a Box of floats are supported"),
    (config("shopping:pair"), r"actions of Tuple.*only Discrete, MultiDiscrete, MultiBinary and"),
    (config("shopping:text"), r"observations in name of Text, which no network here reads"),
    (
        config("shopping:mask"),
        r"action_mask of shape \[2\], and it must be \[3\], a value",
    ),
    (config("shopping:knob_mask"), r"an action_mask and has actions of Box.*nothing to choose"),
    (
        config("shopping:odd", observations="nothing"),
        r"observations that hold nothing, Box.*; give",
    ),
    (config("shopping:odd", observations="no parts"), r"observations that hold nothing, Dict"),
    (config("shopping:odd", observations="many"), r"1,000,000,000 choices, .* at most 1,000,000"),
    (config("shopping:odd", observations="many in one"), r"observations in 1 of 1,000,000,000"),
    (config("shopping:odd", observations="dots"), r"two observations named a\.b, .*; rename a key"),
    (config("shopping:odd", actions="nothing"), r"actions of Box.*, which hold nothing; give its"),
    (config("shopping:odd", actions="none to choose"), r"0 choices, .* must be 1 to 1,000,000"),
    (config("shopping:odd", actions="many"), r"1,000,000,000 choices, .* must be 1 to 1,000,000"),
    (config("CartPole-v1", "gymnasium.wrappers:ClipRewards"), r"the nearest is .*ClipReward"),
    (
        config("CartPole-v1", "gymnasium.wrappers:ClipReward"),
        r"^wrapper gymnasium.wrappers:ClipReward failed with InvalidBound: .*; correct env.wrapper",
    ),
    (
        config("CartPole-v1", {"gymnasium.wrappers:ClipReward": {"max_rewards": 1}}),
        r"wrapper gymnasium.wrappers:ClipReward: there is no option max_rewards; .*max_reward",
    ),
    (config("shoping:shop"), r"there is no module shoping in /.* or installed; .* is shopping.py$"),
    (config("orchard:shop"), r"there is no module orchard in /.* or installed; correct its name"),
    (config("shopping:Shop-v1"), r"registers no environment Shop-v1; .*Shop-v0"),
    (config("shopping:number"), r"module shopping has no function number and registers no"),
    (config("shopping:shopp"), r"module shopping has no function shopp .*; the nearest is shop"),
    (config("shopping:shop", prize=2), r"there is no option prize; the nearest is price"),
    (
        config("shopping:broken"),
        r"failed with OSError: no display found \(shopping\.py:\d+, in broken\); correct",
    ),
    (
        config("shopping:broken_silently"),
        r"failed with KeyError \(shopping\.py:\d+, in broken_silently\); correct env.kwargs",
    ),
    (config("shopping:vector_unasked"), r"not SyncVectorEnv; .* let its function take num_envs"),
    (config("shopping:too_few"), r"must return a VectorEnv of num_envs=3"),
    (
        config("shopping:same_step"),
        r"autoreset mode is SAME_STEP, and it must be NEXT_STEP.*single",
    ),
    (config("shopping:named"), r"autoreset mode is 'next_step', and it must be NEXT_STEP"),
    (config("shopping:silent"), r"metadata has no autoreset_mode, and it must be NEXT_STEP"),
    (config("shopping:shops", "shopping:Doubled"), r"comes as a vector environment only"),
    (
        config("shopping:needs_simulator"),
        r"simulator_of_weather is not installed; run `pip install \"simulator_of_weather\"`",
    ),
    (config("needs_it:Shop-v0"), r"shop_simulator is not installed"),
    (config("halfway:f"), r"failed with SyntaxError: .*; correct .*the code that raised it"),
]


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(("env", "sentence"), ERRORS, ids=[str(env.id) for env, _ in ERRORS])
def test_mistakes_of_an_environment_are_refused_in_one_sentence(
    env: EnvConfig, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        make(env, 3)
    assert "\n" not in str(error.value)
    assert "\x1b" not in str(error.value)


def test_missing_module_is_refused_with_the_nearest_name_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_meadow.py").write_text("import my_barns\n")
    (tmp_path / "my_barn").mkdir()
    (tmp_path / "my_barn" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    where = re.escape(f"in {tmp_path} or installed; the nearest there is ")
    for name, missing, near in (
        ("my_maedow:make", "my_maedow", "my_meadow.py"),
        ("my_maedow:Game-v0", "my_maedow", "my_meadow.py"),
        ("my_meadow:make", "my_barns", "my_barn/"),
    ):
        with pytest.raises(UserError, match=f"there is no module {missing} {where}{near}$"):
            make(config(name), 2)


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "broken",
            r"environment shopping:broken failed with OSError: no display found \(shop",
        ),
        ("broken_vector", "environment shopping:broken_vector failed with OSError: no display"),
        ("wants", "environment shopping:wants failed with TypeError: .* 'price'; correct"),
    ],
)
def test_check_refuses_an_unusable_environment_as_make_does(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(f"shopping:{name}", [], 50, 2)


@pytest.mark.usefixtures("shop")
def test_check_reports_a_function_that_returns_no_vector() -> None:
    [problem] = check("shopping:no_vector", [], 50, 2)["problems"]
    assert "that takes num_envs returned a NoneType; return a" in problem["text"]


@pytest.mark.usefixtures("shop")
def test_check_notes_untested_resets() -> None:
    report = check("shopping:shops", [], 50, 2)
    assert report["problems"] == []
    note = "no episode ended in 50 steps, and the reset after an episode's end was not "
    assert report["notes"][0].startswith(f"{note}tested")
    assert "played        50 steps of 2 games, 0 episodes" in describe(report)


@pytest.mark.usefixtures("shop")
def test_a_check_notes_numbers_that_float32_does_not_tell_apart() -> None:
    notes = check("shopping:ids", [], 50, 2)["notes"]
    assert any("16777216 and 16777217 at [0] of its observations" in note for note in notes)


@pytest.mark.usefixtures("shop")
def test_check_notes_equal_returns_of_random_play() -> None:
    limit = "env.wrappers=[{gymnasium.wrappers:TimeLimit: {max_episode_steps: 5}}]"
    notes = check("shopping:shop", ["env.kwargs.price=0", limit], 50, 2)["notes"]
    [note] = [note for note in notes if "random play" in note]
    assert note.startswith("each of the 10 episodes of random play, 50 steps, returned 0; that may")
    assert note.endswith("that they do not depend on the actions: check that this is intended")


@pytest.mark.usefixtures("shop")
def test_check_reports_errors_that_occur_only_with_many_environments() -> None:
    for envs, kinds in ((3, []), (4, ["vector"])):
        report = check("shopping:Crowded", [], 50, envs)
        assert [problem["kind"] for problem in report["problems"]] == kinds
    assert re.search(
        r"vector of 4 environments raised RuntimeError: no free port \(shopping.py:\d+, in reset\)",
        report["problems"][0]["text"],
    )


@pytest.mark.usefixtures("shop")
def test_unpicklable_vector_function_is_a_problem() -> None:
    [problem] = check("shopping:nameless", [], 50, 2)["problems"]
    assert problem["kind"] == "pickling"


@pytest.mark.parametrize(
    ("env_id", "module", "command"),
    [
        ("ALE/Pong-v5", "ale_py", 'pip install "penstock[atari]"'),
        ("LunarLander-v3", "Box2D", 'pip install "penstock[box2d]"'),
        ("CarRacing-v3", "pygame", 'pip install "penstock[box2d]"'),
        ("HalfCheetah-v5", "mujoco", 'pip install "penstock[mujoco]"'),
        ("phys2d/CartPole-v1", "jax", 'pip install "gymnasium[jax]"'),
    ],
)
def test_a_missing_extra_is_answered_with_its_install_command(
    env_id: str, module: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in list(sys.modules):  # or what another test imported would do
        if name.startswith(("gymnasium.envs.box2d", "gymnasium.envs.mujoco")):
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=re.escape(command)) as error:
        make(config(env_id), 2)
    assert str(error.value).endswith("then try again")


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize(("shape", "dtype"), [((4,), "float64"), ((2,), "uint8")])
def test_observations_that_do_not_fit_their_space_are_refused(
    shape: tuple[int, ...], dtype: str
) -> None:
    game = make(config("shopping:misfit", shape=list(shape), dtype=dtype), 3)
    sentence = f"returned observations float64[3, 2] where its observation space says {dtype}"
    with pytest.raises(UserError, match=re.escape(sentence)):
        game.reset_into(0, np.zeros((3, *shape), dtype))


def test_bad_observation_is_found_with_its_position() -> None:
    observations = np.zeros((5, 4, 2, 3), np.float32)
    assert find_bad_observation(observations) is None
    assert find_bad_observation(np.full((2, 3), 255, np.uint8)) is None
    observations[3, 2, 1, 0] = np.nan
    observations[4] = np.inf
    assert find_bad_observation(observations) == (
        "nan at [1, 0] of environment 2's observation in row 3"
    )
    observations[3] = -np.inf
    assert find_bad_observation(observations) == (
        "-inf at [0, 0] of environment 0's observation in row 3"
    )


@pytest.mark.usefixtures("shop")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("price", [[1.0], "one", [1.0, 2.0]])
def test_non_numeric_reward_is_refused(price: object, threads: int) -> None:
    game = make(config("shopping:shop", price=price), 2, threads)
    out = np.zeros((2, 2))
    game.reset_into(0, out)
    with pytest.raises(UserError, match=r"a number as reward, .* could not be read \(.*check-env"):
        game.step_into(np.zeros(2, np.int32), out)

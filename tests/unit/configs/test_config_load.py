"""Targets, layers, presets, and the way to YAML and back."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.configs.errors import UserError
from penstock.configs.load import dump, load_run, presets, resolve, resolve_target
from penstock.configs.schema import Config
from penstock.configs.yaml_text import parse, write

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("target", "name", "origin", "env_id"),
    [
        ("pong", "pong", "preset pong", "ALE/Pong-v5"),
        ("CartPole-v1", "cartpole", "preset cartpole, which trains CartPole-v1", "CartPole-v1"),
        ("ALE/Pong-v5", "pong", "preset pong, which trains ALE/Pong-v5", "ALE/Pong-v5"),
        ("Acrobot-v1", "Acrobot-v1", "no preset", "Acrobot-v1"),
        (
            "ALE/Freeway-v5",
            "ALE-Freeway-v5",
            "preset breakout, with ALE/Freeway-v5",
            "ALE/Freeway-v5",
        ),
        ("my.games:Maze-v0", "my.games-Maze-v0", "no preset", None),
        ("games:NS/Maze-v0", "games-NS-Maze-v0", "no preset", None),
        ("games:make_maze", "games-make_maze", "no preset", None),
    ],
)
def test_a_target_is_a_preset_or_a_game(
    target: str, name: str, origin: str, env_id: str | None
) -> None:
    resolved = resolve_target(target)
    assert (resolved.name, resolved.origin) == (name, origin)
    assert resolved.config.env.id == (env_id or target)


@pytest.mark.parametrize(
    ("target", "module"), [("grid.py", "grid"), ("./games/grid.py", "games.grid")]
)
def test_a_file_of_python_is_no_target(target: str, module: str) -> None:
    with pytest.raises(
        UserError,
        match=rf"^{re.escape(target)} is a Python file; name the function .*: {module}:FUNCTION$",
    ):
        resolve(target)


def test_the_name_of_a_file_of_python_is_no_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_game.py").touch()
    with pytest.raises(UserError, match=r"^my_game\.py is a Python file; .*: my_game:FUNCTION$"):
        resolve("my_game")


def test_the_id_of_a_preset_stands_for_the_preset() -> None:
    assert resolve("CartPole-v1") == resolve("cartpole")
    assert resolve("CartPole-v1", ["learner.lr=1"]) == resolve("cartpole", ["learner.lr=1"])


def test_the_id_of_several_presets_stands_for_that_of_the_algorithm_asked_for() -> None:
    named = resolve_target("CartPole-v1", ["replay.capacity=5e4", "algo.name=dqn"])
    assert (named.name, named.config.algo.name) == ("cartpole_dqn", "dqn")
    assert named.config == resolve("cartpole_dqn", ["replay.capacity=5e4"])
    assert resolve_target("CartPole-v1", ["algo.name=sac"]).name == "CartPole-v1"
    assert resolve_target("Pendulum-v1").name == "pendulum_sac"


def test_atari_game_without_preset_takes_the_common_atari_settings() -> None:
    freeway = resolve("ALE/Freeway-v5")
    breakout = resolve("breakout", ["env.id=ALE/Freeway-v5"])
    assert freeway == breakout
    assert freeway.env.kwargs["img_height"] == 84
    assert resolve("ALE/Freeway-v5", ["algo.name=dqn"]).env.kwargs == breakout.env.kwargs


def test_preset_without_stop_return_has_no_hold_time() -> None:
    assert resolve("doom_basic").stop.hold_s == 30
    assert resolve("doom_basic", ["stop.return=null"]).stop.hold_s == 0
    with pytest.raises(UserError, match=r"stop\.hold_s 5 counts from the moment"):
        resolve("doom_basic", ["stop.hold_s=5", "stop.return=null"])


def test_a_game_without_preset_starts_from_the_defaults() -> None:
    algo = {"name": "custom", "entry": "mine"}
    found = resolve("Acrobot-v1", ["algo.name=custom", "algo.entry=mine"])
    assert found == Config.model_validate({"env": {"id": "Acrobot-v1"}, "algo": algo})


def test_a_file_starts_from_the_defaults_or_from_its_base(tmp_path: Path) -> None:
    plain, over = tmp_path / "plain.yaml", tmp_path / "over"
    plain.write_text("env: {id: ALE/Pong-v5}\nlearner: {lr: 1e-3}\n")
    over.write_text("base: pong\nenv:\n  kwargs:\n    frameskip: 2\nlearner:\n  # lr: 1\n")
    assert resolve(str(plain)) == resolve("x:f", ["env.id=ALE/Pong-v5", "learner.lr=1e-3"])
    assert resolve(str(over)) == resolve("pong", ["env.kwargs.frameskip=2"])
    named = resolve_target(str(over))
    assert (named.name, named.origin) == ("over", f"file {over} over preset pong")
    assert resolve_target(str(plain)).origin == f"file {plain}"


def test_maps_are_merged_and_an_empty_map_clears() -> None:
    pong = resolve("pong").env.kwargs
    assert resolve("pong", ["env.kwargs={frameskip: 2}"]).env.kwargs == {**pong, "frameskip": 2}
    assert resolve("pong", ["env.kwargs={}"]).env.kwargs == {}
    assert resolve("pong", ["env.kwargs={}", "env.kwargs.a.b=1"]).env.kwargs == {"a": {"b": 1}}
    assert resolve("pong", ["env.kwargs="]).env.kwargs == pong
    both = resolve("pong", ["learner={lr: 1, eps: 2}"]).learner
    assert (both.lr, both.eps, both.updates_per_batch) == (1.0, 2.0, 8)
    plain = Config.model_validate({"env": {"id": "x"}})
    assert resolve("pong", ["learner={}"]).learner == plain.learner


@pytest.mark.parametrize("name", presets())
def test_preset_descriptions_are_whole_sentences(name: str) -> None:
    text = presets()[name]
    assert text.endswith(".")
    assert "#" not in text
    assert 20 < len(text) < 250, "the details stand in a paragraph of their own"


def test_a_description_of_several_lines_is_shown_whole() -> None:
    assert presets()["breakout"].endswith("penstock train ALE/Seaquest-v5.")


def test_override_does_not_change_the_preset() -> None:
    before = resolve("pong")
    resolve("pong", ["env.kwargs.frameskip=2", "learner.lr=1"])
    assert resolve("pong") == before


def test_presets_are_listed_with_their_descriptions() -> None:
    listed = presets()
    assert list(listed) == [
        "bit_flip",
        "boxing",
        "breakout",
        "car_racing",
        "cartpole",
        "cartpole_dqn",
        "cartpole_ppo",
        "connect_four",
        "doom_basic",
        "halfcheetah",
        "halfcheetah_sac",
        "kuhn",
        "leduc",
        "lunarlander",
        "memory",
        "memory_r2d2",
        "minatar_breakout",
        "minatar_breakout_pqn",
        "pendulum_sac",
        "pong",
        "pong_apex",
        "pong_impala",
        "rock_paper_scissors",
        "simple_spread",
        "slime_volley",
        "synthetic",
    ]


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_valid_and_survives_yaml(name: str) -> None:
    assert_round_trip(resolve(name))
    assert resolve_target(name).note == ""  # also one with another algorithm than its base


def test_pong_learns_from_unclipped_whole_games() -> None:
    cfg = resolve("pong")
    assert cfg.env.kwargs == {
        "frameskip": 4,
        "maxpool": True,
        "repeat_action_probability": 0.0,
        "full_action_space": False,
        "max_num_frames_per_episode": 108000,
        "noop_max": 30,
        "use_fire_reset": True,
        "episodic_life": False,
        "life_loss_info": False,
        "reward_clipping": False,
        "img_height": 84,
        "img_width": 84,
        "grayscale": True,
        "stack_num": 4,
    }
    assert cfg.algo.reward_clip == 1.0
    slot, slots = cfg.actor_envs * cfg.actors.unroll, cfg.learner.batch_slots
    assert slot * slots // cfg.learner.updates_per_batch == 64


def test_pong_sets_every_option_of_the_atari_preprocessing() -> None:
    ale_py = pytest.importorskip("ale_py.vector_env")
    options = set(inspect.signature(ale_py.AtariVectorEnv).parameters)
    ours_to_choose = {
        *("game", "num_envs", "batch_size", "num_threads", "thread_affinity_offset"),
        *("autoreset_mode", "continuous", "continuous_action_threshold"),
    }
    assert set(resolve("pong").env.kwargs) == options - ours_to_choose


def test_synthetic_shows_every_option_of_its_game_at_its_default() -> None:
    from penstock.envs.games.synthetic import SyntheticVectorEnv

    parameters = inspect.signature(SyntheticVectorEnv).parameters
    defaults = {name: p.default for name, p in parameters.items() if name != "num_envs"}
    assert resolve("synthetic").env.kwargs == {**defaults, "obs_shape": [4]}


def test_a_run_is_loaded_from_its_folder(tmp_path: Path) -> None:
    cfg = resolve("pong", ["stop.return=18", f"run.dir={tmp_path}"])
    (tmp_path / "config.yaml").write_text(dump(cfg))
    assert load_run(tmp_path) == cfg
    assert resolve_target(str(tmp_path / "config.yaml")).name == tmp_path.name
    with pytest.raises(UserError, match=r"does not exist, so it is not a run"):
        load_run(tmp_path / "nothing")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"has no config\.yaml, so it is not a run"):
        load_run(tmp_path / "nothing")


def test_run_without_the_scale_option_scales_by_bytes(tmp_path: Path) -> None:
    cfg = resolve("pong")
    assert cfg.model.scale == "bounds"
    lines = dump(cfg).splitlines()
    (tmp_path / "config.yaml").write_text("\n".join(x for x in lines if "  scale:" not in x))
    assert load_run(tmp_path).model.scale == "bytes"
    (tmp_path / "config.yaml").write_text("env: {id: CartPole-v1}")  # a user's, of that name
    assert resolve(str(tmp_path / "config.yaml")).model.scale == "bounds"


def assert_round_trip(cfg: Config) -> None:
    values, _ = parse(dump(cfg), "dump")
    assert Config.model_validate(values) == cfg
    assert list(values) == list(Config.model_fields)
    assert Config.model_validate(cfg.model_dump()) == cfg


text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
numbers = st.floats(min_value=1e-12, max_value=1e12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("name", ["dqn", "sac"])
def test_another_algorithm_survives_yaml(name: str) -> None:
    assert_round_trip(resolve("Acrobot-v1", [f"algo.name={name}"]))


@given(kwargs=st.dictionaries(text, plain, max_size=4), name=text, lr=numbers, goal=numbers)
def test_every_config_survives_yaml(
    kwargs: dict[str, Any], name: str, lr: float, goal: float
) -> None:
    assert_round_trip(
        Config.model_validate(
            {
                "env": {"id": name, "kwargs": kwargs},
                "learner": {"lr": lr},
                "run": {"dir": name},
                "stop": {"return": -goal, "hold_s": lr},
            }
        )
    )


@pytest.mark.parametrize("word", ["off", "no", "y", "1e6", "0x10", "null", "~", "2024-01-01", "="])
def test_text_that_resembles_another_yaml_type_stays_text(word: str) -> None:
    assert parse(write({"a": word}), "x")[0] == {"a": word}


def test_line_numbers_are_those_of_the_keys() -> None:
    values, lines = parse("a:\n  b: 1\n  c: {d: 2}\n\ne: [3]\n", "x")
    assert values == {"a": {"b": 1, "c": {"d": 2}}, "e": [3]}
    assert lines == {("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", "d"): 3, ("e",): 5}


def test_resolving_imports_nothing_heavy_and_ignores_the_current_folder(tmp_path: Path) -> None:
    for name in ("configs", "envs", "gymnasium", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the user's own was imported')")
    (tmp_path / "pong").mkdir()
    (tmp_path / "pong.yaml").write_text("env: {id: Other-v0}")
    script = (
        "import sys; from penstock.configs.load import dump, resolve;"
        "print(resolve('pong').env.id, resolve('pong.yaml').env.id, resolve('a:b').env.id);"
        "dump(resolve('CartPole-v1'));"
        "print([m for m in ('torch', 'numpy', 'gymnasium', 'zmq') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["ALE/Pong-v5 Other-v0 a:b", "[]"]


def test_an_alias_means_the_last_anchor_of_its_name() -> None:
    values, _ = parse("a: &name 1\nb: &name 2\nc: *name\n", "x.yaml")
    assert values == {"a": 1, "b": 2, "c": 2}


def test_a_file_of_python_with_a_function_is_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "games").mkdir(parents=True)
    (here / "games" / "grid.py").write_text(
        "class Grid: ...\ndef _f(): ...\ndef make_grid(): ...\n"
    )
    (tmp_path / "there.py").touch()
    (here / "my-grid.py").touch()
    monkeypatch.chdir(here)
    for path in ("games/grid.py", "./games/grid.py", f"{here}/games/grid.py"):
        resolved = resolve_target(f"{path}:make_grid")
        assert (resolved.config.env.id, resolved.name) == (
            "games.grid:make_grid",
            "games.grid-make_grid",
        )
        with pytest.raises(UserError, match=r"games\.grid:make_grid or games\.grid:Grid$"):
            resolve(path)
    for target, sentence in (
        ("../there.py:make", f"is not below the current folder, .*; start in {tmp_path}$"),
        ("my-grid.py:make", "cannot be imported by that name; rename it"),
        ("no.py:make", "there is no 'no.py'; correct its name, or start in its folder"),
    ):
        with pytest.raises(UserError, match=sentence):
            resolve(target)


def test_tilde_of_the_run_folder_is_the_home() -> None:
    assert resolve("cartpole", ["run.dir=~/x"]).run.dir == str(Path.home() / "x")

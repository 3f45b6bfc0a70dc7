"""A config written in Python. `make types` checks this file as a type checker checks a user's: a
line with `type: ignore` is one that it must refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

import penstock
from penstock import UserError
from penstock.configs import load
from penstock.configs.keys import algorithms, options, sections
from penstock.configs.yaml_text import parse
from penstock.launch import api


def written() -> penstock.Config:
    return penstock.Config(
        env=penstock.EnvConfig(id="CartPole-v1", kwargs={"sutton_barto_reward": True}),
        algo=penstock.PpoConfig(epochs=3, clip=0.1, normalize_advantages="batch"),
        model=penstock.ModelConfig(hidden=[32, 32], activation="relu"),
        actors=penstock.ActorsConfig(count=1, envs=16),
        transport=penstock.TransportConfig(kind="shm", slots=1),
        learner=penstock.LearnerConfig(
            lr=1e-3, reduce=penstock.ReduceConfig(codec="int8", block=256)
        ),
        run=penstock.RunConfig(seed=3, tensorboard=True),
        stop=penstock.StopConfig(return_=475, hold_s=2),
    )


SAME_AS_YAML = """
env: {id: CartPole-v1, kwargs: {sutton_barto_reward: true}}
algo: {name: ppo, epochs: 3, clip: 0.1, normalize_advantages: batch}
model: {hidden: [32, 32], activation: relu}
actors: {count: 1, envs: 16}
transport: {kind: shm, slots: 1}
learner: {lr: 1e-3, reduce: {codec: int8, block: 256}}
run: {seed: 3, tensorboard: true}
stop: {return: 475, hold_s: 2}
"""


def test_a_config_in_python_equals_the_same_in_yaml() -> None:
    assert written() == penstock.Config.model_validate(parse(SAME_AS_YAML, "same")[0])


def test_a_config_in_python_is_complete(tmp_path: Path) -> None:
    """A file without a base has the defaults of its kind of environment below it."""
    assert penstock.resolve(written()) == written()
    file = tmp_path / "same.yaml"
    file.write_text(SAME_AS_YAML)
    resolved = penstock.resolve(file)
    assert isinstance(resolved.algo, penstock.PpoConfig)
    assert (resolved.algo.epochs, resolved.algo.clip) == (3, 0.1)
    assert resolved.learner.updates_per_batch != written().learner.updates_per_batch


def test_dumped_config_loads_as_an_equal_config(tmp_path: Path) -> None:
    file = tmp_path / "dumped.yaml"
    file.write_text(penstock.dump(written()))
    assert penstock.resolve(file) == written()
    assert "  return: 475.0\n" in file.read_text()


def test_overrides_change_a_config() -> None:
    changed = penstock.resolve(written(), {"learner.lr": 0.5, "stop": {"return": None}})
    assert (changed.learner.lr, changed.stop.return_, changed.stop.hold_s) == (0.5, None, 0)
    assert (
        changed.model_copy(update={"learner": written().learner, "stop": written().stop})
        == written()
    )
    assert load.resolve_target(written()).name == "CartPole-v1"
    with pytest.raises(UserError, match=r"override learner\.lr=-1: learner\.lr is -1; it must be"):
        penstock.resolve(written(), {"learner.lr": -1})


def test_train_takes_a_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[tuple[penstock.Config, Path]] = []

    def conduct(resolved: load.Resolved, path: Path, *_: Any, **__: Any) -> Any:
        begun.append((resolved.config, path))
        raise UserError("enough")

    monkeypatch.setattr(api, "run_in_folder", conduct)
    with pytest.raises(UserError, match="enough"):
        penstock.train(written(), {"learner.lr": 0.5}, run_dir=tmp_path)
    changed = {"learner.lr": 0.5, "run.dir": str(tmp_path)}
    assert begun == [(penstock.resolve(written(), changed), tmp_path)]


@pytest.mark.parametrize("algo", algorithms())
def test_each_algorithm_has_typed_options(algo: str) -> None:
    kind = next(
        kind for kind in sections()["algo"] if get_type_hints(kind)["name"].__args__ == (algo,)
    )
    assert getattr(penstock, kind.__name__) is kind
    named = {name.partition(".")[2] for name in options(algo) if name.startswith("algo.")}
    assert set(get_type_hints(kind)) >= named
    assert Any not in get_type_hints(kind).values()


def test_the_options_of_codecs_and_sinks_have_types() -> None:
    reduce = penstock.ReduceConfig(
        codec="none",
        bucket_mb=1.0,
        overlap=True,
        wait_s=0.5,
        timeout_s=30.0,
        check_every=1000,
        interface=None,
        block=512,
        warmup_updates=100,
        onebit_block=4096,
        reternarize=True,
        density=0.01,
        dgc_density=0.001,
        dgc_clip=None,
        powersgd_rank=2,
    )
    assert reduce.powersgd_rank == 2
    run = penstock.RunConfig(tensorboard=True, wandb="project")
    assert run.wandb == "project"


def test_every_section_is_exported() -> None:
    for name in penstock.Config.model_fields:
        kinds = sections()[name]
        assert [getattr(penstock, kind.__name__) for kind in kinds] == list(kinds)


def test_invalid_option_is_refused_in_its_own_section() -> None:
    with pytest.raises(ValidationError, match="lr"):
        penstock.LearnerConfig(lr="fast")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="learning_rate"):
        penstock.LearnerConfig(learning_rate=1e-3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="tau"):
        penstock.PpoConfig(tau=1.0)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="normalize_advantages"):
        penstock.PpoConfig(normalize_advantages="all")  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="entry"):
        penstock.CustomConfig()  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match="densty"):
        penstock.ReduceConfig(densty=0.1)  # type: ignore[call-arg]
    with pytest.raises(ValidationError, match=r"set learner\.lr_scaling=none"):
        penstock.Config(
            env=penstock.EnvConfig(id="CartPole-v1"),
            learner=penstock.LearnerConfig(lr_scaling="sqrt"),
        )


def test_python_only_option_name_is_refused_in_overrides(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no option stop\.return_; .* stop\.return"):
        penstock.resolve("cartpole", {"stop.return_": 3})


def test_a_config_is_made_without_torch_and_numpy() -> None:
    program = (
        "import sys, penstock; penstock.Config(env=penstock.EnvConfig(id='X-v0'), "
        "algo=penstock.SacConfig()); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"[]\n"

"""Names and sizes in policy files and run folders of other users are not trusted."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors import safe_open
from safetensors.numpy import save as to_bytes

import penstock
from penstock import UserError
from penstock.algos.samples import network_shape
from penstock.cli.app import main
from penstock.configs.code_references import check, references_in_training
from penstock.configs.for_actors import read_for_actor
from penstock.configs.keys import algorithms, options
from penstock.configs.load import dump, resolve
from penstock.configs.schema import Config
from penstock.configs.yaml_text import write
from penstock.core import used_names
from penstock.envs import probe, space_json
from penstock.evaluation.evaluate import evaluate
from penstock.launch.resumed import resolve_resumed
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint

MODULE = """
from os import abort, system
import gymnasium, torch
def make(**kwargs): return gymnasium.make("CartPole-v1")
class Net(torch.nn.Linear):
    def __init__(self, shapes, outputs): super().__init__(4, 8)
    def forward(self, arrays): return super().forward(arrays["obs"])
"""
NAME = "stranger:Net"
# A name in every form in which a value can hold one.
VALUES: tuple[Any, ...] = (
    NAME,
    "stranger",
    [NAME],
    {"x": NAME},
    {"x": [{"y": NAME}]},
    {NAME: {}},
    [{NAME: {}}],
)


@pytest.fixture(autouse=True)
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that anyone can import, and a user without runs."""
    (tmp_path / "stranger.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    sys.modules.pop("stranger", None)


def a_run(folder: Path, *overrides: str) -> Path:
    """The folder of a run of CartPole."""
    config = resolve("CartPole-v1", ["algo.name=ppo", *overrides])
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(config))
    layout = network_shape(config, probe(config.env)).layout
    checkpoint = Checkpoint(layout, np.zeros(layout.size, np.float32))
    checkpoint_format.save(folder / "checkpoints" / "last", checkpoint)
    sys.modules.pop("stranger", None)
    return folder


def act(received: dict[str, Any]) -> None:
    """As an actor that cannot authenticate its learner."""
    config = read_for_actor(received)
    check(config, (), trusted=False, source="the learner")
    network_shape(config, probe(config.env))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return a_run(tmp_path / "run")


@pytest.fixture
def file(folder: Path) -> Path:
    path = folder / "policy.safetensors"
    penstock.load_policy(folder).save(path)
    return path


def rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a policy file says of itself."""
    with safe_open(file, framework="numpy") as opened:
        about = json.loads(opened.metadata()[exported.KEY])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    change(about)
    file.write_bytes(to_bytes(tensors, {exported.KEY: json.dumps(about)}))


def places(values: Iterable[Any] = VALUES) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every option that can hold a name, by the schema, with a config that holds it there."""
    for algo in algorithms():
        for option in options(algo):
            for value in values:
                algo_section = {"name": algo} | ({"entry": "stranger"} if algo == "custom" else {})
                config: dict[str, Any] = {"env": {"id": "CartPole-v1"}, "algo": algo_section}
                if algo == "r2d2":
                    config["model"] = {"core": "lstm"}
                if option == "model.settings":
                    config.setdefault("model", {})["entry"] = NAME
                *path, last = option.split(".")
                section = config
                for name in path:
                    section = section.setdefault(name, {})
                section[last] = value
                with suppress(ValidationError):
                    Config.model_validate(config, context={Config.ALONE: True})
                    yield option, config


def test_names_in_foreign_policies_runs_and_learners_are_not_imported(
    folder: Path, file: Path
) -> None:
    seen = set()
    for option, config in places():
        seen.add(option)
        rewrite(file, partial(dict.update, config=config))
        (folder / "config.yaml").write_text(write(config))
        uses: tuple[Callable[[], Any], ...] = (
            lambda: penstock.load_policy(file),
            lambda: evaluate(str(file), 1, "best", None, 0, 1),
            lambda: penstock.load_policy(folder),
            lambda: evaluate(str(folder), 1, "best", None, 0, 1),
            lambda: resolve_resumed(str(folder), [], "auto"),
            partial(act, config),
        )
        for use in uses:
            with suppress(UserError):
                use()
            assert "stranger" not in sys.modules, option
    assert seen >= {
        *("env.id", "env.kwargs", "env.wrappers", "model.entry", "model.settings"),
        *("algo.entry", "algo.settings", "run.callbacks", "run.dir", "checkpoint.store"),
    }


def test_every_option_that_takes_any_text_or_an_address_is_found_in_training() -> None:
    others = set()
    for option, config in places(("stranger", "tcp://127.0.0.1:7700")):
        validated = Config.model_validate(config, context={Config.ALONE: True})
        if option not in {reference.option for reference in references_in_training(validated)}:
            others.add(option)
    # An id of gymnasium, a folder in whose place the run's own is taken, a name within the pool, a
    # part of an observation.
    assert others == {"env.id", "run.dir", "league.name", "algo.part"}


def test_name_in_a_policy_file_is_imported_only_if_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.safetensors"
    own = a_run(tmp_path / "own", f"model.entry={NAME}")
    penstock.load_policy(own, allow=[NAME]).save(file)
    sys.modules.pop("stranger")
    with pytest.raises(
        UserError,
        match=r"own.safetensors names model.entry 'stranger:Net', .*give --allow 'stranger:Net'",
    ):
        penstock.load_policy(file)
    with pytest.raises(UserError, match=r"names model.entry 'stranger:Net'"):
        penstock.load_policy(file, allow=["stranger:Other"])
    with pytest.raises(UserError, match=r"names model.entry 'stranger:Net'"):
        penstock.evaluate(file, 1, allow="stranger:Nets")
    assert "stranger" not in sys.modules
    assert evaluate(str(file), 1, "best", None, 0, 5, ["stranger:*"])["length"]["max"] == 5
    copy = tmp_path / "copy.safetensors"
    monkeypatch.setattr(sys, "argv", ["penstock", "export", str(own), str(copy), "--allow", NAME])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, copy.read_bytes()) == (0, file.read_bytes())
    assert penstock.load_policy(file, allow="stranger:Net").config.model.entry == NAME


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"files": [{"xml": "/tmp/x"}]}, "'/tmp/x'"),
        ({"a": "${env:PENSTOCK_KEY}"}, "'${env:PENSTOCK_KEY}'"),
        ({"env_id": "os:system"}, "'os:system'"),
    ],
)
def test_policy_file_cannot_name_files_or_secrets(
    file: Path, kwargs: dict[str, Any], named: str
) -> None:
    rewrite(file, lambda about: about["config"]["env"].update(kwargs=kwargs))
    with pytest.raises(UserError, match=re.escape(f"names env.kwargs {named}, and a policy file")):
        evaluate(str(file), 1, "best", None, 0, 1)
    penstock.load_policy(file)  # makes no environment


@pytest.mark.parametrize("option", ["model.entry=stranger:Net", "env.id=stranger:make"])
def test_a_run_of_this_user_needs_no_permission(tmp_path: Path, option: str) -> None:
    folder = a_run(tmp_path / "run", option)
    with pytest.raises(UserError, match="which no run of yours has used on this host"):
        evaluate(str(folder), 1, "best", None, 0, 5)
    used_names.note(resolve("CartPole-v1", [option]))
    assert evaluate(str(folder), 1, "best", None, 0, 5)["length"]["max"] == 5


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"model": {"entry": "stranger:abort"}}, "is no class of torch.nn.Module"),
        ({"model": {"entry": "subprocess:Popen"}}, "no class of torch.nn.Module"),
        ({"algo": {"name": "custom", "entry": "stranger:abort"}}, "makes no algorithm"),
        ({"algo": {"name": "custom", "entry": "subprocess:Popen"}}, "makes no algorithm"),
    ],
)
def test_allowed_name_that_is_no_network_or_algorithm_is_not_called(
    file: Path, section: dict[str, Any], sentence: str
) -> None:
    rewrite(file, lambda about: about["config"].update(section))
    with pytest.raises(UserError, match=sentence):
        penstock.load_policy(file, allow=["*"])


BOX = {"Box": [-1, 1, [1 << 26], "<f4"]}
ACTION = {"Discrete": [2, 0]}


@pytest.mark.parametrize(
    "spaces",
    [
        [{"Dict": [[str(i), BOX] for i in range(20)]}, ACTION],
        [{"Tuple": [{"Box": [-1, 1, [1000], "<f4"]}] * 10_000}, ACTION],
        [{"Box": [0, 0, [1], "|V900000000"]}, ACTION],
        [{"Discrete": [1 << 30, 0]}, ACTION],
        [{"MultiDiscrete": [[[1 << 30]], [[0]], "<i8"]}, ACTION],
        [{"MultiBinary": [1 << 15, 1 << 15]}, ACTION],
        [{"Tuple": [{"MultiBinary": 0}] * 100_000}, ACTION],
        [{"Discrete": [1 << 62, 0]}, ACTION],
    ],
)
def test_oversized_spaces_are_refused_before_allocation(
    file: Path, spaces: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(file, lambda about: about.update(spaces=spaces))
    monkeypatch.setattr(space_json, "_decoded", None)  # makes them
    with pytest.raises(UserError, match=r"a space that takes [\d,]+ bytes; the most is"):
        penstock.load_policy(file)


@pytest.mark.parametrize(
    "space",
    [
        {"MultiDiscrete": ["300000000", 0, "<i8"]},
        {"MultiDiscrete": [["300000000"], [0], "<i8"]},
        {"MultiDiscrete": [[2], ["300000000"], "<i8"]},
        {"MultiDiscrete": [[2.0], [0], "<i8"]},
        {"Discrete": ["300000000", 0]},
        {"Discrete": [2, "0"]},
        {"Discrete": [True, 0]},
    ],
)
def test_space_with_fractional_counts_is_refused(space: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="where a space has whole numbers"):
        space_json.from_json(space)


@pytest.mark.parametrize("twice", [True, False])
def test_a_layout_names_each_tensor_of_the_file_once(file: Path, twice: bool) -> None:
    def change(about: dict[str, Any]) -> None:
        about["layout"] = about["layout"] * 1000 if twice else about["layout"][1:]

    rewrite(file, change)
    with pytest.raises(UserError, match="named twice" if twice else "not those of its layout"):
        penstock.load_policy(file)


def test_network_larger_than_its_weights_is_refused_before_allocation(folder: Path) -> None:
    """Of 4 TB."""
    text = (folder / "config.yaml").read_text()
    config = resolve(str(folder / "config.yaml"), ["model.hidden=[1000000, 1000000]"])
    assert (folder / "config.yaml").write_text(dump(config)) != len(text)
    with pytest.raises(UserError, match="is of another network"):
        evaluate(str(folder), 1, "best", None, 0, 5)

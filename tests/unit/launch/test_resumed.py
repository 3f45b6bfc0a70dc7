"""Which run and checkpoint a resume continues, and how changed options are reported."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.core.params import ParamLayout
from penstock.core.run_dir import Resume
from penstock.launch import run
from penstock.launch.resumed import (
    check_run_dir_given,
    describe_changed_options,
    find_source,
    resolve_resumed,
    start_from_checkpoint,
)
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    (tmp_path / "checkpoints" / "last" / FILE).touch()
    options = ("learner.lr=1e-3", "env.kwargs={sutton_barto_reward: true}")
    (tmp_path / "config.yaml").write_text(dump(resolve("cartpole", options)))
    return tmp_path


SAME = ("learner.lr=1e-3", "env.kwargs={sutton_barto_reward: true}", "run.dir=elsewhere")


def test_resume_with_the_same_options_reports_no_difference(folder: Path) -> None:
    assert describe_changed_options(folder, resolve("cartpole", SAME), "must") == ""


def test_changed_options_are_reported_by_dotted_name(folder: Path) -> None:
    options = ("learner.lr=3e-4", "env.kwargs={}", "stop.minutes=2")
    assert describe_changed_options(folder, resolve("cartpole", options), "auto") == (
        "resumed with changed options: env.kwargs.sutton_barto_reward true -> null, "
        "learner.lr 0.001 -> 0.0003, stop.minutes null -> 2.0"
    )


def test_only_the_first_of_many_differences_are_reported(folder: Path) -> None:
    more = [f"actors.{option}" for option in ("envs=8", "unroll=8", "count=3")]
    config = resolve("cartpole", (*SAME, *more, "run.seed=9", "run.grace_s=3", "run.interval_s=3"))
    said = describe_changed_options(folder, config, "auto")
    assert said.count("->") == 4
    assert said.endswith(", and 2 more")


def test_a_resumed_run_scales_observations_as_before(folder: Path) -> None:
    old = dump(resolve("cartpole", ["model.scale=bytes"]))
    (folder / "config.yaml").write_text(old.replace("  scale: bytes\n", ""))
    own = [f"run.dir={folder}"]
    assert resolve_resumed("cartpole", own, "must").config.model.scale == "bytes"
    assert resolve_resumed("cartpole", own, "no").config.model.scale == "bounds"
    for source in (folder, folder / "checkpoints" / "last", folder / "checkpoints" / "last" / FILE):
        found = resolve_resumed("cartpole", [], "no", str(source))
        assert found.config.model.scale == "bytes"


def test_a_resumed_run_reads_small_images_as_before(folder: Path) -> None:
    old = dump(resolve("cartpole", ["model.filters=[]"]))
    (folder / "config.yaml").write_text(old.replace("  filters: []\n", ""))
    own = [f"run.dir={folder}"]
    assert resolve_resumed("cartpole", own, "must").config.model.filters == []
    assert resolve_resumed("cartpole", own, "no").config.model.filters == [16, 32]
    given = [*own, "model.filters=[8]"]
    assert resolve_resumed("cartpole", given, "must").config.model.filters == [8]


def test_resume_with_another_algorithm_is_refused(folder: Path) -> None:
    config = resolve("cartpole", ("algo.name=ppo",))
    with pytest.raises(
        UserError, match=r"trained with impala, .*; set algo\.name=impala, or run\.d"
    ):
        describe_changed_options(folder, config, "auto")
    (folder / "checkpoints" / "last" / FILE).unlink()
    assert describe_changed_options(folder, config, "auto") == ""  # it begins anew


def test_checkpoint_without_a_config_is_compared_with_nothing(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    assert describe_changed_options(folder, resolve("cartpole"), "must") == ""


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("env.id=my_game:make", "my_game:make"),
        ("run.callbacks=['my_game:make']", "my_game:make"),
        ("checkpoint.store=/elsewhere/store", "/elsewhere/store"),
        ("checkpoint.store=reference::refs.json", "reference::refs.json"),
        ("learner.reduce.interface=eth0", "eth0"),
        ("transport.bind=tcp://127.0.0.1:7700", "tcp://127.0.0.1:7700"),
        ("transport.curve=keys", "keys"),
        ("transport.insecure=true", "insecure=true"),
        ("run.wandb=project", "project"),
        ("run.tensorboard=true", "tensorboard=true"),
        ("run.metrics_port=0", "0"),
        ("run.metrics_host=127.0.0.2", "127.0.0.2"),
        ("run.metrics_insecure=true", "metrics_insecure=true"),
    ],
)
def test_code_and_paths_of_a_run_are_used_only_if_this_user_has_run_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    config = resolve("cartpole", [option])
    (folder / "config.yaml").write_text(dump(config))
    name = option.partition("=")[0]
    with pytest.raises(
        UserError,
        match=rf"{name} '{text}', which no run of yours .* train {folder}/config\.yaml run\.d",
    ):
        resolve_resumed(str(folder), [], "auto")
    assert resolve_resumed(f"{folder}/config.yaml", [f"run.dir={folder}"], "auto")
    run._record_start(folder, config)
    assert resolve_resumed(str(folder), [], "auto").config.env == config.env


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_resume_needs_a_named_run_folder(resume: Resume, tmp_path: Path) -> None:
    sentence = rf"--resume {resume} needs the folder .*; name the folder with run\.dir="
    with pytest.raises(UserError, match=sentence):
        run.train("cartpole", [], resume, as_json=True)
    check_run_dir_given(resolve("cartpole"), "no")
    check_run_dir_given(resolve("cartpole", [f"run.dir={tmp_path}"]), resume)


def test_exploration_that_would_never_fall_is_refused(tmp_path: Path) -> None:
    options = ["algo.name=dqn", "algo.epsilon={from: 1, to: 0.02}", "stop.env_steps=null"]
    sentence = r"over stop\.env_steps, which is null, so it would stay at 1; give it a length"
    with pytest.raises(UserError, match=sentence):
        run.train("cartpole", [*options, f"run.dir={tmp_path / 'run'}"], "no", as_json=True)
    assert not list(tmp_path.iterdir())


def test_full_disk_at_the_start_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run, "write_atomic", full)
    options = [f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=r"config\.yaml cannot be written: No space left on dev"):
        run.train("cartpole", options, "no", as_json=True)
    assert not list(tmp_path.iterdir())


def saved(folder: Path, steps: int) -> None:
    layout = ParamLayout((("x", (1,)),))
    found = Checkpoint(layout, np.zeros(1, np.float32), {}, {"progress": {"learner_steps": steps}})
    checkpoint_format.save(folder, found)


def test_a_run_is_resumed_by_its_folder(folder: Path) -> None:
    resolved = resolve_resumed(str(folder), ["learner.lr=1e-5"], "auto")
    assert resolved.config.run.dir == str(folder)
    assert resolved.config.learner.lr == 1e-5
    assert resolved.config.env.id == "CartPole-v1"
    again = rf"already holds a run; .* auto, or give {folder}/config\.yaml run\.dir=OTHER for a new"
    with pytest.raises(UserError, match=again):
        resolve_resumed(str(folder), [], "no")
    with pytest.raises(UserError, match=r"is a folder without a config\.yaml, so it is not a run"):
        resolve_resumed(str(folder.parent), [], "must")


def test_preset_name_is_not_taken_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cartpole").mkdir()
    assert resolve_resumed("cartpole", [], "no").origin == "preset cartpole"


def test_another_checkpoint_is_a_folder_a_file_or_a_run(tmp_path: Path) -> None:
    run_dir, new = tmp_path / "first", tmp_path / "second"
    saved(run_dir / "checkpoints" / "best", 3)
    with pytest.raises(UserError, match=r"first is not a checkpoint; give a folder that contains"):
        find_source(str(run_dir), new, "no")
    saved(run_dir / "checkpoints" / "last", 7)
    best = run_dir / "checkpoints" / "best"
    assert find_source(str(best), new, "no") == (best, "no")
    assert find_source(str(best / FILE), new, "no") == (best, "no")
    assert find_source(str(run_dir), new, "auto") == (best.with_name("last"), "auto")
    assert not new.exists()
    assert "after 3 optimizer steps" in start_from_checkpoint(new, best)
    assert (
        checkpoint_format.load(new / "checkpoints" / "last").meta["progress"]["learner_steps"] == 3
    )
    assert find_source(str(run_dir), new, "auto") == (None, "auto"), "its own comes first"


def test_interrupted_checkpoint_copy_is_repeated(tmp_path: Path) -> None:
    source, new = tmp_path / "first" / "checkpoints" / "last", tmp_path / "second"
    saved(source, 7)
    (new / "checkpoints" / "last").mkdir(parents=True)  # as far as `start_from_checkpoint` came
    assert find_source(str(source), new, "auto") == (source, "auto")


def test_two_checkpoints_to_resume_from_contradict_each_other(tmp_path: Path) -> None:
    last = tmp_path / "checkpoints" / "last"
    saved(last, 7)
    saved(last.with_name("step-3"), 3)
    assert find_source(str(last.with_name("step-3")), tmp_path, "no")[0] is not None
    for resume in ("auto", "must"):
        with pytest.raises(UserError, match="leave out one of the two"):
            find_source(str(last.with_name("step-3")), tmp_path, resume)


def test_a_damaged_checkpoint_is_not_begun_from(tmp_path: Path) -> None:
    saved(tmp_path / "saved", 7)
    (tmp_path / "saved" / FILE).write_bytes(b"half")
    with pytest.raises(UserError, match="is damaged or no checkpoint"):
        start_from_checkpoint(tmp_path / "run", tmp_path / "saved")
    assert not (tmp_path / "run").exists()


def test_too_long_target_is_refused_in_one_sentence() -> None:
    with pytest.raises(UserError, match="is not a target; the nearest preset is"):
        resolve_resumed("x" * 300, [], "no")

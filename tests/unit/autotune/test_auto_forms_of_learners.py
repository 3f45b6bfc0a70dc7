"""The form in which a learner computes: timed if the options leave it open, kept by a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.autotune import forms as form_tuner
from penstock.autotune.forms import update_size, with_training_form
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core import user_cache
from penstock.core.machine import BF16_FLAGS, Processor
from penstock.envs import EnvInfo, probe
from penstock.learner.checkpoints import checkpoint_manager
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager, form_of_checkpoint
from penstock.learner.factory import make_trainer
from penstock.models.compute_form import ComputeForm

TIMES = {"fp32": 4.0, "bf16": 2.0, "contiguous": 1.0, "channels_last": 2.0, "auto": 0.0}
FAST = ComputeForm("bf16", "contiguous", 55)


@pytest.fixture(autouse=True)
def processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One with bf16, on which a pass takes as long as `TIMES` says, and small passes are fast."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = Processor("fast", BF16_FLAGS)
    for module in (form_tuner, checkpoint_manager, user_cache):
        monkeypatch.setattr(module, "processor", lambda: own)

    def time_pass(form: ComputeForm) -> float:
        return 1e-6 * form.rows * (TIMES[form.precision] + TIMES[form.memory_format])

    monkeypatch.setattr(form_tuner, "passes", lambda task: time_pass)


@pytest.fixture(scope="module")
def info() -> EnvInfo:
    return probe(pixels().env)


def pixels(*options: str) -> Config:
    """Updates of 160 observations of frames: 32 unrolls of 5."""
    sizes = ("actors.envs=16", "actors.unroll=4", "learner.updates_per_batch=1")
    return resolve("pong_impala", [*sizes, "learner.batch_slots=2", *options])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), FAST),
        (("learner.precision=fp32",), ("fp32", "contiguous", 55)),
        (("learner.memory_format=channels_last",), ("bf16", "channels_last", 55)),
        (("learner.micro_batch=100",), ("bf16", "contiguous", 100)),
    ],
)
def test_only_forms_that_the_options_leave_open_are_timed(
    options: tuple[str, ...], expected: Any, info: EnvInfo
) -> None:
    config, note = with_training_form(pixels(*options), info)
    assert config.learner.model_dump(include={"precision", "memory_format", "micro_batch"}) == (
        dict(zip(("precision", "memory_format", "micro_batch"), expected, strict=True))
    )
    assert note.startswith(f"the learner computes in {ComputeForm(*expected)}: ")
    assert make_trainer(config, info).form == expected


def test_update_that_needs_one_pass_is_timed_as_one_pass(info: EnvInfo) -> None:
    options = ("algo.normalize_advantages=true", "learner.micro_batch=40")
    config, note = with_training_form(pixels(*options), info)
    assert (config.learner.precision, config.learner.micro_batch) == ("bf16", 160)
    assert note.endswith("; an update is always one pass, since its loss needs all of it")


def test_no_form_is_timed_when_the_options_fix_all(info: EnvInfo) -> None:
    fixed = ("learner.precision=fp32", "learner.memory_format=contiguous", "learner.micro_batch=9")
    before = pixels(*fixed)
    assert with_training_form(before, info) == (before, "")
    assert make_trainer(before, info).form == ("fp32", "contiguous", 9)


def test_form_without_timing_depends_only_on_the_config(info: EnvInfo) -> None:
    assert make_trainer(pixels(), info).form == ("fp32", "channels_last", 256)


@pytest.mark.parametrize(
    ("target", "options", "size"),
    [
        ("cartpole", ("actors.envs=8", "actors.unroll=4", "learner.updates_per_batch=2"), (20, 5)),
        ("pong", ("actors.envs=8",), (64, 1)),  # by steps: 2 slots of 8 x 32 in 8 updates
        ("cartpole_dqn", ("replay.batch_size=77",), (77, 1)),
    ],
)
def test_number_of_observations_of_an_update_is_computed(
    target: str, options: tuple[str, ...], size: Any
) -> None:
    config = resolve(target, [*options])
    assert update_size(config, probe(config.env)) == size


def test_a_resume_keeps_the_form_of_its_checkpoint(
    tmp_path: Path, info: EnvInfo, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    assert form_of_checkpoint(tmp_path) is None
    config, _ = with_training_form(pixels(), info)
    CheckpointManager(tmp_path, make_trainer(config, info)).save()
    assert form_of_checkpoint(tmp_path) == FAST
    monkeypatch.setitem(TIMES, "fp32", 0.0)  # now another form is faster
    again, note = with_training_form(pixels(), info, form_of_checkpoint(tmp_path))
    assert again == config
    assert note == f"the learner computes in {FAST}: as the checkpoint's learner computed"
    assert CheckpointManager(tmp_path, make_trainer(again, info)).resume("must")
    assert not [note for note in notes if "rounding" in note]


def test_a_resume_in_another_form_is_logged(
    tmp_path: Path, info: EnvInfo, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    config, _ = with_training_form(pixels(), info)
    CheckpointManager(tmp_path, make_trainer(config, info)).save()
    kept = form_of_checkpoint(tmp_path)
    other, _ = with_training_form(pixels("learner.precision=fp32"), info, kept)
    assert other.learner.precision == "fp32"
    assert CheckpointManager(tmp_path, make_trainer(other, info)).resume("must")
    [note] = [note for note in notes if "rounding" in note]
    assert note.startswith(
        "the learner computes in fp32, contiguous, 55 observations a pass; the checkpoint's "
        "computed in bf16, contiguous, 55 observations a pass on fast: "
    )
    slow = Processor("slow", BF16_FLAGS)
    monkeypatch.setattr(checkpoint_manager, "processor", lambda: slow)
    assert form_of_checkpoint(tmp_path) is None  # what was fast there may be slow here


@pytest.mark.parametrize(
    "value", [None, 5, [], [["fp32", "auto", 256]], [["fp99", "auto", 1], "x"]]
)
def test_invalid_form_in_a_checkpoint_is_ignored(
    tmp_path: Path, info: EnvInfo, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    manager = CheckpointManager(tmp_path, make_trainer(pixels(), info))
    state = manager._make_checkpoint({}, None)
    monkeypatch.setattr(manager, "_make_checkpoint", lambda *_: state)
    state.meta[checkpoint_manager.FORM] = value  # type: ignore[index]
    manager.save()
    assert form_of_checkpoint(tmp_path) is None
    assert manager.resume("must")

"""A trial that is saved and continued from its own checkpoint or from that of another trial."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.launch.tuning.trial_run import RECEIVED, TrialRun, TrialSettings
from penstock.launch.tuning.trials import STARTS, folder_of
from penstock.learner.checkpoints import checkpoint_format
from train_command import SMALL, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

FAST, STILL = 3e-3, 1e-12  # learning rates; with the second weights keep their values


def last(folder: Path, number: int) -> Any:
    return checkpoint_format.load(folder_of(folder, number) / "checkpoints" / "last")


def weights(folder: Path, number: int) -> Any:
    return last(folder, number).weights


def starts(folder: Path, number: int) -> list[dict[str, Any]]:
    text = (folder_of(folder, number) / STARTS).read_text()
    return [json.loads(line) for line in text.splitlines()]


def steps_of(found: TrialRun, until: int) -> int:
    """Step a trial until it has trained on so many agent steps."""
    while True:
        progress, ended = found.step()
        if ended or progress.trained_steps >= until:
            return progress.trained_steps


@pytest.fixture
def settings(tmp_path: Path) -> TrialSettings:
    constant = ("learner.lr_end_fraction=1", "learner.lr_decay_steps=null")
    overrides = [*SMALL, *constant, "stop.minutes=30"]
    folder = tmp_path / "sweep"
    return TrialSettings("cartpole_ppo", overrides, folder, tmp_path, "return", None, 30.0)


@pytest.fixture
def ended() -> Iterator[list[TrialRun]]:
    """Trials that are ended with the test, whatever its result."""
    made: list[TrialRun] = []
    yield made
    for each in made:
        each.end()


def test_a_trial_continues_from_the_weights_of_another_with_its_own_options(
    settings: TrialSettings, ended: list[TrialRun], tmp_path: Path
) -> None:
    folder, saved = settings.folder, tmp_path / "saved"
    saved.mkdir()
    best = TrialRun(settings, 0, {"learner.lr": FAST})
    ended.append(best)
    trained_steps = steps_of(best, 2000)
    best.save(saved)
    best.end()
    handed_over = checkpoint_format.load(saved)
    loser = TrialRun(settings, 1, {"learner.lr": FAST})
    ended.append(loser)
    steps_of(loser, 2000)
    loser.end()
    before = weights(folder, 1)
    assert not np.allclose(before, handed_over.weights, atol=1e-3), "two seeds of actors, two runs"

    successor = TrialRun(settings, 1, {"learner.lr": STILL})
    ended.append(successor)
    successor.load(saved)
    assert (folder_of(folder, 1) / "checkpoints" / RECEIVED).is_dir()
    steps_of(successor, trained_steps + 2000)
    successor.end()
    now = last(folder, 1)
    updates = handed_over.meta["progress"]["learner_steps"]
    assert now.meta["progress"]["learner_steps"] > updates, "it has trained on"
    # With the learning rate of the other trial hundreds of updates would have changed them.
    np.testing.assert_allclose(now.weights, handed_over.weights, atol=1e-6)
    rates = [m["learning_rate"] for m in metrics(folder_of(folder, 1)) if m.get("learning_rate")]
    assert rates[0] == pytest.approx(FAST)
    assert rates[-1] == pytest.approx(STILL)
    [first, second] = starts(folder, 1)
    assert (first["from_trial"], first["options"]) == (None, {"learner.lr": FAST})
    assert (second["from_trial"], second["options"]) == (0, {"learner.lr": STILL})
    assert second["trained_steps"] >= 2000
    kept = {path.name for path in (folder_of(folder, 1) / "checkpoints").iterdir()}
    assert RECEIVED not in kept
    assert not any("before" in name for name in kept), "checkpoints of what was given up"


def test_a_paused_trial_continues_from_its_own_checkpoint(
    settings: TrialSettings, ended: list[TrialRun], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    first = TrialRun(settings, 3, {"learner.lr": FAST})
    ended.append(first)
    steps_of(first, 2000)
    first.save(saved)
    first.end()
    before = last(settings.folder, 3).meta["progress"]
    second = TrialRun(settings, 3, {"learner.lr": FAST})
    ended.append(second)
    second.load(saved)
    second.step()
    begun = len(metrics(folder_of(settings.folder, 3)))
    steps_of(second, before["trained_steps"] + 1000)
    second.end()
    of_second = metrics(folder_of(settings.folder, 3))[begun:]
    assert of_second[0]["trained_steps"] >= before["trained_steps"]
    assert last(settings.folder, 3).meta["progress"]["learner_steps"] > before["learner_steps"]
    assert [line["from_trial"] for line in starts(settings.folder, 3)] == [None, None]


def test_a_run_that_fails_names_its_error(
    settings: TrialSettings, ended: list[TrialRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment variables are those of the command, not of a worker of Ray."""
    names = "('CUDA_VISIBLE_DEVICES', 'RAY_JOB_ID')"
    text = f"import os\ndef make(): raise ValueError([os.environ.get(n) for n in {names}])\n"
    (tmp_path / "broken_game.py").write_text(text)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_JOB_ID", "01")
    failing = TrialRun(replace(settings, gpus="3"), 0, {"env.id": "broken_game:make"})
    ended.append(failing)
    with pytest.raises(RuntimeError, match=r"ValueError: \['3', None\]"):
        steps_of(failing, 1000)

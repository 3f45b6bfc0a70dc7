"""The lockstep mode, in this process, with a loss that is not finite in some of its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep_run import of_kind, train_in_lockstep
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.learner.checkpoints import checkpoint_format

ENTRY = "nan_algorithm:Algorithm"
SMALL = [
    *("transport.kind=inproc", "actors.count=1", "actors.envs=8", "actors.unroll=8"),
    *("algo.name=custom", f"algo.entry={ENTRY}", "stop.return=null", "learner.device=cpu"),
    *("learner.updates_per_batch=1", "stop.learner_steps=40"),
]


def train(folder: Path, *options: str) -> list[dict[str, Any]]:
    """A whole run; all that it reported."""
    return train_in_lockstep(folder, resolve("cartpole", [*SMALL, *options]))


def test_few_nonfinite_updates_are_skipped_and_the_run_continues(tmp_path: Path) -> None:
    heard = train(tmp_path)
    [stop] = of_kind(heard, "stop")
    assert (stop["reason"], stop["error"]) == ("learner_steps", "")
    last = of_kind(heard, "metrics")[-1]
    assert (last["updates_skipped"], last["rollbacks"]) == (3, 0)
    assert {event["event"] for event in of_kind(heard, "event")} == {"note"}


def test_many_nonfinite_updates_in_a_row_cause_a_rollback(tmp_path: Path) -> None:
    heard = train(tmp_path, "algo.settings={last: 24}", "checkpoint.every_steps=4")
    assert of_kind(heard, "stop")[0]["reason"] == "learner_steps"
    last = of_kind(heard, "metrics")[-1]
    assert (last["updates_skipped"], last["rollbacks"]) == (20, 2)
    back = [event for event in of_kind(heard, "event") if event["event"] == "rollback"]
    assert [event["data"]["step"] for event in back] == [14, 24]
    assert "policy_loss" not in back[0]["data"]["loss"], "its parts are finite, the sum is not"
    saved = checkpoint_format.load(tmp_path / "checkpoints" / "last").meta["progress"]
    assert (saved["lr_factor"], saved["learner_steps"]) == (0.25, 40)


def test_failing_checkpoint_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    write, full = checkpoint_format.save, [True, True]

    def save(*about: Any) -> None:
        if full:
            full.pop()
            raise UserError("the disk is full")
        write(*about)

    monkeypatch.setattr(checkpoint_format, "save", save)
    heard = train(tmp_path, "checkpoint.every_steps=10")
    assert of_kind(heard, "stop")[0]["reason"] == "learner_steps"
    assert len([note for note in notes if note.endswith("run continues: the disk is full")]) == 2
    saved = checkpoint_format.load(tmp_path / "checkpoints" / "last").meta["progress"]
    assert saved["learner_steps"] == 40


def test_loss_that_stays_nonfinite_ends_the_run(tmp_path: Path) -> None:
    heard = train(tmp_path, "algo.settings={last: 1000000}", "stop.learner_steps=100")
    [stop] = of_kind(heard, "stop")
    assert stop["reason"] == "diverged"
    assert "10 updates in a row were skipped, after 3 rollbacks, the last with" in stop["error"]
    [final] = of_kind(heard, "final")
    accounting = final["accounting"]
    assert accounting["produced"] == accounting["trained"] + accounting["in_flight"] > 0
    assert checkpoint_format.exists(tmp_path / "checkpoints" / "last")


@pytest.mark.parametrize("settings", ["{first: 0, last: 0}", "{last: 24}"])
def test_run_with_nonfinite_losses_is_reproducible(tmp_path: Path, settings: str) -> None:
    options = (f"algo.settings={settings}", "checkpoint.every_steps=8")
    weights = []
    for name in ("once", "again"):
        train(tmp_path / name, *options)
        weights.append(checkpoint_format.load(tmp_path / name / "checkpoints" / "last").weights)
    assert np.array_equal(weights[0], weights[1])

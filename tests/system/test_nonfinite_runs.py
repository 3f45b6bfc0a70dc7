"""Runs whose loss stays nonfinite, for their only learner or for one of two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.launch import run
from penstock.learner.checkpoints import checkpoint_format

pytestmark = [pytest.mark.system, pytest.mark.timeout(90)]

TESTS = Path(__file__).parents[1]
SMALL = [
    *("algo.name=custom", "algo.entry=nan_algorithm:Algorithm"),
    *("actors.envs=8", "actors.unroll=8", "actors.count=1"),
    *("stop.return=null", "learner.updates_per_batch=1"),
]


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, Any]:
    """Exit code and summary of a run by the algorithm of `nan_algorithm`."""
    monkeypatch.chdir(TESTS)  # from where the processes of the run import it
    code = run.train("cartpole", [*SMALL, f"run.dir={folder}", *options], "no", True)
    return code, json.loads((folder / "summary.json").read_text())


def test_loss_that_stays_nonfinite_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, summary = train(tmp_path / "run", monkeypatch, "algo.settings={last: 1000000}")
    assert (code, summary["exit_reason"]) == (1, "diverged")
    sentence = "10 updates in a row were skipped, after 3 rollbacks"
    assert sentence in summary["error"]
    assert sentence in capfd.readouterr().err
    assert summary["rollbacks"] == 3
    accounting = summary["accounting"]
    went = accounting["trained"] + accounting["in_flight"]
    went += sum(accounting["dropped"].values()) + sum(accounting["lost"].values())
    assert went == accounting["produced"] > 0
    checkpoint_format.load(tmp_path / "run" / "checkpoints" / "last")


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["bsp", "local_sgd", "ssp"])
def test_nonfinite_updates_of_one_learner_are_skipped_and_both_continue(
    pace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = 0 if pace == "ssp" else 1  # with a parameter server no learner has another rank
    options = ("learner.count=2", "actors.count=2", f"learner.pace={pace}")
    more = ("stop.learner_steps=60", f"algo.settings={{rank: {rank}}}")
    code, summary = train(tmp_path / "run", monkeypatch, *options, *more)
    assert (code, summary["exit_reason"]) == (0, "learner_steps")
    assert summary["updates_skipped"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["bsp", "local_sgd", "ssp"])
def test_two_learners_with_nonfinite_loss_end_together_with_the_reason(
    pace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = 0 if pace == "ssp" else 1
    settings = f"algo.settings={{rank: {rank}, last: 1000000}}"
    options = ("learner.count=2", "actors.count=2", f"learner.pace={pace}", settings)
    code, summary = train(tmp_path / "run", monkeypatch, *options)
    assert (code, summary["exit_reason"]) == (1, "diverged")
    assert summary["rollbacks"] == (0 if pace == "ssp" else 3)

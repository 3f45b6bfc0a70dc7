"""Runs whose loss is not finite: for a few updates, for many, for ever, on one of two learners."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.launch import run
from penstock.learner import checkpoint

pytestmark = [pytest.mark.system, pytest.mark.timeout(90)]

ALGORITHM = """
from dataclasses import dataclass

from penstock.algos import impala

STATISTICS = impala.STATISTICS
calls = 0


@dataclass
class Settings:
    first: int = 5
    last: int = 7
    rank: int = 0
    discount: float = 0.99
    trace_lambda: float = 0.95
    rho_clip: float = 1.0
    c_clip: float = 1.0
    value_cost: float = 0.5
    entropy_cost: float = 0.01
    normalize_advantages: bool = False


def loss(net, batch, cfg, envs=slice(None), add_others=None):
    import torch.distributed as dist

    global calls
    calls += 1
    settings = cfg.settings
    total, sums = impala.loss(net, batch, settings, envs, add_others)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == settings.rank and settings.first <= calls <= settings.last:
        total = total * float("nan")
    return total, sums
"""

SMALL = [
    *("algo.name=custom", "algo.entry=nan_loss", "actors.envs=8", "actors.unroll=8"),
    *("actors.count=1", "stop.return=null", "learner.updates_per_batch=1", "run.dir=run"),
]


def train(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, Any]:
    """Exit code and summary of a run by the algorithm above."""
    (folder / "nan_loss.py").write_text(ALGORITHM)
    monkeypatch.chdir(folder)
    code = run.train("cartpole", [*SMALL, *options], "no", True)
    return code, json.loads((folder / "run" / "summary.json").read_text())


LOCKSTEP = ("transport.kind=inproc", "stop.learner_steps=40")


def test_a_few_updates_are_skipped_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, summary = train(tmp_path, monkeypatch, *LOCKSTEP)
    assert (code, summary["exit_reason"]) == (0, "learner_steps")
    assert (summary["updates_skipped"], summary["rollbacks"]) == (3, 0)


def test_many_in_a_row_send_the_learner_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ("algo.settings={last: 24}", "checkpoint.every_steps=4")
    code, summary = train(tmp_path, monkeypatch, *LOCKSTEP, *more)
    assert (code, summary["exit_reason"]) == (0, "learner_steps")
    assert (summary["updates_skipped"], summary["rollbacks"]) == (20, 2)
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / "last").meta["progress"]
    assert (saved["lr_factor"], saved["learner_steps"]) == (0.25, 40)


def test_a_loss_that_stays_so_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, summary = train(tmp_path, monkeypatch, "algo.settings={last: 1000000}")
    assert (code, summary["exit_reason"]) == (1, "diverged")
    sentence = "10 updates in a row were skipped, after 3 rollbacks"
    assert sentence in summary["error"]
    assert sentence in capfd.readouterr().err
    assert summary["rollbacks"] == 3
    accounting = summary["accounting"]
    went = accounting["trained"] + accounting["in_flight"]
    went += sum(accounting["dropped"].values()) + sum(accounting["lost"].values())
    assert went == accounting["produced"] > 0
    checkpoint.load(tmp_path / "run" / "checkpoints" / "last")


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["bsp", "local_sgd", "ssp"])
def test_of_two_learners_one_is_skipped_for_all(
    pace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("learner.count=2", "actors.count=2", f"learner.pace={pace}")
    more = ("stop.learner_steps=60", "algo.settings={rank: 1}")
    if pace == "ssp":  # its learners have no ranks of each other
        more = ("stop.learner_steps=60", "algo.settings={rank: 0}")
    code, summary = train(tmp_path, monkeypatch, *options, *more)
    assert (code, summary["exit_reason"]) == (0, "learner_steps")
    assert summary["updates_skipped"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("pace", ["bsp", "local_sgd", "ssp"])
def test_two_learners_end_together_with_the_reason(
    pace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = 0 if pace == "ssp" else 1
    settings = f"algo.settings={{rank: {rank}, last: 1000000}}"
    options = ("learner.count=2", "actors.count=2", f"learner.pace={pace}", settings)
    code, summary = train(tmp_path, monkeypatch, *options)
    assert (code, summary["exit_reason"]) == (1, "diverged")
    assert summary["rollbacks"] == (0 if pace == "ssp" else 3)

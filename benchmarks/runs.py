"""Running `penstock train` from a benchmark, as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def train(
    target: str, *overrides: str, folder: Path | None = None, cwd: Path | None = None
) -> dict[str, Any]:
    """Run to the end and return the summary, with the metrics of each interval beside it."""
    with tempfile.TemporaryDirectory() as temporary:
        run_dir = folder or Path(temporary) / "run"
        command = [sys.executable, "-m", "penstock", "train", target, f"run.dir={run_dir}"]
        done = subprocess.run(
            [*command, *overrides, "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            cwd=cwd,
        )
        summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        summary["intervals"] = [json.loads(line) for line in lines]
    return summary


def dropped_fraction(summary: dict[str, Any]) -> float:
    """Share of produced steps that were dropped or lost."""
    accounting = summary["accounting"]
    gone = sum(accounting["dropped"].values()) + sum(accounting["lost"].values())
    return float(gone / max(accounting["produced"], 1))


def trained_rate(summary: dict[str, Any], skip_s: float = 0.0) -> float:
    """Trained steps per second from ``skip_s`` of training on, start-up left out."""
    points = [
        (m["time_s"], m["trained_steps"]) for m in summary["intervals"] if m["time_s"] >= skip_s
    ]
    (begin_s, first), (end_s, last) = points[0], points[-1]
    return float((last - first) / max(end_s - begin_s, 1e-9))


def point(line: dict[str, Any], megabytes: float | None = None) -> dict[str, Any]:
    """Of a curve, from one interval's metrics."""
    return {
        "seconds": line["time_s"],
        "steps": line["env_steps"],
        "updates": line["learner_steps"],
        "return": line["episode_return_mean"],
        "megabytes": megabytes,
    }

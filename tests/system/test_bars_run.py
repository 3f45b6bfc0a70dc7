"""benchmarks/bars.py trains a bar, continues it after a cut, and evaluates its checkpoints."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from bar_table import LearningBar
from bars import BarFolder, measure_seed
from penstock.learner.checkpoints import checkpoint_format

pytestmark = [pytest.mark.system]

# A learner's 32 updates of each 64 steps take longer than the cut.
BAR = LearningBar(
    "cartpole_dqn",
    steps=60_000,
    options=("replay.samples_per_insert=64", "run.interval_s=0.2"),
    seeds=(3,),
    goal=60.0,
    every=1_000,
    every_s=0.2,
    episodes=5,
)
PROGRAM = """
import signal, sys
from pathlib import Path
from bars import BarFolder, measure_seed
from test_bars_run import BAR
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
measure_seed(BarFolder(Path(sys.argv[1]), "bar", 3), BAR, 3, float("inf"))
"""


def trained_steps(folder: BarFolder) -> int:
    last = folder.run / "checkpoints" / "last"
    if not checkpoint_format.exists(last):
        return 0
    return int(checkpoint_format.read_meta(last)["progress"]["trained_steps"])


def test_a_cut_bar_continues_and_gives_the_steps_to_its_goal(tmp_path: Path) -> None:
    folder = BarFolder(tmp_path, "bar", 3)
    paths = ":".join(sys.path)
    session = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env={"PYTHONPATH": paths}
    )
    try:
        while not trained_steps(folder):
            assert session.poll() is None
            time.sleep(0.05)
        children = psutil.Process(session.pid).children(recursive=True)
        session.send_signal(signal.SIGTERM)
        assert session.wait(60.0) == 143
    finally:
        session.kill()
    assert not psutil.wait_procs(children, timeout=20.0)[1], "it takes its run along"
    assert not BarFolder(tmp_path, "bar", 3).is_complete
    before = trained_steps(folder)

    measure_seed(BarFolder(tmp_path, "bar", 3), BAR, 3, deadline_s=float("inf"))
    record: dict[str, Any] = json.loads((tmp_path / "bar/seed-3.json").read_text())
    reached = record["steps_to_goal"]
    assert record["evaluations"][str(reached)]["return"] >= 60.0
    assert before <= record["trained_steps"] <= 61_000
    assert {str(steps) for steps in folder.checkpoints()} == set(record["evaluations"])
    progress = checkpoint_format.read_meta(folder.run / "checkpoints/last")["progress"]
    assert progress["generation"] >= 1, "it continued, and did not begin anew"

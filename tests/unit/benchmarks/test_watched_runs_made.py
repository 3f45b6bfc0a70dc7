"""The runs that benchmarks/watch_page.py simulates are valid runs for the page."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import pytest

from penstock.monitor.run_folder.record import METRICS
from penstock.watch.catalog import RunCatalog
from penstock.watch.views import Views
from run_folders import make_run
from watched_runs import LivingRun, lines_like, long_runs, simulated_processes, with_processes


@pytest.fixture
def real(tmp_path: Path) -> Path:
    return make_run(tmp_path / "real", [float(i) for i in range(10)])


def test_simulated_live_run_shows_many_processes(real: Path, tmp_path: Path) -> None:
    processes = simulated_processes(300, 40)
    lines = (with_processes(line, [*processes]) for line in lines_like(real))
    before = list(islice(lines, 40))
    with LivingRun(tmp_path / "runs/many", real, processes, lines) as run:
        run.feed(before)
        run.gone.add("actor-7")
        views = Views(RunCatalog(tmp_path / "runs"))
        ends_s = time.monotonic() + 30
        while (now := views.now("many"))["state"] != "running" or not now["status"]["live"]:
            assert time.monotonic() < ends_s
            time.sleep(0.05)
        shown = {each["name"]: each for each in now["status"]["processes"]}
        assert len(shown) == 300
        assert len({each["host"] for each in shown.values() if "host" in each}) == 40
        assert shown["actor-7"]["pid"] is None
        assert [n for n, each in shown.items() if (each.get("silent_s") or 0) > 60] == ["actor-99"]
        # Figures of 300 processes take no room from those of the run.
        assert now["flow"]["learner"]["ledger"]["compute"] == pytest.approx(0.75, rel=0.2)
        assert now["flow"]["environments"]["steps_per_s"] == pytest.approx(100_000)
        assert now["verdict"] is not None
        size = (run.folder / METRICS).stat().st_size
        while (run.folder / METRICS).stat().st_size == size:  # a line a second
            assert time.monotonic() < ends_s
            time.sleep(0.05)
    assert not (run.folder / "supervisor.json").exists()


def test_long_runs_share_one_metrics_file(real: Path, tmp_path: Path) -> None:
    made = long_runs(tmp_path / "long", real, 3, 500)
    assert [path.name for path in made] == ["run-00", "run-01", "run-02"]
    assert len({(path / METRICS).stat().st_ino for path in made}) == 1
    views = Views(RunCatalog(tmp_path / "long"))
    assert len(views.runs()["runs"]) == 3
    while views.now("run-02")["read"] < 1:
        pass
    found = views.curves(["run-02"], ["episode_return_mean"], "time_s", points=1000)
    [line] = found["curves"]["episode_return_mean"]
    assert line["x"] == list(range(1, 501))

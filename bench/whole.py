"""The whole: a run of a target as a user would start it, and how fast it trained."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.processes import python
from penstock.core.run_dir import TEMPORARY
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import METRICS

FOREVER = (
    *(f"stop.{name}=null" for name in ("return", "env_steps", "learner_steps")),
    "eval.every_steps=null",
)
WARM_UP = 0.25  # share of a run that counts as warm-up
INTERVALS = 40  # measurements in a run
GRACE_S = 30.0  # seconds that a command has to end before it is killed


def train(
    target: str, *overrides: str, folder: Path | None = None, cwd: Path | None = None
) -> dict[str, Any]:
    """Train ``target`` to the end of the run, with its live view on standard error.

    Args:
        target: preset, file or environment.
        overrides: options as ``key=value``.
        folder: folder of the run; by default a temporary one, which is removed.
        cwd: folder in which the command starts.

    Returns:
        The run's summary, with the metrics of each interval as ``intervals``.

    Raises:
        UserError: if the run fails; the run has then printed the reason.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as temporary:
        run_dir = folder or Path(temporary) / "run"
        command = python("penstock", "train", target, f"run.dir={run_dir}", *overrides, "--json")
        process = run(command, cwd=cwd)
        if process.returncode:
            raise UserError(
                f"`penstock train {' '.join([target, *overrides])}` failed with "
                f"{process.returncode}; its output above has the reason"
            )

        summary: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        summary["intervals"] = lines(run_dir / METRICS)
    return summary


def trained_rate(summary: dict[str, Any], skip_s: float = 0.0) -> float:
    """Returns trained agent steps per second, without start-up and ``skip_s`` of training."""
    points = [point for point in trained(summary) if point[0] >= skip_s]
    return rate_between(points[0], points[-1])


def trained(summary: dict[str, Any]) -> list[tuple[float, int]]:
    """Returns for each interval the seconds of training, and the agent steps trained by then."""
    return [(line["time_s"], line["trained_steps"]) for line in summary["intervals"]]


def rate_between(begin: tuple[float, int], end: tuple[float, int]) -> float:
    """Returns steps per second between two points of `trained`."""
    begin_s, begin_steps = begin
    end_s, end_steps = end
    return float((end_steps - begin_steps) / max(end_s - begin_s, 1e-9))


def rates(target: str, seconds: float, rounds: int, *overrides: str) -> list[float]:
    """Train ``target`` for ``seconds``, of which the first quarter is left out as warm-up.

    Returns:
        Trained agent steps per second in each of ``rounds`` parts of the rest.
    """
    summary = train(
        target,
        *FOREVER,
        *overrides,
        f"stop.minutes={seconds / 60}",
        f"run.interval_s={max(seconds / INTERVALS, 0.05)}",
    )
    return split(trained(summary), seconds * WARM_UP, rounds)


def split(points: Sequence[tuple[float, int]], skip_s: float, rounds: int) -> list[float]:
    """Returns the rates in ``rounds`` parts of the points from ``skip_s`` on.

    Each part has about as many points. There are fewer parts if there are few points, and none if
    there are less than two.
    """
    warm = [point for point in points if point[0] >= skip_s]
    count = min(rounds, len(warm) - 1)
    if count <= 0:
        return []

    edges = [warm[round(i * (len(warm) - 1) / count)] for i in range(count + 1)]
    return [rate_between(begin, end) for begin, end in pairwise(edges)]


def median_rate(rates: Sequence[float]) -> float | None:
    """Returns the median of the rates; None without rates."""
    return statistics.median(rates) if rates else None


def run(
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    cwd: Path | None = None,
    keep_errors: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command and wait for its end.

    Whatever ends the waiting early, a signal or the timeout, the command is asked to stop, and
    killed after `GRACE_S` seconds.

    Args:
        command: program and arguments.
        timeout_s: longest time in seconds; by default there is no limit.
        cwd: folder in which the command starts.
        keep_errors: whether standard error is returned instead of shown.

    Returns:
        Exit code and standard output, and standard error with ``keep_errors``.

    Raises:
        TimeoutExpired: of `subprocess`, after ``timeout_s``.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if keep_errors else None,
        text=True,
        cwd=cwd,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        process.terminate()
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        raise

    return subprocess.CompletedProcess(command, process.returncode, stdout=output, stderr=errors)

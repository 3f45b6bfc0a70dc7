"""What every benchmark shares: the machine it ran on, a table for people, JSON for programs.

Machines are noisy and shared, so compare ratios measured in one run, never figures of two runs. A
benchmark prints and records; it never fails a test run.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import socket
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import penstock
from penstock.core.machine import machine as of_package
from penstock.core.processes import THREAD_VARIABLES

RESULTS = Path(__file__).parent / "results"
ONE_THREAD = dict.fromkeys(THREAD_VARIABLES, "1")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have."""
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # as roles have it, and before numpy loads
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ONE_THREAD)
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="end with the result as one JSON object")
    made.add_argument("--save", action="store_true", help="write benchmarks/results/NAME.json")
    return made


def compile_package() -> None:
    """Write the package's bytecode, as an installation by pip does: a machine may be set not to
    write any (PYTHONDONTWRITEBYTECODE), and then each start compiles."""
    package = Path(penstock.__file__).parent
    compileall.compile_dir(package, maxlevels=0, quiet=2)
    for room in package.iterdir():
        if room.is_dir():
            compileall.compile_dir(room, quiet=2)


def finish(
    name: str, result: Mapping[str, Any], rows: Sequence[Sequence[Any]], args: argparse.Namespace
) -> None:
    """Print ``rows`` (the first is the heading), with ``args.json`` to standard error, and record
    ``result``."""
    print_table(rows, sys.stderr if args.json else sys.stdout)
    full = {"benchmark": name, "machine": machine(), **result}
    if args.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(full, indent=2) + "\n")
    if args.json:
        print(json.dumps(full))


def saved_tasks(name: str) -> dict[str, Any]:
    """What was saved before, of which the runs made now replace theirs."""
    path = RESULTS / f"{name}.json"
    saved: dict[str, Any] = json.loads(path.read_text())["tasks"] if path.exists() else {}
    return saved


def print_table(rows: Sequence[Sequence[Any]], file: TextIO | None = None) -> None:
    """Columns as wide as their widest cell, numbers to three digits."""
    texts = [[_cell(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip(), file=file)


def machine() -> dict[str, Any]:
    """What a reader must know to compare a figure with their own."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **of_package(),
        "command": " ".join(["python", *sys.argv]),
    }


def median_of(measure: Callable[[], float], times: int = 3) -> tuple[float, list[float]]:
    """Median of ``times`` runs, and all of them."""
    runs = [measure() for _ in range(times)]
    return statistics.median(runs), runs


def dropped_fraction(summary: dict[str, Any]) -> float:
    """Share of produced steps that were dropped or lost."""
    accounting = summary["accounting"]
    gone = sum(accounting["dropped"].values()) + sum(accounting["lost"].values())
    return float(gone / max(accounting["produced"], 1))


def point(line: dict[str, Any], megabytes: float | None = None) -> dict[str, Any]:
    """Of a curve, from one interval's metrics."""
    return {
        "seconds": line["time_s"],
        "steps": line["env_steps"],
        "updates": line["learner_steps"],
        "return": line["episode_return_mean"],
        "megabytes": megabytes,
    }


def free_port() -> int:
    """A TCP port of this host that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)

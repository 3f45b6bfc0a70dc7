"""The tests marked `gpu`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_stages.finding import Finding, Options
from penstock.bench.whole import run as run_command

ROOT = Path(__file__).parents[2]
FEW = "tests/unit/learner/test_publisher.py"  # of which some are marked


def run(options: Options) -> Iterator[Finding]:
    # A machine with a GPU may lack a package of the dev extra that another test needs.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rf", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", FEW if options.small else "tests"]  # fmt: skip
    done = run_command(command, cwd=ROOT)
    print(done.stdout[-20_000:])
    yield from read(done.stdout, done.returncode)


def read(output: str, returncode: int) -> Iterator[Finding]:
    """What pytest's ``output`` says. Raises RuntimeError unless every test that could be collected
    has passed or was skipped.
    """
    last = (output.strip().splitlines() or [""])[-1]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", last)}
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    left_out = re.findall(r"ERROR collecting (\S+)", output)
    errors = counts.get("error", 0) + counts.get("errors", 0) - len(left_out)
    yield Finding("passed", counts.get("passed", 0))
    yield Finding("skipped", counts.get("skipped", 0))
    yield Finding("failed", counts.get("failed", 0) + errors, data=failed)
    yield Finding("files left out", len(left_out), ", ".join(left_out))
    if returncode and (failed or errors or not left_out):
        raise RuntimeError(f"pytest ended with {returncode}: {last}")

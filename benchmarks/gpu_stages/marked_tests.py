"""Runs the tests marked `gpu`; the outcome of each test is recorded as soon as it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_stages.finding import Finding, Options

ROOT = Path(__file__).parents[2]
FEW = "tests/unit/learner/test_publisher.py"  # of which some are marked
OUTCOME = re.compile(r"(\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")
MOST_TEXT = 20_000  # characters of pytest's output that are recorded where a test failed


def run(options: Options) -> Iterator[Finding]:
    # A machine with a GPU may lack a package of the dev extra that another test needs.
    files = [FEW] if options.small else marked()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-rf", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", *files]  # fmt: skip
    yield from outcomes(command, ROOT)


def marked() -> list[str]:
    """The files with such tests: importing all others takes longer than running these tests."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(f.relative_to(ROOT)) for f in files if "pytest.mark.gpu" in f.read_text()]


def outcomes(command: list[str], cwd: Path) -> Iterator[Finding]:
    """The outcome of each test as soon as it ends, then the findings of `read`."""
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            lines.append(text)
            if outcome := OUTCOME.match(text):
                name, how = outcome.groups()
                yield Finding(name, "skipped" if how == "SKIPPED" else how == "PASSED")
    yield from read("".join(lines), process.returncode)


def read(output: str, returncode: int) -> Iterator[Finding]:
    """What pytest's ``output`` says. Raises RuntimeError unless every test that could be collected
    has passed or was skipped.
    """
    last = (output.strip().splitlines() or [""])[-1]
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", last)}
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    left_out = re.findall(r"ERROR collecting (\S+)", output)
    errors = counts.get("error", 0) + counts.get("errors", 0) - len(left_out)
    text = output[-MOST_TEXT:] if failed or errors else None
    yield Finding("passed", counts.get("passed", 0))
    yield Finding("skipped", counts.get("skipped", 0))
    yield Finding("failed", counts.get("failed", 0) + errors, data=text)
    yield Finding("files left out", len(left_out), ", ".join(left_out))
    if returncode and (failed or errors or not left_out):
        raise RuntimeError(f"pytest ended with {returncode}: {last}")

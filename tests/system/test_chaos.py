"""A few faults of benchmarks/chaos.py, always the same; `make chaos` has all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
FEW = ("--seed", "3", "--slack", "5", "--json")


def inject(*options: str) -> None:
    command = [sys.executable, str(CHAOS), *FEW, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failures"] == []
    assert found["faults"] == int(options[options.index("--faults") + 1])


@pytest.mark.slow
def test_run_over_zeromq_survives_kills_and_stops() -> None:
    kinds = ("kill:actor", "kill:connector", "kill:relay", "stop:actor", "stop:relay")
    inject("--topology", "zmq", "--faults", "6", *(f"--fault={kind}" for kind in kinds))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["bsp", "replay", "served", "hand"])
def test_run_survives_a_dozen_faults_of_all_kinds(topology: str) -> None:
    inject("--topology", topology, "--faults", "12")

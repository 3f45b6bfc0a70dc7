"""All cells of `examples/quickstart.ipynb`, and the stop button of a notebook."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from train_command import trained

pytestmark = pytest.mark.system

PATH = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[nbformat.NotebookNode], NotebookClient]:
    """Clients whose kernel is this interpreter, whatever kernels are installed, in a new folder."""
    kernel = tmp_path / "share" / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    resources = {"metadata": {"path": str(tmp_path)}}
    return lambda notebook: NotebookClient(
        notebook, timeout=50, kernel_name="python3", resources=resources
    )


def test_committed_notebook_has_no_outputs() -> None:
    cells = json.loads(PATH.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.timeout(120)
def test_the_notebook_runs_to_its_end(start: Callable[..., NotebookClient]) -> None:
    notebook = nbformat.read(PATH, as_version=4)  # type: ignore[no-untyped-call]
    start(notebook).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"^return [\d.]+ [\d,]+ steps/s$", printed, re.MULTILINE)
    played = re.search(r"^twenty episodes: ([\d.]+)$", printed, re.MULTILINE)
    assert played
    assert float(played[1]) >= 475
    assert "(64, 4) (64,)" in printed
    assert [output for output in outputs if "image/png" in output.get("data", {})] != []


CELL = """
import penstock
summary = penstock.train("cartpole", {"stop.return": None, "run.interval_s": 0.1}, run_dir="run")
print(summary.reason, summary.accounting.balanced)
"""


@pytest.mark.timeout(120)
def test_the_stop_button_ends_a_run_cleanly(
    tmp_path: Path, start: Callable[..., NotebookClient]
) -> None:
    cell = nbformat.v4.new_code_cell(CELL)  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=[cell])  # type: ignore[no-untyped-call]
    client = start(notebook)

    def press() -> None:
        ends_s = time.monotonic() + 40
        while not trained(tmp_path / "run") and time.monotonic() < ends_s:
            time.sleep(0.05)
        manager: Any = client.km
        asyncio.run(manager.interrupt_kernel())

    button = threading.Thread(target=press, daemon=True)
    button.start()
    client.execute()
    button.join()
    printed = "".join(output.get("text", "") for output in cell["outputs"])
    assert printed.splitlines()[-1] == "interrupted True"

"""Programs in Node, and files served to a browser, for tests of JavaScript."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WEB_GAME = ROOT / "examples" / "web_game"
LEAST_NODE = 20


def run_node(program: str, given: object = None, timeout_s: float = 60.0) -> Any:
    """Run a module in Node. ``given`` is its constant of this name.

    Returns what the program has printed, as JSON. Skips the test where there is no Node.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node: install nodejs 20 or newer")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.strip().removeprefix("v").partition(".")[0]) < LEAST_NODE:
        pytest.skip(f"Node {version.stdout.strip()} is older than {LEAST_NODE}")

    prologue = 'import fs from "node:fs"; const given = JSON.parse(fs.readFileSync(0, "utf8"));\n'
    done = subprocess.run(
        [node, "--input-type=module", "--eval", prologue + program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def npm_packages() -> Path:
    """The folder of the npm packages of the web game. Skips the test if it is not installed."""
    folder = WEB_GAME / "node_modules"
    if not (folder / "onnxruntime-web").is_dir():
        pytest.skip("no npm packages: make web")
    return folder


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder, as ``python -m http.server`` does. Yields the origin."""
    handler = partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _QuietHandler(SimpleHTTPRequestHandler):
    """Writes no line for each request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

"""How long an agent takes to decide in JavaScript: in ONNX Runtime, and at `penstock serve`.

    make web
    python benchmarks/javascript_latency.py --save

In Node and in a page of Chromium, for one row and for `BATCH` rows at once: by ONNX Runtime with
one thread (onnxruntime-node; onnxruntime-web as WebAssembly), and by clients/js/penstock.mjs over
loopback (TCP from Node, a WebSocket from the page). Times are of the wall clock, medians of blocks
of ten decisions, so the machine should be idle.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from common import compile_package, finish, parser
from watch_page import chromium

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "examples" / "web_game" / "node_modules"
AGENTS: dict[str, dict[str, Any]] = {
    "duel": {
        "file": ROOT / "examples" / "web_game" / "duel.safetensors",
        "observation": {"dtype": "float32", "shape": [8]},
        "blocks": 200,
    },
    "pong": {
        "file": ROOT / "docs" / "agents" / "pong.safetensors",
        "observation": {"dtype": "uint8", "shape": [4, 84, 84]},
        "blocks": 20,
    },
}
BATCH = 64

IN_NODE = """
import fs from "node:fs";
import { createRequire } from "node:module";
const given = JSON.parse(fs.readFileSync(0, "utf8"));
const { ofRuntime, ofService } = await import(given.benchmark);
const ort = createRequire(given.packages)("onnxruntime-node");
const found = [];
for (const ask of given.asks) found.push({
  runtime: await ofRuntime(ort, given.model, ask),
  service: await ofService(await import(given.client), given.url, ask),
});
console.log(JSON.stringify(found));
"""
IN_PAGE = """async (given) => {
  const { ofRuntime, ofService } = await import("/benchmark.mjs");
  const ort = await import("/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1;
  const found = [];
  for (const ask of given.asks) found.push({
    runtime: await ofRuntime(ort, given.model, ask),
    service: await ofService(await import("/penstock.mjs"), given.url, ask),
  });
  return found;
}"""


def main() -> None:
    """Measure both agents in both places."""
    arguments = parser(__doc__)
    args = arguments.parse_args()
    if not PACKAGES.is_dir() or shutil.which("node") is None:
        raise SystemExit("this needs Node 20 or newer and the packages of the web game; make web")
    compile_package()

    measured: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "node_modules").symlink_to(PACKAGES)
        (folder / "index.html").write_text("<!doctype html><title>Latency</title>")
        shutil.copy(ROOT / "benchmarks" / "javascript_latency.mjs", folder / "benchmark.mjs")
        shutil.copy(ROOT / "clients" / "js" / "penstock.mjs", folder)
        origin = stack.enter_context(served(folder))
        browser = stack.enter_context(chromium())
        for name, agent in AGENTS.items():
            measured[name] = _measure(name, agent, folder, origin, browser)

    heading = ["agent", "where", "one row ms", f"{BATCH} rows ms"]
    rows = [
        [name, f"{place}, {way}", *(figures[way] for figures in found)]
        for name, places in measured.items()
        for place, found in places.items()
        for way in ("runtime", "service")
    ]
    finish("javascript_latency", {"batch": BATCH, "agents": measured}, [heading, *rows], args)


def _measure(
    name: str, agent: dict[str, Any], folder: Path, origin: str, browser: Any
) -> dict[str, list[dict[str, float]]]:
    """Returns the medians of one agent: by place, for one row and for a batch."""
    model = folder / f"{name}.onnx"
    export = [sys.executable, "-m", "penstock", "export", agent["file"], model]
    subprocess.run(export, check=True, stdout=sys.stderr)
    asks = [
        {**agent["observation"], "rows": rows, "blocks": max(agent["blocks"] // rows, 5)}
        for rows in (1, BATCH)
    ]
    with service_of(agent["file"], origin) as address:
        given = {
            "benchmark": (folder / "benchmark.mjs").as_uri(),
            "client": (folder / "penstock.mjs").as_uri(),
            "packages": str(PACKAGES.parent / "package.json"),
            "model": str(model),
            "url": f"tcp://{address}",
            "asks": asks,
        }
        done = subprocess.run(
            ["node", "--input-type=module", "--eval", IN_NODE],
            input=json.dumps(given),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        page = browser.new_page()
        page.goto(origin)
        asked = {"model": f"/{model.name}", "url": f"ws://{address}/play", "asks": asks}
        in_page = page.evaluate(IN_PAGE, asked)
        page.close()
    return {"Node": json.loads(done.stdout), "page": in_page}


@contextmanager
def service_of(agent: Path, origin: str) -> Iterator[str]:
    """Run `penstock serve` for pages of an origin. Yields its host and port."""
    command = [sys.executable, "-m", "penstock", "serve", str(agent), "--greedy", "--port", "0"]
    service = subprocess.Popen(
        [*command, "--origin", origin, "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert service.stdout is not None
        address = json.loads(service.stdout.readline())["address"]
        yield address.removeprefix("http://").rstrip("/")
    finally:
        service.terminate()
        service.communicate()


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the files of a folder. Yields the origin."""
    handler = partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    """Writes no line for each request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    main()

"""Exported policies in ONNX Runtime for Node and, as WebAssembly, in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chromium import chromium
from javascript import ROOT, npm_packages, run_node, served

pytest.importorskip("onnxscript")

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

CASES = ROOT / "tests" / "onnx_cases.mjs"

IN_NODE = """
import { createRequire } from "node:module";
const { compare } = await import(given.compare);
const ort = createRequire(given.packages)("onnxruntime-node");
const found = {};
for (const [cell, folder] of Object.entries(given.cells)) {
  const cases = JSON.parse(fs.readFileSync(`${folder}/cases.json`, "utf8"));
  found[cell] = await compare(ort, fs.readFileSync(`${folder}/policy.onnx`), cases);
}
console.log(JSON.stringify(found));
"""

IN_PAGE = """async (cells) => {
  const { compare } = await import("/onnx_cases.mjs");
  const ort = await import("/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs");
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = `${location.origin}/node_modules/onnxruntime-web/dist/`;
  const found = {};
  for (const cell of cells) {
    const cases = await (await fetch(`/${cell}/cases.json`)).json();
    const model = new Uint8Array(await (await fetch(`/${cell}/policy.onnx`)).arrayBuffer());
    found[cell] = await compare(ort, model, cases);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with three policies and their cases, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("cells")
    program = [sys.executable, str(ROOT / "tests" / "onnx_cells.py"), str(folder)]
    subprocess.run(program, check=True, timeout=200, cwd=ROOT)
    assert len(_names(folder)) == 3
    return folder


def test_node_computes_what_penstock_computes(cells: Path) -> None:
    packages = npm_packages().parent / "package.json"
    given = {
        "compare": CASES.as_uri(),
        "packages": str(packages),
        "cells": {name: str(cells / name) for name in _names(cells)},
    }
    _assert_equal(run_node(IN_NODE, given), cells)


def test_a_browser_computes_what_penstock_computes(cells: Path, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(npm_packages())
    (tmp_path / CASES.name).symlink_to(CASES)
    (tmp_path / "index.html").write_text("<!doctype html><title>ONNX</title>")
    for name in _names(cells):
        (tmp_path / name).symlink_to(cells / name)
    with served(tmp_path) as origin, chromium() as browser:
        page = browser.new_page()
        page.goto(origin)
        _assert_equal(page.evaluate(IN_PAGE, _names(cells)), cells)


def test_another_policy_computes_something_else(cells: Path, tmp_path: Path) -> None:
    """The comparison notices: with a value changed by 1e-4 it fails."""
    name = _names(cells)[0]
    (tmp_path / "policy.onnx").symlink_to(cells / name / "policy.onnx")
    cases = json.loads((cells / name / "cases.json").read_text())
    outputs: dict[str, Any] = cases[-1]["outputs"]
    values = next(array["data"] for array in outputs.values() if array["dtype"] == "float32")
    values[-1] += 1e-4 * max(1.0, abs(values[-1]))
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    given = {
        "compare": CASES.as_uri(),
        "packages": str(npm_packages().parent / "package.json"),
        "cells": {"changed": str(tmp_path)},
    }
    assert run_node(IN_NODE, given)["changed"]["excess"] > 0


def _names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/policy.onnx"))


def _assert_equal(found: dict[str, dict[str, float]], folder: Path) -> None:
    assert sorted(found) == _names(folder)
    for cell, figures in found.items():
        assert figures["values"] > 10, cell
        assert figures["excess"] <= 0, cell

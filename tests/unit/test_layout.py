"""The import name, its links, and which modules importing a package may load."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS: dict[str, Any] = PYPROJECT["tool"]["setuptools"]
ROOMS = sorted(
    init.parent.name for init in ROOT.glob("*/__init__.py") if init.parent.name != "penstock"
)
NEED_AN_EXTRA = tuple(f"penstock.envs.games.{game}" for game in ("car_racing", "doom", "minatar"))
IMPORTED_BY_NAME = "penstock.replay.remote"  # replay over the network needs zmq
HEAVY = ("numpy", "torch", "zmq")


def folders_on_disk() -> dict[str, str]:
    """Every folder that is a Python package, by its import name."""
    found = {"penstock": "penstock"}
    for room in ROOMS:
        for init in (ROOT / room).rglob("__init__.py"):
            folder = init.parent.relative_to(ROOT).as_posix()
            found["penstock." + folder.replace("/", ".")] = folder
    return found


def python_files() -> Iterator[Path]:
    for top in (*ROOMS, "penstock", "tests", "benchmarks", "examples"):
        yield from (ROOT / top).rglob("*.py")


def test_penstock_links_to_every_package_and_to_nothing_else() -> None:
    links = {
        path.name: os.readlink(path) for path in (ROOT / "penstock").iterdir() if path.is_symlink()
    }
    assert links == {room: f"../{room}" for room in ROOMS}


def test_penstock_contains_only_links() -> None:
    entries = {path.name for path in (ROOT / "penstock").iterdir() if not path.is_symlink()}
    assert entries - {"__pycache__"} == {"__init__.py", "__main__.py", "py.typed"}


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_pyproject_lists_the_packages_on_disk() -> None:
    assert SETUPTOOLS["package-dir"] == folders_on_disk()
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders_on_disk())


def test_every_package_is_a_layer_and_its_bare_name_is_banned() -> None:
    layers = PYPROJECT["tool"]["importlinter"]["contracts"][0]["layers"]
    layered = [name for layer in layers for name in re.split(r" [|:] ", layer)]
    assert sorted(layered) == [f"penstock.{room}" for room in ROOMS]
    assert set(PYPROJECT["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(ROOMS)


def imported_names(path: Path) -> Iterator[str]:
    """Names of imported modules; a relative import starts with its dots."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_packages_are_imported_only_through_penstock() -> None:
    bare = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files()
        for name in imported_names(path)
        if name.split(".")[0] in {*ROOMS, ""}
    ]
    assert bare == []


def modules() -> dict[str, Path]:
    """Every file of the rooms, by its import name."""
    files = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    return {"penstock." + name.removesuffix(".__init__"): path for path, name in names.items()}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions and for type checkers alone count, too."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        graph[module] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module] |= {name if name in files else node.module for name in names}
        graph[module] &= files.keys() - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_a_class_name_exists_once() -> None:
    """`Config`, nested in what it configures, may exist in several places."""
    homes: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


@pytest.mark.parametrize("package", SETUPTOOLS["packages"])
def test_every_package_imports_through_its_link(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve().parent == ROOT / folders_on_disk()[package]


def modules_of(name: str) -> Iterator[str]:
    """A module; or with ".*" all of a package that needs no extra and is not apart from it."""
    package = name.removesuffix(".*")
    yield package
    folder = ROOT / folders_on_disk()[package]
    for path in sorted(folder.rglob("*.py")) if name != package else ():
        inner = path.relative_to(folder).with_suffix("").parts
        module = ".".join([package, *(part for part in inner if part != "__init__")])
        if not module.startswith((IMPORTED_BY_NAME, *NEED_AN_EXTRA)):
            yield module


@pytest.fixture(scope="module")
def heavy_after() -> dict[str, list[str]]:
    """Which of HEAVY are loaded after each import, in this order, in one fresh interpreter."""
    script = f"""
import importlib, json, sys
loaded = {{}}
for name, modules in json.loads(sys.argv[1]).items():
    for module in modules:
        importlib.import_module(module)
    loaded[name] = [heavy for heavy in {HEAVY} if heavy in sys.modules]
print(json.dumps(loaded))
"""
    names = ["penstock", "penstock.configs.*", "penstock.core.*", "penstock.transport.shm.*",
             "penstock.replay.*", "penstock.envs.*", "penstock.transport"]  # fmt: skip
    modules = json.dumps({name: list(modules_of(name)) for name in names})
    done = subprocess.run(
        [sys.executable, "-c", script, modules], stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, list[str]] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", ["penstock", "penstock.configs.*"])
def test_configs_import_without_numpy_torch_and_zmq(
    name: str, heavy_after: dict[str, list[str]]
) -> None:
    assert heavy_after[name] == []


@pytest.mark.parametrize(
    "name",
    ["penstock.core.*", "penstock.transport.shm.*", "penstock.replay.*", "penstock.envs.*",
     "penstock.transport"],
)  # fmt: skip
def test_modules_for_samples_import_neither_torch_nor_zmq(
    name: str, heavy_after: dict[str, list[str]]
) -> None:
    assert set(heavy_after[name]) <= {"numpy"}

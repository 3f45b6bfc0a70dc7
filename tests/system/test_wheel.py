"""A wheel, built through the source archive: what it holds, and that it works elsewhere."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SETUPTOOLS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "setuptools"
]
IMPORT_EVERYTHING = """
import importlib, json, pkgutil, penstock
names = ["penstock", *(m.name for m in pkgutil.walk_packages(penstock.__path__, "penstock."))]
need_an_extra = [f"penstock.envs.games.{game}" for game in ("car_racing", "doom", "minatar")]
names = [name for name in names if name not in need_an_extra]
print(json.dumps({name: importlib.import_module(name).__file__ for name in names}))
"""

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path) -> str:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def modules_in_checkout() -> set[str]:
    """Paths of all modules as they should lie in the wheel."""
    found = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        for module in (ROOT / folder).glob("*.py"):
            found.add(f"{package.replace('.', '/')}/{module.name}")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_each_module_is_in_the_wheel_once_under_the_import_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = Counter(archive.namelist())
    assert max(names.values()) == 1
    assert {name for name in names if name.endswith(".py")} == modules_in_checkout()
    assert {name.split("/")[0] for name in names} == {
        "penstock",
        wheel.name[: wheel.name.index("-py3")] + ".dist-info",
    }


def test_the_wheel_holds_regular_files_with_data_and_the_typing_mark(
    wheel: Path,
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert [
        entry.filename for entry in entries if not stat.S_ISREG(entry.external_attr >> 16)
    ] == []
    presets = {f"penstock/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert presets
    page = {f"penstock/watch/static/{path.name}" for path in (ROOT / "watch/static").iterdir()}
    assert len(page) > 5
    others = {*page, "penstock/py.typed"}
    assert {*others, *presets} <= {entry.filename for entry in entries}


def test_installed_wheel_imports_every_module_and_runs_its_command(
    wheel: Path, tmp_path: Path
) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python, site = home / "bin" / "python", next(home.glob("lib/python*/site-packages"))
    run(sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps",
        "--no-index", wheel, cwd=tmp_path)  # fmt: skip
    # The libraries are borrowed from this environment. Its .pth files are not read there, and so an
    # editable install of the checkout is not seen.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    files = json.loads(run(python, "-c", IMPORT_EVERYTHING, cwd=tmp_path))
    imported = {str(Path(file).relative_to(site)) for file in files.values()}
    left_out = {f"penstock/envs/games/{game}.py" for game in ("car_racing", "doom", "minatar")}
    assert imported == modules_in_checkout() - left_out
    assert "train" in run(home / "bin" / "penstock", "--help", cwd=tmp_path)

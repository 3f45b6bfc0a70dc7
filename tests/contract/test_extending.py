"""The code of docs/extending/ works as it is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pages import DOCS, with_pages

CASES = Path(__file__).with_name("extending_cases.py")


def test_copy_of_penstock_with_the_code_of_all_pages_passes_the_cases(tmp_path: Path) -> None:
    pages = sorted((DOCS / "extending").glob("*.md"))
    penstock = with_pages(pages, tmp_path)
    options = ("-q", "-x", "-p", "no:cacheprovider", "-c", DOCS.parent / "pyproject.toml")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, CASES],
        cwd=penstock,
        env=os.environ | {"PYTHONPATH": str(penstock)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr

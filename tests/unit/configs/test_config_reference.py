"""docs/configuration.md matches the schema."""

from __future__ import annotations

import subprocess
import sys
from itertools import chain
from pathlib import Path

from penstock.configs.keys import algorithms, options, sections
from penstock.configs.reference import reference

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "configuration.md"


def check(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock.configs.reference", "--check", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_configuration_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), (
        "run: python -m penstock.configs.reference > docs/configuration.md"
    )


def test_configuration_page_has_a_row_for_every_option() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    named = [row.split("`")[1] for row in rows]
    others = [list(options(name)) for name in algorithms()]
    algo = [[name for name in other if name.startswith("algo.")] for other in others]
    first = others[0].index("algo.name")
    rest = others[0][first + len(algo[0]) :]
    assert [name for name in named if "." in name] == [*others[0][:first], *chain(*algo), *rest]
    assert all(row.count("|") - row.count("\\|") == 5 for row in rows)
    assert [line[3:] for line in reference().splitlines() if line.startswith("## ")] == list(
        sections()
    )


def test_check_fails_for_an_outdated_page(tmp_path: Path) -> None:
    assert check(PAGE).returncode == 0
    old = tmp_path / "old.md"
    for text in (None, "something else"):
        if text:
            old.write_text(text)
        done = check(old)
        assert done.returncode == 1
        assert done.stderr == (
            f"{old} differs from the schema; run: python -m penstock.configs.reference > {old}\n"
        )

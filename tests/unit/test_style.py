"""Texts are plain technical English, and every public class and function has a docstring.

Checked are docstrings, other texts in the code (help, config fields, messages) and the pages of
`docs/`. `style_counts.txt` lists how many places of each folder were not yet rewritten. The counts
can only be lowered: where a folder has fewer, the test fails until its line is updated by

    python tests/unit/test_style.py > tests/unit/style_counts.txt
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COUNTS = Path(__file__).with_name("style_counts.txt")
ROOMS = (
    *("actors", "algos", "bench", "cli", "configs", "core", "device", "envs", "evaluation"),
    *("launch", "learner", "models", "monitor", "profiling", "replay", "transport"),
    "watch",
)
TURNS = re.compile(
    r"\b(who|whom|whoever|nobody|anybody|somebody|told|tells|said|heard|hears"
    r"|what (it|they) (has|have|is|are|was|were)|goes? on|(is|are) there|(what|that) comes?"
    r"|borne|mend|by itself|of one's own|all the same|for (a|the) person)\b",
    re.IGNORECASE,
)
CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`", re.DOTALL)  # in pages, and in docstrings


def modules(room: str) -> Iterator[Path]:
    yield from sorted((ROOT / room).rglob("*.py"))


def turns(text: str) -> int:
    """How many of the avoided turns a text has, code apart."""
    return len(TURNS.findall(CODE.sub("", text)))


def texts(source: str) -> Iterator[str]:
    """The docstrings and all other texts of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def without_docstring(source: str) -> list[str]:
    """The public classes and functions of a module that have no docstring. Methods are not
    checked: many implement a method that a Protocol describes. Nor are overloads: the function that
    follows them has the docstring."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and not any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
    ]


def count(folder: str) -> Counter[str]:
    """Places of a folder by kind: "turns" and "undocumented"."""
    found: Counter[str] = Counter()
    if folder == "docs":
        for page in [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]:
            found["turns"] += turns(page.read_text(encoding="utf-8"))
        return found
    for path in modules(folder):
        source = path.read_text(encoding="utf-8")
        found["turns"] += sum(map(turns, texts(source)))
        if not path.name.startswith("_"):
            found["undocumented"] += len(without_docstring(source))
    if folder == "configs":
        found["turns"] += sum(turns(path.read_text()) for path in (ROOT / folder).glob("*.yaml"))
    return found


def counts() -> Iterator[str]:
    """The lines of `style_counts.txt`: folder, kind, count."""
    for folder in (*ROOMS, "docs"):
        for kind, number in sorted(count(folder).items()):
            if number:
                yield f"{folder} {kind} {number}"


def allowed() -> dict[tuple[str, str], int]:
    lines = (line.split() for line in COUNTS.read_text().splitlines())
    return {(folder, kind): int(number) for folder, kind, number in lines}


@pytest.mark.parametrize("folder", [*ROOMS, "docs"])
def test_no_folder_gets_more_places_that_are_not_plain(folder: str) -> None:
    found, known = count(folder), allowed()
    for kind in ("turns", "undocumented"):
        most = known.get((folder, kind), 0)
        assert found[kind] <= most, (
            f"{folder} has {found[kind]} {kind}, and {most} are allowed; write new texts in plain "
            "terms, see tests/unit/test_style.py"
        )
        assert found[kind] == most, (
            f"{folder} has {found[kind]} {kind}, fewer than the {most} of {COUNTS.name}; lower it: "
            "python tests/unit/test_style.py > tests/unit/style_counts.txt"
        )


def test_every_room_is_checked() -> None:
    assert {path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()} == {*ROOMS}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The rank that waits in a collective is released.", 0),
        ("Nobody waits for whom the dead have told.", 3),
        ("`who` is code, and so are ``whom`` and ```nobody```.", 0),
        ("What it has goes on.", 2),
    ],
)
def test_turns_are_counted(text: str, number: int) -> None:
    assert turns(text) == number


def test_public_names_without_a_docstring_are_found() -> None:
    source = 'class A:\n    "Documented."\n\nclass B: ...\n\ndef _c(): ...\n\ndef d(): ...\n'
    source += "@overload\ndef e(): ...\n"
    assert without_docstring(source) == ["B", "d"]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in counts()))

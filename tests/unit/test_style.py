"""Every public class and function has a docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink())


def without_docstring(source: str) -> list[str]:
    """Names of the public classes and functions of a module that have no docstring.

    Methods are not checked: many implement a method that a Protocol describes. Nor are overloads:
    the function that follows them has the docstring.
    """
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and not any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_docstring(room: str) -> None:
    undocumented = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        if not path.name.startswith("_")
        for name in without_docstring(path.read_text(encoding="utf-8"))
    ]

    assert undocumented == []


def test_public_names_without_a_docstring_are_found() -> None:
    source = 'class A:\n    "Documented."\n\nclass B: ...\n\ndef _c(): ...\n\ndef d(): ...\n'
    source += "@overload\ndef e(): ...\n"

    assert without_docstring(source) == ["B", "d"]

"""The code in the pages of docs/."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def code(page: str, language: str, number: int) -> str:
    """Returns a code block of a page, counted from 0."""
    return blocks(page, language)[number]


def blocks(page: str, language: str) -> list[str]:
    """Returns all code blocks of a page in this language."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [str(found[1]) for found in pattern.finditer((DOCS / page).read_text())]


def with_pages(pages: Iterable[Path], folder: Path) -> Path:
    """A copy of Penstock with the Python blocks of pages, as a reader has it who follows them.

    Returns the folder that contains the package.

    The first line of a block names its file. A block that continues a class (``...``) adds fields
    to it, any other one goes to the end of the file; a file that does not exist is made.
    """
    penstock = folder / "penstock"
    shutil.copytree(DOCS.parent / "penstock", penstock / "penstock", symlinks=True)
    for room in (DOCS.parent / "penstock").iterdir():
        if room.is_symlink():
            shutil.copytree(room, penstock / room.name)
    for page in pages:
        for block in blocks(str(page), "python"):
            path, _, code = block.removeprefix("# ").partition("\n")
            file = penstock / path
            file.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text() if file.exists() else ""
            head, continues, fields = code.partition(":\n    ...\n")
            file.write_text(_with_fields(text, head, fields) if continues else text + code)
    return penstock


def _with_fields(text: str, head: str, fields: str) -> str:
    """The text of a module with more fields of the class that begins with ``head``."""
    lines = text.splitlines(keepends=True)
    at = lines.index(f"{head}:\n")
    methods = (n for n in range(at, len(lines)) if lines[n].startswith(("    @", "    def ")))
    ends = (n for n in range(at + 1, len(lines)) if lines[n].strip() and lines[n][0] != " ")
    end = min(next(methods, len(lines)), next(ends, len(lines)))
    while not lines[end - 1].strip():
        end -= 1
    return "".join([*lines[:end], fields, *lines[end:]])

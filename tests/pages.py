"""The code in the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def code(page: str, language: str, number: int) -> str:
    """A page's block of code, counted from 0."""
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [str(found[1]) for found in pattern.finditer((DOCS / page).read_text())][number]

"""The code in the pages of docs/."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[1] / "docs"


def code(page: str, language: str, number: int) -> str:
    """A page's block of code, counted from 0."""
    return blocks(page, language)[number]


def blocks(page: str, language: str) -> list[str]:
    pattern = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [str(found[1]) for found in pattern.finditer((DOCS / page).read_text())]


@contextmanager
def added(page: str, folder: Path) -> Iterator[dict[str, ModuleType]]:
    """Penstock with the Python blocks of a page, by module.

    The first line of a block names its file. A file that exists is extended by the block, as the
    page says; a new one becomes a module, written below ``folder``.
    """
    found: dict[str, ModuleType] = {}
    extended: list[tuple[ModuleType, set[str]]] = []
    try:
        for block in blocks(page, "python"):
            path = block.partition("\n")[0].removeprefix("# ")
            name = (
                f"penstock.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
            )
            if (DOCS.parent / path).exists():
                module = import_module(name)
                extended.append((module, set(vars(module))))
                exec(compile(block, f"docs/{page}", "exec"), vars(module))
                continue
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block)
            spec = spec_from_file_location(name, file)
            assert spec is not None, path
            assert spec.loader is not None, path
            sys.modules[name] = found[name] = module_from_spec(spec)
            spec.loader.exec_module(found[name])
        yield found
    finally:
        for name in found:
            sys.modules.pop(name)
        for module, names in extended:
            for new in set(vars(module)) - names:
                delattr(module, new)

"""The base class of all sections of a config."""

from __future__ import annotations

import sys
from functools import cache
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict


class Contradiction(NamedTuple):
    """An invalid combination of options: their dotted names, and a sentence with the remedy."""

    keys: tuple[str, ...]
    text: str


class Section(BaseModel):
    """Base of a section: immutable, refuses unknown keys, is serialised under the user's names."""

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)


def description(kind: type[Section], attribute: str) -> str:
    """The docstring of an option; empty if it has none.

    It is read from the source only here: pydantic's ``use_attribute_docstrings`` reads those of all
    options in every process, which takes a third of the time of the schema.
    """
    for base in kind.__mro__:
        if text := _docstrings(base.__module__).get((base.__qualname__, attribute)):
            return text
    return ""


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """The docstrings of attributes in a module, by the name of the class and of the attribute."""
    import ast
    import inspect

    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # it has no source
        return {}
    found: dict[tuple[str, str], str] = {}
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for field, after in zip(kind.body, kind.body[1:], strict=False):
            match field, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=attribute)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[kind.name, attribute] = inspect.cleandoc(text)
    return found

"""The base class of all sections of a config."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


def no_contradictions(section: Section) -> Iterator[Contradiction]:
    """Yields nothing: the check of options that go together with any others."""
    return iter(())


def description(kind: type[Section], attribute: str) -> str:
    """Returns the docstring of an option, or the description of its field; empty without either.

    It is read from the source, and only by commands that show it. With pydantic's
    ``use_attribute_docstrings`` every process would read those of all options when it imports the
    schema, which then takes 30 ms more than its 75.
    """
    for base in kind.__mro__:
        if text := _docstrings(base.__module__).get((base.__qualname__, attribute)):
            return text
    return kind.model_fields[attribute].description or ""


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Returns the docstrings of attributes, by the class's qualified name and the attribute.

    Empty for a ``module`` without source.
    """
    import ast
    import inspect

    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError):  # the module has no source
        return {}
    docstrings: dict[tuple[str, str], str] = {}

    def visit(body: list[ast.stmt], outer: str) -> None:
        """Collect the docstrings in a body; ``outer`` is its qualified name with a dot."""
        # A text below an attribute is its docstring, so each statement is seen with the next one.
        for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
            match statement, following:
                case ast.ClassDef(name=name), _:
                    visit(statement.body, f"{outer}{name}.")
                case ast.FunctionDef(name=name), _:
                    visit(statement.body, f"{outer}{name}.<locals>.")
                case (
                    ast.AnnAssign(target=ast.Name(id=attribute)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docstrings[outer[:-1], attribute] = inspect.cleandoc(text)

    visit(tree.body, "")
    return docstrings

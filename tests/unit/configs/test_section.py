"""Descriptions of options, which are read from the source of their section."""

from __future__ import annotations

from pydantic import Field

from penstock.configs.section import Section, description


class Outer(Section):
    """A section with another one inside it."""

    class Inner(Section):
        """The inner section."""

        size: int = 1
        """Inner size."""

    size: int = 2
    """Outer size."""
    colour: str = Field("red", description="Described by its field.")
    plain: int = 3


def test_an_option_is_described_by_the_docstring_of_its_own_class() -> None:
    assert description(Outer, "size") == "Outer size."
    assert description(Outer.Inner, "size") == "Inner size."


def test_an_option_without_a_docstring_is_described_by_its_field() -> None:
    assert description(Outer, "colour") == "Described by its field."
    assert description(Outer, "plain") == ""

"""The base class of all sections of a config."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict


class Contradiction(NamedTuple):
    """An invalid combination of options: their dotted names, and a sentence with the remedy."""

    keys: tuple[str, ...]
    text: str


class Section(BaseModel):
    """Base of a section: immutable, refuses unknown keys, is serialised under the user's names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True
    )

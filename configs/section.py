"""What all sections of a config have in common."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict


class Contradiction(NamedTuple):
    """A sentence, and the dotted names of the options that it is about."""

    keys: tuple[str, ...]
    text: str


class Section(BaseModel):
    """Frozen, without unknown keys, written out under the names that a user writes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, serialize_by_alias=True
    )

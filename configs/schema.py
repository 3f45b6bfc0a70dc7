"""The config of a run: all sections, and the checks of their combinations."""

from __future__ import annotations

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from penstock.configs.cross_checks import contradictions
from penstock.configs.sections import Sections


class Config(Sections):
    """The config of a run, checked as a whole."""

    @model_validator(mode="after")
    def _without_contradictions(self) -> Config:
        if found := contradictions(self):
            text = "; ".join(c.text for c in found)
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "found": found})
        return self

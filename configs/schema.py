"""The config of a run: all sections, and the checks of their combinations."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from penstock.configs.cross_checks import contradictions
from penstock.configs.sections import Sections


class Config(Sections):
    """The config of a run, whose options go together.

    With `ALONE` in pydantic's context each section is checked alone, and not their combination.
    """

    ALONE: ClassVar = "sections alone"

    @model_validator(mode="after")
    def _without_contradictions(self, info: ValidationInfo) -> Config:
        """Returns the config. Raises an error of the type `contradiction`, for `messages`."""
        if info.context and self.ALONE in info.context:
            return self

        invalid = contradictions(self)
        if invalid:
            text = "; ".join(contradiction.text for contradiction in invalid)
            context = {"text": text, "contradictions": invalid}
            raise PydanticCustomError("contradiction", "{text}", context)
        return self

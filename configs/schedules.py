"""Options whose value may change during a run: a number, or a schedule by agent steps.

`Rate`, `Clip`, `Chance` and `Weight` are the types of such options. A trainer takes a section
`over_run` at its start, and then reads present values: `value_at` of one, `with_values` of a whole
section.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from penstock.configs.section import Section
from penstock.configs.value_types import (
    Count,
    Fraction,
    NotNegative,
    Part,
    Positive,
    ValueDescription,
)


class LinearSchedule(Section):
    """A value that changes linearly from ``from`` to ``to`` over ``steps``, and then stays.

    The steps are the agent steps on which all learners have trained, so that a schedule is equal
    on every learner and continues after a resume.
    """

    from_: NotNegative = Field(alias="from")
    to: NotNegative
    steps: Count | None = Field(
        None,
        description="null: `stop.env_steps`, and if that is null too, the value stays at ``from``.",
    )

    def at(self, trained_steps: int) -> float:
        """Returns the value after ``trained_steps`` agent steps."""
        progress = min(trained_steps / self.steps, 1.0) if self.steps else 0.0
        return self.from_ + (self.to - self.from_) * progress


def _schedule(value: Any) -> Any:
    """Make a schedule of a map, and return other values unchanged.

    Errors of the schedule are those of the whole option.
    """
    if not isinstance(value, dict):
        return value
    try:
        return LinearSchedule.model_validate(value)
    except ValidationError as error:
        raise ValueError(f"{value} is not a schedule") from error


def _from_above_zero(value: float | LinearSchedule) -> float | LinearSchedule:
    """Returns the value of an option. Raises ValueError for a schedule that begins at 0."""
    if isinstance(value, LinearSchedule) and value.from_ == 0:
        raise ValueError("the schedule begins at 0")
    return value


def _below_one(value: float | LinearSchedule) -> float | LinearSchedule:
    """Returns the value of an option. Raises ValueError for a schedule that reaches 1."""
    if isinstance(value, LinearSchedule) and max(value.from_, value.to) >= 1:
        raise ValueError("the schedule reaches 1")
    return _from_above_zero(value)


def _up_to_one(value: float | LinearSchedule) -> float | LinearSchedule:
    """Returns the value of an option. Raises ValueError for a schedule that is above 1."""
    if isinstance(value, LinearSchedule) and max(value.from_, value.to) > 1:
        raise ValueError("the schedule is above 1")
    return value


_FORM = "or a schedule {from: A, to: B, steps: N}"
Rate = Annotated[
    Positive | LinearSchedule,
    BeforeValidator(_schedule),
    AfterValidator(_from_above_zero),
    ValueDescription(f"a number above 0 {_FORM}"),
]
Clip = Annotated[
    Part | LinearSchedule,
    BeforeValidator(_schedule),
    AfterValidator(_below_one),
    ValueDescription(f"a number above 0 and below 1 {_FORM}"),
]
Chance = Annotated[
    Fraction | LinearSchedule,
    BeforeValidator(_schedule),
    AfterValidator(_up_to_one),
    ValueDescription(f"a number from 0 to 1 {_FORM}"),
]
Weight = Annotated[
    NotNegative | LinearSchedule,
    BeforeValidator(_schedule),
    ValueDescription(f"a number of at least 0 {_FORM}"),
]

S = TypeVar("S", bound=Section)


def value_at(value: float | LinearSchedule, trained_steps: int) -> float:
    """Returns the value of an option after ``trained_steps`` agent steps."""
    return value.at(trained_steps) if isinstance(value, LinearSchedule) else value


def constant(value: float | LinearSchedule) -> float:
    """Returns a number of a section of `with_values`, which holds no schedule."""
    assert not isinstance(value, LinearSchedule), value
    return value


def schedules(section: Section) -> dict[str, LinearSchedule]:
    """Returns the options of a section that are schedules, by their attributes."""
    return {name: value for name, value in section if isinstance(value, LinearSchedule)}


def over_run(section: S, total: int | None) -> S:
    """Returns a section in which each schedule without a length has the length ``total``.

    ``total`` is `stop.env_steps`. The config itself keeps null, since a resumed run may have
    another limit.
    """
    endless = {
        name: schedule for name, schedule in schedules(section).items() if schedule.steps is None
    }
    return section.model_copy(
        update={
            name: schedule.model_copy(update={"steps": total}) for name, schedule in endless.items()
        }
    )


def with_values(section: S, trained_steps: int) -> S:
    """Returns a section with the value of each schedule after ``trained_steps`` agent steps."""
    values = {name: schedule.at(trained_steps) for name, schedule in schedules(section).items()}
    return section.model_copy(update=values)

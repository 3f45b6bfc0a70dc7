"""The options of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.configs.algorithms import Q_TEMPERATURE, OnPolicyConfig, Teaching
from penstock.configs.section import Contradiction
from penstock.configs.value_types import (
    Folder,
    NotNegative,
    Positive,
    Small,
    Text,
    ValueDescription,
)

Policies = Annotated[
    list[Folder],
    ValueDescription("a list of exported policies or folders of runs, such as [runs/first]"),
]


class DistillConfig(OnPolicyConfig):
    """Distillation: trained policies teach a student of any network, on the student's own play."""

    name: Literal["distill"] = "distill"
    teachers: Policies = Field(default_factory=list)
    """The policies that teach: files that `penstock export` wrote, and folders of runs, of which
    the best checkpoint teaches. Their environments have the same observations and actions as the
    student's. Only learners read them."""
    part: Text | None = None
    """The part of a `Dict` observation that tells which teacher an observation has: a `Discrete`,
    or one number for each teacher, of which the largest counts. The first teacher has choice 0.
    Teachers may have been trained without this part. null: the student learns the mean of the
    probabilities of all teachers."""
    q_temperature: Positive = Q_TEMPERATURE
    """What the Q-values of a teacher without probabilities (DQN) are divided by to be logits.
    Smaller values make the student surer of the best action."""
    value_cost: NotNegative = 0.5
    """Weight of the value loss in the loss. The values are those of the teachers, or where one of
    them has none the returns of the student. Larger values favour the value function over the
    policy where they share a network."""
    epochs: Small = 4
    """Passes over each batch. More passes use samples better."""

    learner_files: ClassVar[tuple[str, ...]] = ("teachers",)

    @property
    def passes(self) -> int:
        return self.epochs

    def by_steps(self, has_core: bool) -> bool:
        return not has_core

    @property
    def teaching(self) -> Teaching:
        return Teaching("algo.teachers", tuple(self.teachers), self.part, self.q_temperature)

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields the options that contradict each other, with the message for the user."""
        if not self.teachers:
            yield Contradiction(
                ("algo.teachers",),
                "algo.teachers names no policy, and algo.name distill learns from some; set "
                "algo.teachers=[FILE] to files that penstock export wrote or folders of runs",
            )
        if self.part is not None and len(self.teachers) == 1:
            yield Contradiction(
                ("algo.part", "algo.teachers"),
                f"algo.part {self.part} chooses among teachers, and algo.teachers has one; name "
                "more, or set algo.part=null",
            )

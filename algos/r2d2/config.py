"""The options of R2D2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from penstock.algos.dqn.config import QLearningConfig
from penstock.configs.section import Contradiction
from penstock.configs.value_types import Count, Large, Natural, Small


class R2d2Config(QLearningConfig):
    """R2D2: DQN for environments whose observations do not show the whole state. A recurrent
    network (`model.core`) learns from sequences in replay, each from the state that the actor had
    before it."""

    name: Literal["r2d2"] = "r2d2"
    n_step: Small = 5
    """Number of rewards summed in a target before it bootstraps from the target network (n-step
    return), fewer at the end of a sequence. Larger values carry rewards back faster, with more
    variance and more bias from actions of older policies."""
    target_every: Count = 2500
    """Optimizer steps between two updates of the target network. Larger values make the targets
    more stable and learning slower."""
    sequence_length: Large = 80
    """Steps of a sequence, with those of the burn-in. The gradient reaches back as far, so choose
    it longer than what must be remembered. An episode that is shorter is a sequence of its own.
    Longer sequences take longer to train on."""
    overlap: Natural = 40
    """Steps that neighbouring sequences of an episode share. With the value of `burn_in` each step
    is trained on in one sequence, and in two where the former began the episode."""
    burn_in: Natural = 40
    """First steps of a sequence, which only bring its stored state up to date with the present
    weights. A sequence that begins with its episode has no burn-in, as its state is 0. More make
    the states more accurate, and each sequence trains fewer steps."""

    @property
    def can_remember(self) -> bool:
        return True

    @property
    def must_remember(self) -> bool:
        return True

    def contradictions(self) -> Iterator[Contradiction]:
        """Yields the options that leave nothing of a sequence, or need single transitions."""
        if self.hindsight:
            yield Contradiction(
                ("algo.hindsight", "algo.name"),
                f"algo.hindsight {self.hindsight:g} replaces the goals of single transitions, and "
                "algo.name r2d2 draws sequences; set algo.hindsight=0 or algo.name=dqn",
            )

        for option, consequence in (
            ("overlap", "leaves no step between the starts of two sequences"),
            ("burn_in", "leaves no step to train on"),
        ):
            steps = getattr(self, option)
            if steps >= self.sequence_length:
                yield Contradiction(
                    (f"algo.{option}", "algo.sequence_length"),
                    f"algo.{option} {steps} {consequence} of algo.sequence_length "
                    f"{self.sequence_length}; set algo.{option}={self.sequence_length // 2}",
                )

"""The section `learner.nonfinite`: what a learner does about numbers that are not finite."""

from __future__ import annotations

from penstock.configs.section import Section
from penstock.configs.value_types import Count, Natural, Share


class NonFiniteConfig(Section):
    """What happens where a loss or a gradient is not finite (NaN or infinite). The update is
    skipped and counted: parameters, optimizer state and normalisers stay as they are."""

    max_in_row: Count = 10
    """Skipped updates in a row at which the learner goes back to its last good state: that of a
    checkpoint, or of the start."""
    lr_factor: Share = 0.5
    """What the learning rate is multiplied by each time it goes back. It stays so, also after a
    resume, until that sets another `learner.lr`."""
    max_rollbacks: Natural = 3
    """How often it may go back until the run ends, with `exit_reason` `diverged` and exit code 1.
    With a parameter server (`learner.pace`) it ends at once."""

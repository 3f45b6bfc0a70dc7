"""The section `replay`: what off-policy algorithms keep and how they draw from it."""

from __future__ import annotations

from penstock.configs.section import Section
from penstock.configs.value_types import Count, Fraction, Positive, Switch


class ReplayConfig(Section):
    """The memory that off-policy algorithms (`dqn`, `sac`) learn from; the others have none."""

    capacity: Count = 1_000_000
    """Agent steps kept; the oldest go first."""
    min_size: Count = 10_000
    """Agent steps that must be there before the first optimizer step."""
    batch_size: Count = 256
    """Transitions in one optimizer step."""
    samples_per_insert: Positive | None = 8.0
    """How often each agent step is sampled on average: whoever is ahead, actors or learner, waits.
    null: nobody waits."""
    prioritized: Switch = True
    """Whether surprising transitions are drawn more often (prioritised replay), or all alike."""
    alpha: Fraction = 0.6
    """Exponent of the priorities: 0 draws all alike, 1 in proportion."""
    beta: Fraction = 0.4
    """Exponent at the start of the importance weights that correct for it; 1 corrects in full."""
    beta_steps: Count | None = None
    """Optimizer steps over which `beta` rises linearly to 1; null: it stays."""
    checkpoint: Switch = False
    """Whether checkpoints hold the replay too, so that a resumed run goes on with what it had; else
    it begins with an empty one. Takes the replay's size on disk, twice while one is written; at the
    end of a run, `run.grace_s` must be long enough for that."""

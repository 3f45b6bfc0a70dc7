"""The policy lag that follows from the slots in use: what `transport.max_policy_lag` allows.

Lag is counted in optimizer steps, between the weights that play a slot and those with which the
learner begins to train on it. An actor reads weights when it begins a slot, after the slot was lent
to it. Until it is trained on, the learner takes the batches that are ahead of it: the one that it
trains on, `learner.prefetch` further ones, and those of the other slots that are lent or filled.
Before, weights may be some batches old, since they are published every `learner.publish_every`
steps. An actor that is slower than the others adds to this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.configs.sections import Sections


def updates_of_batch(cfg: Sections) -> int:
    """Optimizer steps that the learner takes with a batch."""
    return cfg.learner.updates_per_batch * cfg.algo.passes


def lag_of(cfg: Sections, slots: int) -> int:
    """The greatest lag, in optimizer steps, while at most ``slots`` slots are lent or filled."""
    learner = cfg.learner
    updates = updates_of_batch(cfg)
    published_every = -(-learner.publish_every // updates)  # batches
    ahead = learner.prefetch + (slots - 1) // learner.batch_slots
    return updates * (published_every + ahead)


def slots_within_lag(cfg: Sections) -> int:
    """The most slots that may be lent or filled within `transport.max_policy_lag`; at least those
    of a batch.
    """
    batch = cfg.learner.batch_slots
    left = cfg.transport.max_policy_lag - lag_of(cfg, batch)
    batches = 1 + max(0, left) // updates_of_batch(cfg)
    return batch * batches

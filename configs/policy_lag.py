"""The policy lag that follows from the slots in use: what `transport.max_policy_lag` allows.

Lag is counted in optimizer steps, between the weights that play a slot and those with which the
learner begins to train on it. An actor reads weights when it begins a slot, after the slot was lent
to it. These weights are up to `learner.publish_every` optimizer steps old, in whole batches. Until
the slot is trained on, the learner takes the batches that are ahead of it: `learner.prefetch`
batches, and those of the other slots that are lent or filled. An actor that is slower than the
others adds to this.

The number does not follow the measured lag: then one slow actor, or a peer that claims old weights,
would slow all others down.

A bound below the optimizer steps of a batch cannot be kept in this way. Then the slots of one batch
are lent at a time, when the batch before it has no more optimizer steps left than the bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.configs.sections import Sections


def updates_of_batch(cfg: Sections) -> int:
    """Returns the optimizer steps that the learner takes with a batch."""
    return cfg.learner.updates_per_batch * cfg.algo.passes


def lent_by_batch(cfg: Sections) -> bool:
    """Whether the store lends the slots of one batch at a time.

    It does where `transport.max_policy_lag` is below the optimizer steps of a batch; 0 is the
    synchronous mode.
    """
    has_fresh_data = cfg.algo.trains_on == "unrolls"
    return has_fresh_data and cfg.transport.max_policy_lag < updates_of_batch(cfg)


def batches_ahead(cfg: Sections) -> int:
    """Returns the batches that are gathered, or drawn from replay, ahead of the one in training.

    They are `learner.prefetch`, and none where slots are lent by batch, as the learner's thread
    then owns the store.
    """
    return 0 if lent_by_batch(cfg) else _prefetched(cfg)


def _prefetched(cfg: Sections) -> int:
    """Returns `learner.prefetch`, or its default for the algorithm."""
    if cfg.learner.prefetch is not None:
        return cfg.learner.prefetch
    return 1 if cfg.algo.trains_on == "unrolls" else 2


def lag_of(cfg: Sections, slots: int) -> int:
    """Returns the greatest lag, in optimizer steps, with at most ``slots`` slots in use.

    A slot is in use while it is lent or filled.
    """
    learner = cfg.learner
    updates = updates_of_batch(cfg)
    batches_per_publication = -(-learner.publish_every // updates)
    batches_before = _prefetched(cfg) + (slots - 1) // learner.batch_slots
    return updates * (batches_per_publication + batches_before)


def slots_within_lag(cfg: Sections) -> int:
    """Returns the most slots that may be lent or filled within `transport.max_policy_lag`.

    One batch fewer than `lag_of` allows, since actors are not equally fast, but at least one.
    """
    batch_slots = cfg.learner.batch_slots
    remaining_lag = cfg.transport.max_policy_lag - lag_of(cfg, batch_slots)
    return batch_slots * max(1, remaining_lag // updates_of_batch(cfg))

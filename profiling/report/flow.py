"""The rate of each stage of a run, in the order of a sample's way.

Rates are agent steps and bytes per second. They are derived from what is measured anyway; a rate
that does not follow from it is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from penstock.configs.policy_lag import lent_by_batch
from penstock.configs.schema import Config
from penstock.configs.transports import TRANSPORTS


class Rate(NamedTuple):
    """Samples per second."""

    steps: float | None
    nbytes: float | None


class Seen(NamedTuple):
    """A window. ``played`` is of the actors of this host, None where there are none; ``received``
    is of all connectors as their figures of `data`, None where there are none; ``arrived`` are the
    produced steps that were reported to the learners, ``trained`` steps and ``updates`` of all of
    them together."""

    played: Rate | None
    received: Mapping[str, float | None] | None
    arrived: float | None
    trained: float
    updates: float | None
    learners: int


def stages(
    config: Config, seen: Seen, *, on_gpu: bool, weights_nbytes: int | None
) -> list[dict[str, Any]]:
    """Those that the run has; ``weights_nbytes`` is what the parameters weigh on this host."""
    got = seen.received
    raw = got["raw_nbytes"] if got else None
    actors = seen.played or Rate(seen.arrived, raw)
    wired = [] if got is None else [_stage("wire", got["steps"], got["coded_nbytes"])]
    stored = _stored(config, seen)
    batches = _batches(config, seen, stored)
    on_device = [_stage("h2d", *batches)] if on_gpu else []
    versions = _versions(config, seen.updates)
    weights = _product(versions, weights_nbytes, seen.learners)
    return [
        _stage("actors", *actors),
        *wired,
        _stage("store", *stored),
        _stage("gather", *batches),
        *on_device,
        _stage("learner", *batches),
        _stage("weights", None, weights) | {"versions_per_s": versions},
    ]


def _stage(name: str, steps: float | None, nbytes: float | None) -> dict[str, Any]:
    return {"stage": name, "steps_per_s": steps, "nbytes_per_s": nbytes}


def _stored(config: Config, seen: Seen) -> Rate:
    """Returns what is written to the learners' stores.

    Actors of this host write in place, unless they send; connectors write what they receive.
    """
    sends = TRANSPORTS.here(config.transport.kind).reaches_other_hosts
    parts = [] if seen.played is None or sends else [seen.played]
    if seen.received is not None:
        parts.append(Rate(seen.received["steps"], seen.received["raw_nbytes"]))
    return Rate(_sum(part.steps for part in parts), _sum(part.nbytes for part in parts))


def _batches(config: Config, seen: Seen, stored: Rate) -> Rate:
    """Returns what is trained on.

    A step of an unroll has as many bytes in a batch as in the ``store``; one from replay counts as
    often as it is drawn.
    """
    if config.algo.trains_on == "transitions":
        return Rate(_product(seen.updates, config.replay.batch_size, seen.learners), None)
    each = stored.nbytes / stored.steps if stored.nbytes and stored.steps else None
    return Rate(seen.trained, _product(seen.trained, each))


def _versions(config: Config, updates: float | None) -> float | None:
    """Returns the versions of the weights per second; None if the ``updates`` are unknown.

    There is one every `learner.publish_every` updates, and one per batch at most. Where slots are
    lent by batch, there is one after each batch, and with a policy lag one more within it, when the
    slots of the next batch are lent.
    """
    learner = config.learner
    of_batch = learner.updates_per_batch * config.algo.passes / learner.accumulate
    if updates is None:
        return None
    if not lent_by_batch(config):
        return updates / max(learner.publish_every, of_batch)
    within = updates / of_batch if config.transport.max_policy_lag else 0.0
    return within + updates / max(1, of_batch)


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _product(*factors: float | None) -> float | None:
    product = 1.0
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product

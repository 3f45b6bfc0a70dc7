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
    """Agent steps."""
    nbytes: float | None


class WindowRates(NamedTuple):
    """The rates that were measured in a window, per second."""

    played: Rate | None
    """Of the actors of this host; None where there are none."""
    received: Mapping[str, float | None] | None
    """Of all connectors, by the names in `RECEIVED`; None where there are none."""
    produced: float | None
    """Produced steps that were reported to the learners."""
    trained: float
    """Steps that all learners together have trained on."""
    updates: float | None
    """Optimizer steps that the learners have taken together."""
    learners: int
    """How many there are."""


def stage_rates(
    config: Config, rates: WindowRates, *, on_gpu: bool, weights_nbytes: int | None
) -> list[dict[str, Any]]:
    """Returns the rates of the stages that the run has.

    Args:
        config: of the run.
        rates: the measurements.
        on_gpu: whether learners train on a GPU.
        weights_nbytes: size of the parameters in the memory of this host.

    Returns: by stage its name as ``stage``, ``steps_per_s`` and ``nbytes_per_s``; of the weights
    also ``versions_per_s``.
    """
    received = rates.received
    actors = rates.played
    if actors is None:
        actors = Rate(rates.produced, received["raw_nbytes"] if received else None)
    store = _stored(config, rates)
    batches = _batches(config, rates, store)
    versions = _versions(config, rates.updates)
    weights_nbytes_per_s = _product(versions, weights_nbytes, rates.learners)

    stages = [_stage("actors", *actors)]
    if received is not None:
        stages.append(_stage("wire", received["steps"], received["coded_nbytes"]))
    stages.append(_stage("store", *store))
    stages.append(_stage("gather", *batches))
    if on_gpu:
        stages.append(_stage("h2d", *batches))
    stages.append(_stage("learner", *batches))
    weights = _stage("weights", None, weights_nbytes_per_s)
    stages.append(weights | {"versions_per_s": versions})
    return stages


def _stage(name: str, steps: float | None, nbytes: float | None) -> dict[str, Any]:
    """Returns the entry of one stage."""
    return {"stage": name, "steps_per_s": steps, "nbytes_per_s": nbytes}


def _stored(config: Config, rates: WindowRates) -> Rate:
    """Returns what is written to the learners' stores.

    Actors of this host write in place, unless they send; connectors write what they receive.
    """
    writers = []
    actors_send = TRANSPORTS.same_host_spec(config.transport.kind).reaches_other_hosts
    if rates.played is not None and not actors_send:
        writers.append(rates.played)
    if rates.received is not None:
        writers.append(Rate(rates.received["steps"], rates.received["raw_nbytes"]))

    steps = _sum_of_known(writer.steps for writer in writers)
    nbytes = _sum_of_known(writer.nbytes for writer in writers)
    return Rate(steps, nbytes)


def _batches(config: Config, rates: WindowRates, store: Rate) -> Rate:
    """Returns what is trained on.

    A step of an unroll has as many bytes in a batch as in the ``store``; one from replay counts as
    often as it is drawn.
    """
    if config.algo.trains_on == "transitions":
        drawn_steps = _product(rates.updates, config.replay.batch_size, rates.learners)
        return Rate(drawn_steps, None)

    nbytes_per_step = None
    if store.nbytes and store.steps:
        nbytes_per_step = store.nbytes / store.steps
    return Rate(rates.trained, _product(rates.trained, nbytes_per_step))


def _versions(config: Config, updates: float | None) -> float | None:
    """Returns the versions of the weights per second; None if the ``updates`` are unknown.

    There is one every `learner.publish_every` updates, and one per batch at most. Where slots are
    lent by batch, there is one after each batch, and with a policy lag one more within it, when the
    slots of the next batch are lent.
    """
    learner = config.learner
    updates_per_batch = learner.updates_per_batch * config.algo.passes / learner.accumulate
    if updates is None:
        return None
    if not lent_by_batch(config):
        return updates / max(learner.publish_every, updates_per_batch)

    after_batch = updates / max(1, updates_per_batch)
    within_batch = updates / updates_per_batch if config.transport.max_policy_lag else 0.0
    return within_batch + after_batch


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    """Returns the sum of the values that are known; None without one."""
    known_values = [value for value in values if value is not None]
    return sum(known_values) if known_values else None


def _product(*factors: float | None) -> float | None:
    """Returns the product of all factors; None if one of them is unknown."""
    product = 1.0
    for factor in factors:
        if factor is None:
            return None
        product *= factor
    return product

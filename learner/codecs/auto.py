"""Times what `codec: auto` is chosen by (`penstock.autotune.codec`), on made-up gradients.

At the start of a run all learners together time small and large sums, and each times the coding of
every codec that works with its optimizer; the finalists run a few real steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from penstock.autotune.codec import (
    Choice,
    Cost,
    NetworkCost,
    candidates,
    decide,
    finalists,
    predict_s,
)
from penstock.configs.errors import UserError
from penstock.configs.reduce import ReduceConfig
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import Codec, CodecContext, Collective, GradientPart
from penstock.device.choice import device_of
from penstock.learner.codecs.buckets import bucket_nbytes, buckets_of
from penstock.learner.codecs.collective import SoloCollective, all_reduce_nbytes
from penstock.learner.codecs.registry import make_codec

PROBE_VALUES = 250_000  # 1 MB
PROBES = 4  # the shortest counts: other load only makes them longer
AFTER_WARMUP = 10**9 + 1  # every warm-up is over; with default intervals no variance is sent


def choose(
    cfg: LearnerConfig,
    parts: Sequence[GradientPart],
    size: int,
    device: torch.device,
    ring: Collective,
) -> Choice:
    """Measure the codecs and decide; every rank calls it at the same time.

    Args:
        cfg: the section `learner` of the config.
        parts: the layers in the flat gradient vector.
        size: number of values in that vector.
        device: where the gradients are.
        ring: the group of all ranks.

    Returns:
        The choice, the same on all ranks.
    """
    trial = _Trial(cfg.reduce, parts, size, device, ring)
    costs = {}
    for name in candidates(cfg):
        with suppress(UserError):  # a codec that does not sum over so many ranks
            costs[name] = trial.cost(name)
    small_s, large_s = trial.mean_over_ranks([trial.exchange_s(n) for n in (1, PROBE_VALUES)])
    sent = all_reduce_nbytes(PROBE_VALUES * 4, ring.world)
    network = NetworkCost(sent / max(large_s - small_s, 1e-6), small_s)
    code_s = trial.mean_over_ranks([cost.code_s for cost in costs.values()])
    buckets = len(buckets_of(parts, bucket_nbytes(cfg.reduce.bucket_mb, device)))
    predicted = {
        name: predict_s(cost._replace(code_s=each_s), network, buckets)
        for (name, cost), each_s in zip(costs.items(), code_s, strict=True)
    }
    names = finalists(predicted)
    measured = dict(
        zip(names, trial.mean_over_ranks([trial.step_s(name) for name in names]), strict=True)
    )
    return decide(measured, predicted, network)


class _Trial:
    """Timed runs of codecs on made-up gradients."""

    def __init__(
        self,
        cfg: ReduceConfig,
        parts: Sequence[GradientPart],
        size: int,
        device: torch.device,
        ring: Collective,
    ) -> None:
        self._cfg, self._parts, self._device, self._ring = cfg, parts, device, ring
        self._values = torch.randn(size, device=device)
        self._grads = torch.empty_like(self._values)

    def cost(self, name: str) -> Cost:
        """Measure the coding of a codec, without a network, and count what it sends."""
        codec, alone = self._make(name), SoloCollective(self._ring.rank, self._ring.world)
        return Cost(self._shortest_s(codec, alone), codec.nbytes(AFTER_WARMUP))

    def step_s(self, name: str) -> float:
        """Returns the measured seconds of a step with a codec, over the network."""
        return self._shortest_s(self._make(name), self._ring)

    def exchange_s(self, values: int) -> float:
        """Returns the measured seconds of a sum of ``values`` values over all ranks."""
        probe = torch.ones(values, device=self._device)
        self._ring.all_reduce(probe)
        return min(self._timed(lambda: self._ring.all_reduce(probe)) for _ in range(PROBES))

    def mean_over_ranks(self, own: Sequence[float]) -> list[float]:
        """Means over ranks, the same on all."""
        given = torch.tensor(own, device=self._device)
        everybodys = given.new_empty(self._ring.world, len(given))
        self._ring.all_gather(everybodys, given)
        means: list[float] = everybodys.mean(0).tolist()
        return means

    def _make(self, name: str) -> Codec:
        """Make the codec of that name, for the group of all ranks."""
        cfg = self._cfg.model_copy(update={"codec": name})
        size, ring = len(self._values), self._ring
        context = CodecContext(cfg, self._parts, size, self._device, ring.world, ring.rank)
        return make_codec(context)

    def _shortest_s(self, codec: Codec, ring: Collective) -> float:
        """Returns the seconds of the fastest of several steps with ``codec``."""

        def step() -> None:
            codec.begin(AFTER_WARMUP)
            for bucket in codec.buckets:
                codec.reduce(bucket, self._grads[bucket.start : bucket.stop], ring)

        times = []
        for _ in range(PROBES):
            self._grads.copy_(self._values)
            times.append(self._timed(step))
        return min(times)

    def _timed(self, call: Callable[[], None]) -> float:
        started_s = time.perf_counter()
        call()
        device_of(self._device).synchronize()
        return time.perf_counter() - started_s

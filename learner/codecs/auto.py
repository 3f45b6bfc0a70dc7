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


def choose_codec(
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
    trial = _Trial(cfg.reduce, parts, size=size, device=device, ring=ring)
    costs: dict[str, Cost] = {}
    for name in candidates(cfg):
        with suppress(UserError):  # a codec that does not sum over so many ranks
            costs[name] = trial.cost(name)

    # The sum of one value takes the network's latency, a large one shows its rate. Means over ranks
    # are the same everywhere, and so is the choice.
    small_s, large_s = trial.mean_over_ranks(
        [trial.exchange_s(values) for values in (1, PROBE_VALUES)]
    )
    sent_nbytes = all_reduce_nbytes(PROBE_VALUES * 4, ring.world)
    network = NetworkCost(sent_nbytes / max(large_s - small_s, 1e-6), small_s)

    # Predict the time of a step with each codec.
    mean_code_s = trial.mean_over_ranks([cost.code_s for cost in costs.values()])
    buckets = len(buckets_of(parts, bucket_nbytes(cfg.reduce.bucket_mb, device)))
    predicted_s = {
        name: predict_s(cost._replace(code_s=code_s), network, buckets)
        for (name, cost), code_s in zip(costs.items(), mean_code_s, strict=True)
    }

    # Measure it with the best of them.
    names = finalists(predicted_s)
    step_s = trial.mean_over_ranks([trial.step_s(name) for name in names])
    measured_s = dict(zip(names, step_s, strict=True))
    return decide(measured_s, predicted_s, network)


class _Trial:
    """Timed runs of codecs on made-up gradients."""

    def __init__(
        self,
        cfg: ReduceConfig,
        parts: Sequence[GradientPart],
        *,
        size: int,
        device: torch.device,
        ring: Collective,
    ) -> None:
        """Make gradients of ``size`` values. The arguments are those of `choose_codec`."""
        self._cfg = cfg
        self._parts = parts
        self._device = device
        self._ring = ring
        self._values = torch.randn(size, device=device)
        self._grads = torch.empty_like(self._values)

    def cost(self, name: str) -> Cost:
        """Measure the coding of a codec, without a network, and count what it sends."""
        codec = self._make(name)
        alone = SoloCollective(self._ring.rank, self._ring.world)
        return Cost(self._shortest_s(codec, alone), codec.nbytes(AFTER_WARMUP))

    def step_s(self, name: str) -> float:
        """Returns the measured seconds of a step with a codec, over the network."""
        return self._shortest_s(self._make(name), self._ring)

    def exchange_s(self, values: int) -> float:
        """Returns the measured seconds of a sum of ``values`` values over all ranks."""
        probe = torch.ones(values, device=self._device)
        self._ring.all_reduce(probe)
        return min(self._timed_s(lambda: self._ring.all_reduce(probe)) for _ in range(PROBES))

    def mean_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Returns the means of ``values`` over ranks, the same on all."""
        local_values = torch.tensor(values, device=self._device)
        all_values = local_values.new_empty(self._ring.world, len(local_values))
        self._ring.all_gather(all_values, local_values)
        means: list[float] = all_values.mean(0).tolist()
        return means

    def _make(self, name: str) -> Codec:
        """Make the codec of that name, for the group of all ranks."""
        context = CodecContext(
            cfg=self._cfg.model_copy(update={"codec": name}),
            parts=self._parts,
            size=len(self._values),
            device=self._device,
            world=self._ring.world,
            rank=self._ring.rank,
        )
        return make_codec(context)

    def _shortest_s(self, codec: Codec, ring: Collective) -> float:
        """Returns the seconds of the fastest of several steps with ``codec``."""

        def step() -> None:
            codec.begin(AFTER_WARMUP)
            for bucket in codec.buckets:
                codec.reduce(bucket, self._grads[bucket.start : bucket.stop], ring)

        seconds = []
        for _ in range(PROBES):
            self._grads.copy_(self._values)
            seconds.append(self._timed_s(step))
        return min(seconds)

    def _timed_s(self, call: Callable[[], None]) -> float:
        """Returns the seconds of a call, until the device has finished its work."""
        started_s = time.perf_counter()
        call()
        device_of(self._device).synchronize()
        return time.perf_counter() - started_s

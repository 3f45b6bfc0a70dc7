"""`codec: auto`: the fastest form of the gradients that does not change what is learned.

At the start all learners together time small and large sums, and each times the coding of every
codec that works with its optimizer. A step is then predicted as

    coding + bytes sent / bandwidth + latency of one exchange for each bucket

Candidates are fp32 and the codecs that only round (relative error up to a few per cent).
Predictions leave out that learners wait for each other and share cores, so the fastest of them, and
fp32 where it is close, run a few real steps; rounding must then gain ROUNDED_GAIN over fp32. Lossy
codecs (more variance, or delayed values) are never chosen: what they cost in learning depends on
the run's length and the network's size, and no measurement at the start shows it. Their predicted
times are reported. Every rank decides by the same means over all ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from penstock.configs.errors import UserError
from penstock.configs.group import codec_contradictions
from penstock.configs.reduce import ReduceConfig
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import Codec, CodecContext, Collective, GradientPart
from penstock.device.choice import device_of
from penstock.learner.codecs.buckets import bucket_nbytes, buckets_of
from penstock.learner.codecs.collective import SoloCollective, all_reduce_nbytes
from penstock.learner.codecs.registry import CODECS, make_codec

ROUNDED_GAIN = 1.05
CLOSE = 2.0  # predictions may be off by this factor
PROBE_VALUES = 250_000  # 1 MB
PROBES = 4  # the shortest counts: other load only makes them longer
AFTER_WARMUP = 10**9 + 1  # every warm-up is over; with default intervals no variance is sent


class Cost(NamedTuple):
    """The cost of one update on one rank."""

    code_s: float
    nbytes: float


class NetworkCost(NamedTuple):
    """The cost of one rank's traffic, as measured by sums over all ranks."""

    nbytes_per_s: float
    latency_s: float


class Choice(NamedTuple):
    """A codec's name, and a sentence with the reason."""

    codec: str
    text: str


def choose(
    cfg: LearnerConfig,
    parts: Sequence[GradientPart],
    size: int,
    device: torch.device,
    ring: Collective,
) -> Choice:
    """Measure and decide; every rank calls it at the same time and gets the same choice."""
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


def candidates(cfg: LearnerConfig) -> list[str]:
    """Codecs to try that work with the optimizer and the pace."""
    names = [name for name, spec in CODECS.specs.items() if spec.tried_by_auto]
    return [name for name in names if not list(codec_contradictions(_with_codec(cfg, name)))]


def predict_s(cost: Cost, network: NetworkCost, buckets: int) -> float:
    """Predicted seconds of one step's reduction."""
    return cost.code_s + cost.nbytes / network.nbytes_per_s + buckets * network.latency_s


def best(step_s: Mapping[str, float]) -> str:
    """The best of fp32 and the rounding codecs."""
    rounding = [name for name in step_s if CODECS.specs[name].loss == "rounding"]
    found = min(rounding, key=step_s.__getitem__, default="none")
    return "none" if step_s.get("none", math.inf) < ROUNDED_GAIN * step_s[found] else found


def finalists(predicted: Mapping[str, float]) -> tuple[str, ...]:
    """The codecs to try; ``predicted`` seconds have at least "none"."""
    found = best(predicted)
    plain = ["none"] if predicted["none"] < CLOSE * predicted[found] else []
    return tuple(dict.fromkeys([*plain, found]))


def decide(
    measured: Mapping[str, float], predicted: Mapping[str, float], network: NetworkCost
) -> Choice:
    """Choose among the `finalists` by their ``measured`` seconds of a step."""
    chosen = best(measured)
    text = (
        f"{chosen}: reducing a step's gradients takes {_ms(measured[chosen])} on this network of "
        f"{network.nbytes_per_s * 8 / 1e6:,.0f} Mbit/s"
    )
    text += "".join(f", {name} {_ms(measured[name])}" for name in measured if name != chosen)
    rest = sorted((n for n in predicted if n not in measured), key=predicted.__getitem__)
    lossy = [name for name in rest if CODECS.specs[name].loss == "lossy"]
    for kind, names in (
        ("predicted", [name for name in rest if name not in lossy]),
        ("predicted of lossy codecs, which are used only if they are named", lossy),
    ):
        if names:
            text += f"; {kind}: {', '.join(f'{name} {_ms(predicted[name])}' for name in names)}"
    return Choice(chosen, text)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


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
        codec, alone = self._make(name), SoloCollective(self._ring.rank, self._ring.world)
        return Cost(self._shortest_s(codec, alone), codec.nbytes(AFTER_WARMUP))

    def step_s(self, name: str) -> float:
        return self._shortest_s(self._make(name), self._ring)

    def exchange_s(self, values: int) -> float:
        """Measured seconds for a sum of ``values`` values over all ranks."""
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
        cfg = self._cfg.model_copy(update={"codec": name})
        size, ring = len(self._values), self._ring
        context = CodecContext(cfg, self._parts, size, self._device, ring.world, ring.rank)
        return make_codec(context)

    def _shortest_s(self, codec: Codec, ring: Collective) -> float:
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


def _with_codec(cfg: LearnerConfig, name: str) -> LearnerConfig:
    return cfg.model_copy(update={"reduce": cfg.reduce.model_copy(update={"codec": name})})

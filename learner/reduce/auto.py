"""`codec: auto`: which codec makes a step shortest on this network, with these processors.

At the start all learners together time small and large sums, and each times the coding of every
codec that goes with its optimizer. A step is then predicted as

    coding + bytes sent / bandwidth + latency of one exchange for each bucket

and the shortest wins, except that what costs something must be worth it: a rounded gradient
(fp16, bf16, int8: relative error up to a few per cent) must be faster than fp32 by ROUNDED_GAIN, a
lossy one (onebit, terngrad, dropping, dgc, powersgd: more variance, or news that come late) faster
than the best of the others by LOSSY_GAIN. Every rank decides by the same means over all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, get_args

import torch

from penstock.configs.group import codec_contradictions
from penstock.configs.reduce import Codec as CodecName
from penstock.configs.reduce import ReduceConfig
from penstock.configs.schema import LearnerConfig
from penstock.learner.reduce.alone import Alone
from penstock.learner.reduce.collective import Collective
from penstock.learner.reduce.layout import Part, buckets_of
from penstock.learner.reduce.make import make_codec

ROUNDED = ("fp16", "bf16", "int8")
LOSSY = ("onebit", "terngrad", "dropping", "dgc", "powersgd")
ROUNDED_GAIN, LOSSY_GAIN = 1.05, 1.5
PROBE_VALUES = 250_000  # 1 MB
PROBES = 4  # of which the shortest counts: what else runs only makes longer
AFTER_WARMUP = 10**9  # an update by which no codec is still warming up
MB = 1_000_000


class Cost(NamedTuple):
    """Of one update on one rank."""

    code_s: float
    nbytes: float


class Network(NamedTuple):
    """What one rank sends through, as the sums of all ranks feel it."""

    nbytes_per_s: float
    latency_s: float


class Choice(NamedTuple):
    """A codec's name, and a sentence on why."""

    codec: str
    text: str


def choose(
    cfg: LearnerConfig, parts: Sequence[Part], size: int, device: torch.device, ring: Collective
) -> Choice:
    """Measure and decide; every rank calls it at the same time and gets the same."""
    names = candidates(cfg)
    costs = [_cost(name, cfg.reduce, parts, size, device, ring) for name in names]
    small_s, large_s = (_exchange_s(ring, values, device) for values in (1, PROBE_VALUES))
    measured = torch.tensor([small_s, large_s, *(cost.code_s for cost in costs)], device=device)
    everybodys = measured.new_empty(ring.world, len(measured))
    ring.all_gather(everybodys, measured)
    small_s, large_s, *code_s = everybodys.mean(0).tolist()
    sent = 2 * (ring.world - 1) / ring.world * PROBE_VALUES * 4
    network = Network(sent / max(large_s - small_s, 1e-6), small_s)
    agreed = {
        name: Cost(each_s, cost.nbytes)
        for name, each_s, cost in zip(names, code_s, costs, strict=True)
    }
    buckets = buckets_of(parts, round(cfg.reduce.bucket_mb * MB))
    return decide(agreed, network, len(buckets))


def candidates(cfg: LearnerConfig) -> list[str]:
    """Codecs that go with the optimizer and the pace."""
    names = [name for name in get_args(CodecName) if name != "auto"]
    return [name for name in names if not list(codec_contradictions(_with_codec(cfg, name)))]


def decide(costs: Mapping[str, Cost], network: Network, buckets: int) -> Choice:
    """The codec to take; ``costs`` has at least "none"."""
    step_s = {name: predict_s(cost, network, buckets) for name, cost in costs.items()}
    mild = min((name for name in step_s if name in ROUNDED), key=step_s.__getitem__, default="none")
    if step_s["none"] < ROUNDED_GAIN * step_s[mild]:
        mild = "none"
    rough = min((name for name in step_s if name in LOSSY), key=step_s.__getitem__, default=mild)
    chosen = rough if step_s[mild] >= LOSSY_GAIN * step_s[rough] else mild
    return Choice(chosen, _why(chosen, rough, step_s, network))


def predict_s(cost: Cost, network: Network, buckets: int) -> float:
    """Seconds of one step's reduction."""
    return cost.code_s + cost.nbytes / network.nbytes_per_s + buckets * network.latency_s


def _why(chosen: str, rough: str, step_s: Mapping[str, float], network: Network) -> str:
    others = sorted((name for name in step_s if name != chosen), key=step_s.__getitem__)
    listed = ", ".join(f"{name} {_ms(step_s[name])}" for name in others)
    text = (
        f"{chosen}: reducing a step's gradients takes {_ms(step_s[chosen])} on this network of "
        f"{network.nbytes_per_s * 8 / 1e6:,.0f} Mbit/s"
    )
    text += f" ({listed})" if listed else ""
    if step_s[rough] < step_s[chosen]:
        text += f"; {rough} is faster, but by less than the {LOSSY_GAIN:g} times that its loss asks"
    return text


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _cost(
    name: str,
    cfg: ReduceConfig,
    parts: Sequence[Part],
    size: int,
    device: torch.device,
    ring: Collective,
) -> Cost:
    codec = make_codec(cfg.model_copy(update={"codec": name}), parts, size, device, ring.world,
                       ring.rank)  # fmt: skip
    alone = Alone(ring.rank, ring.world)
    values = torch.randn(size, device=device)
    grads = torch.empty_like(values)

    def code() -> None:
        codec.begin(AFTER_WARMUP)
        for bucket in codec.buckets:
            codec.reduce(bucket, grads[bucket.start : bucket.stop], alone)

    times = []
    for _ in range(PROBES):
        grads.copy_(values)
        times.append(_timed(code, device))
    return Cost(min(times), codec.nbytes(AFTER_WARMUP))


def _exchange_s(ring: Collective, values: int, device: torch.device) -> float:
    probe = torch.ones(values, device=device)
    ring.all_reduce(probe)
    return min(_timed(lambda: ring.all_reduce(probe), device) for _ in range(PROBES))


def _timed(call: Callable[[], None], device: torch.device) -> float:
    started_s = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started_s


def _with_codec(cfg: LearnerConfig, name: str) -> LearnerConfig:
    return cfg.model_copy(update={"reduce": cfg.reduce.model_copy(update={"codec": name})})

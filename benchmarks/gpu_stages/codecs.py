"""Gradient codecs on the device: time of one update's coding, bytes sent, and synchronisations.

The network is left out: all other learners are taken to send what this one does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gpu_stages.finding import Finding, Options
from gpu_stages.updates import runs_ahead, waits_in
from penstock.configs.reduce import ReduceConfig
from penstock.core.interfaces import Codec, CodecContext
from penstock.device.choice import device_of
from penstock.learner.codecs.auto import AFTER_WARMUP
from penstock.learner.codecs.buckets import parts_of
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.codecs.registry import CODECS, make_codec

CASES: dict[str, dict[str, Any]] = {name: {"codec": name} for name in CODECS.specs} | {
    "terngrad, ternary again": {"codec": "terngrad", "reternarize": True}
}
LEARNERS = 4
WAITING = ("powersgd",)  # torch's own hook synchronizes its device
WARM_UPS, CALLS = 3, 50


def run(options: Options) -> Iterator[Finding]:
    device = device_of(torch.device(options.place))
    device.enter_thread()
    parts = parts_of(nature().named_parameters())
    size = parts[-1].stop
    gradient = torch.randn(size).to(options.place)
    work = torch.empty_like(gradient)
    ring = SoloCollective(0, LEARNERS)
    for name, chosen in CASES.items():
        context = CodecContext(
            ReduceConfig(**chosen), parts, size, gradient.device, LEARNERS, rank=0
        )
        codec = make_codec(context)

        def update(codec: Codec = codec) -> None:
            work.copy_(gradient)
            codec.begin(AFTER_WARMUP)
            for bucket in codec.buckets:
                codec.reduce(bucket, work[bucket.start : bucket.stop], ring)

        for _ in range(WARM_UPS):
            update()
        device.synchronize()
        calls = WARM_UPS if options.small else CALLS
        began_s = time.perf_counter()
        for _ in range(calls):
            update()
        device.synchronize()
        yield Finding(f"{name}: ms", 1e3 * (time.perf_counter() - began_s) / calls)
        yield Finding(f"{name}: bytes", codec.nbytes(AFTER_WARMUP))
        places = waits_in(update)
        yield Finding(f"{name}: synchronisations", len(places), ", ".join(sorted(set(places))))
        if not options.small and name not in WAITING:
            yield Finding(f"{name}: ends before the device does", runs_ahead(device, update))


def nature() -> nn.Module:
    """The parameters of the network for Atari, with 18 actions: 1.7 million."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4),
        nn.Conv2d(32, 64, 4, 2),
        nn.Conv2d(64, 64, 3),
        nn.Linear(3136, 512),
        nn.Linear(512, 18),
        nn.Linear(512, 1),
    )

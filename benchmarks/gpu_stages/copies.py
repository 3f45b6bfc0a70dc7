"""Copies between host and device: GB/s, pinned and not."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from gpu_stages.finding import Finding, Options
from penstock.device.choice import device_of

SIZES_MB = (1, 16, 256)
CALLS = 5  # at least


def run(options: Options) -> Iterator[Finding]:
    device = device_of(torch.device(options.place))
    device.enter_thread()
    seconds = options.seconds / 10
    for kind in ("pinned", "unpinned"):
        for size in SIZES_MB:
            nbytes = size << 20
            here = device.host_memory([nbytes], torch.uint8)
            if kind == "unpinned":
                here = torch.empty(nbytes, dtype=torch.uint8)
            here.fill_(1)
            there = torch.ones(nbytes, dtype=torch.uint8, device=options.place)
            for way, target, source in (
                ("host to device", there, here),
                ("device to host", here, there),
            ):
                target.copy_(source, non_blocking=True)
                device.synchronize()
                calls, began_s = 0, time.perf_counter()
                while calls < CALLS or time.perf_counter() < began_s + seconds:
                    target.copy_(source, non_blocking=True)
                    device.synchronize()
                    calls += 1
                rate = calls * nbytes / (time.perf_counter() - began_s)
                yield Finding(f"{way}, {kind} {size} MB, GB/s", rate / 1e9)

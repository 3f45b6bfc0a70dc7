"""Measure a learner on prepared data, in a separate process: the caller need not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from penstock.configs.schema import Config
from penstock.launch.alone import alone


def measure(config: Config, seconds: float) -> float:
    """Agent steps per second that one learner of ``config`` trains on, alone, in a process of its
    own, measured for about ``seconds``.

    Of an algorithm that draws from replay: the agent steps that it keeps up with, each sampled
    `replay.samples_per_insert` times (once where that is null). Raises UserError where there is no
    such game, network or device.
    """
    return float(statistics.median(rounds(config, seconds)["rates"]))


def rounds(
    config: Config, seconds: float, variables: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The same, each round of it, with the core-seconds of an agent step, whether a GPU did it and
    whether tcmalloc gave the memory; the process is started with the environment ``variables``."""
    found: dict[str, Any] = alone(
        "penstock.bench.ceiling:rounds",
        {"config": config.model_dump(mode="json"), "seconds": seconds},
        seconds=seconds,
        threads=config.learner.first_threads,
        variables=variables,
    )
    return found

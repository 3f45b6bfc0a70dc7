"""`transport.connectors=auto`: the number of connectors of a learner, found before the roles start.

As many connectors are started as keep up with the learner: what a connector does with a slot and an
update of the learner are timed by `penstock.launch.measuring`. They are not adapted later: an
actor's id decides which of them receives from it.
"""

from __future__ import annotations

import json
import math
import re
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

from penstock.autotune.envs import Measure, code_of, reason
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.configs.transports import MAX_CONNECTORS, TRANSPORTS
from penstock.core.cores import usable_cores
from penstock.core.machine import gpu_models
from penstock.core.notes import note_logger
from penstock.core.user_cache import digest, timed_once

FOLDER = "connectors"  # name in the cache folder
FORMAT = 1
BUSY = 0.7  # share of its time that a connector may receive

logger = note_logger(__name__)


class Costs(NamedTuple):
    """Seconds of an agent step."""

    receive: float
    """Seconds in a connector."""
    train: float
    """Seconds in a learner that never waits for data."""

    @property
    def busy(self) -> float:
        """Connectors that a learner keeps busy."""
        return self.receive / self.train


def with_connectors(config: Config, measure: Measure) -> tuple[Config, str]:
    """Replace `transport.connectors` auto by a number.

    Args:
        config: the config of a run that has not started.
        measure: returns the seconds of `Costs` as its only entry.

    Returns:
        The config with the number, and a sentence about it. The config is unchanged and the
        sentence empty where the option is a number already.
    """
    if config.transport.connectors != "auto":
        return config, ""
    number, why = _found(config, measure)
    transport = config.transport.model_copy(update={"connectors": number})
    note = f"transport.connectors: {number} for each learner, {why}" if why else ""
    return config.model_copy(update={"transport": transport}), note


def check_not_auto(config: Config, why: str) -> None:
    """Refuse `transport.connectors` auto for several runs, or for learners on several hosts.

    Raises:
        UserError: if the option is auto; ``why`` completes its sentence.
    """
    if config.transport.connectors == "auto":
        raise UserError(
            f"transport.connectors auto is found at the start of one run on one host, and {why}; "
            "set transport.connectors to a number, such as transport.connectors=1"
        )


def needed(costs: Costs, cores: float) -> int:
    """Returns the connectors that keep up with a learner, at most one for each of ``cores``."""
    return max(1, math.ceil(min(costs.busy / BUSY, int(cores), MAX_CONNECTORS)))


def _found(config: Config, measure: Measure) -> tuple[int, str]:
    """The number, and why; no reason where the run has no connectors."""
    transport, learner = config.transport, config.learner
    is_local = not TRANSPORTS.here(transport.kind).reaches_other_hosts
    if transport.bind is None and is_local:
        return 1, ""
    cores = usable_cores() / learner.most_count - learner.first_threads
    if re.search(r":(\*|0+)$", transport.bind or ""):
        return 1, "as transport.bind leaves the port to the system"
    if config.algo.trains_on != "unrolls":
        return 1, "as nothing is timed with replay; set a number for more"
    if cores < 2:
        return 1, "as fewer than 2 cores are left for the connectors of a learner"
    sections = config.model_dump(mode="json", include={"env", "algo", "model", "actors", "learner"})
    about = {
        "format": FORMAT,
        "task": f"connectors of {config.env.id}, {config.algo.name}",
        "options": digest(
            json.dumps([sections, transport.frame_stack, transport.codec], sort_keys=True)
        ),
        "code": code_of(config.env.id),
        "gpus": gpu_models(),
    }

    def time_now() -> list[list[Any]]:
        logger.info(
            f"timing slots of {config.env.id} and an update for transport.connectors=auto, which "
            "takes seconds"
        )
        return measure(config)

    try:
        costs, cached = timed_once(FOLDER, about, _costs, time_now)
    except (UserError, RuntimeError, TimeoutExpired) as error:
        return 1, f"as receiving could not be timed ({reason(error)})"
    return needed(costs, cores), (
        f"as receiving a step takes {1e6 * costs.receive:.3g} µs and the learner trains "
        f"{1 / costs.train:,.0f} steps/s, which keeps {costs.busy:.2g} of them busy, timed "
        f"{'by an earlier run' if cached else 'now'}"
    )


def _costs(entries: Any) -> Costs | None:
    """Returns the costs in the entries of a cache file; None where they are not sound."""
    match entries:
        case [[float(receive), float(train)]] if 0 < receive < math.inf and 0 < train < math.inf:
            return Costs(receive, train)
    return None

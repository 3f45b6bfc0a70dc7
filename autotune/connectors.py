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

    choice = _chosen(config, measure)
    transport = config.transport.model_copy(update={"connectors": choice.number})
    note = ""
    if choice.why:
        note = f"transport.connectors: {choice.number} for each learner, {choice.why}"
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


class _ConnectorChoice(NamedTuple):
    """A number of connectors for each learner."""

    number: int
    why: str = ""
    """The reason, as the end of a sentence; empty where the run has no connectors."""


def _chosen(config: Config, measure: Measure) -> _ConnectorChoice:
    """Choose the number by timing, where timing is possible and more than one could be of use."""
    transport = config.transport
    is_local = not TRANSPORTS.same_host_spec(transport.kind).reaches_other_hosts
    if transport.bind is None and is_local:
        return _ConnectorChoice(1)

    cores = usable_cores() / config.learner.most_count - config.learner.first_threads
    if re.search(r":(\*|0+)$", transport.bind or ""):
        return _ConnectorChoice(1, "as transport.bind leaves the port to the system")
    if config.algo.trains_on != "unrolls":
        return _ConnectorChoice(1, "as nothing is timed with replay; set a number for more")
    if cores < 2:
        return _ConnectorChoice(1, "as fewer than 2 cores are left for the connectors of a learner")

    def time_now() -> list[list[Any]]:
        logger.info(
            f"timing slots of {config.env.id} and an update for transport.connectors=auto, which "
            "takes seconds"
        )
        return measure(config)

    cache_key = _cache_key(config)
    try:
        costs, cached = timed_once(FOLDER, cache_key, _costs, time_now)
    except (UserError, RuntimeError, TimeoutExpired) as error:
        return _ConnectorChoice(1, f"as receiving could not be timed ({reason(error)})")

    why = (
        f"as receiving a step takes {1e6 * costs.receive:.3g} µs and the learner trains "
        f"{1 / costs.train:,.0f} steps/s, which keeps {costs.busy:.2g} of them busy, timed "
        f"{'by an earlier run' if cached else 'now'}"
    )
    return _ConnectorChoice(needed(costs, cores), why)


def _cache_key(config: Config) -> dict[str, Any]:
    """Returns what the times belong to, as plain data; any other value needs new times."""
    sections = config.model_dump(mode="json", include={"env", "algo", "model", "actors", "learner"})
    options = [sections, config.transport.frame_stack, config.transport.codec]
    return {
        "format": FORMAT,
        "task": f"connectors of {config.env.id}, {config.algo.name}",
        "options": digest(json.dumps(options, sort_keys=True)),
        "code": code_of(config.env.id),
        "gpus": gpu_models(),
    }


def _costs(entries: Any) -> Costs | None:
    """Returns the costs in the entries of a cache file; None where they are not sound."""
    match entries:
        case [[float(receive), float(train)]] if 0 < receive < math.inf and 0 < train < math.inf:
            return Costs(receive, train)
    return None

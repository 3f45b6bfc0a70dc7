"""The metrics of a run as evidence of a profile, on which the page's verdict follows.

`penstock profile` reads each process; metrics have less. The window is the last seconds of a live
run, and all of an ended one. Rates of single actors are not in the metrics: each is taken to play
in proportion to the time in which it does not wait, so a straggler among them is not found. The
learner's ceiling is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, resolve
from penstock.core.cores import usable_cores
from penstock.core.files import CONFIG_NBYTES
from penstock.core.formatting import finite
from penstock.monitor.intervals import Floats
from penstock.monitor.ranks import COUNTERS
from penstock.monitor.run_folder.columns import MetricColumns
from penstock.monitor.run_folder.files import read_text, stamp
from penstock.profiling.ledger import Part, by_learner_part
from penstock.profiling.report.profile import (
    RECEIVED,
    ActorEvidence,
    ConnectorEvidence,
    FlowEvidence,
    LearnerEvidence,
    ProcessEvidence,
    Profile,
    build,
    judged_options,
    with_verdict,
)

# The verdict on a live run is of as many seconds before the last line of metrics.
WINDOW_S = 20.0
# Begins the names of the metrics that are shares of a process's time.
LEDGERS = "ledgers/"
# The part of a learner that waits for a GPU; no other learner has it.
ON_GPU = Part.DEVICE.name.lower()
# The roles of processes, in the order in which samples pass them.
ROLES = ("learner", "connector", "relay", "actor", "evaluator")


class MetricWindow:
    """The last rows of the metrics of a run, that cover about ``seconds``; all rows for None.

    A resume from a checkpoint sets the clock and the counters of the run back to those of the
    checkpoint. The time and the steps that the run repeats count a second time.
    """

    def __init__(self, columns: MetricColumns, seconds: float | None) -> None:
        self._columns = columns
        times = columns.column("time_s")
        first = 0
        if seconds is not None:
            # Seconds from each row to the last one, beginning with the last but one.
            remaining_s = np.cumsum(_passed(times)[::-1])
            first = len(remaining_s) - int(np.count_nonzero(remaining_s <= seconds))
        self._rows = slice(min(first, max(0, len(times) - 2)), None)

        # Lines of a long run are left out, in its file and in its columns: a row stands for the
        # time since the one before. The first, and one after a resume from an older checkpoint,
        # stands for its own interval.
        since_previous_s = np.diff(times[self._rows], prepend=np.nan)
        interval_s = columns.column("interval_s")[self._rows]
        interval_s = np.where(interval_s > 0, interval_s, 0.0)  # NaN > 0 is false
        self._weights = np.where(since_previous_s > 0, since_previous_s, interval_s)

    def mean(self, name: str) -> float | None:
        """Returns the mean of a metric, each row weighted by the seconds that it is of.

        None if no row has it.
        """
        values = self._columns.column(name)[self._rows]
        has_value = ~np.isnan(values)
        if not has_value.any():
            return None
        return float(np.average(values[has_value], weights=self._weights_of(has_value)))

    def highest(self, name: str) -> float | None:
        """Returns the highest value of a metric; None if no row has it."""
        values = self._known(name)
        return float(values.max()) if len(values) else None

    def growth(self, name: str) -> float:
        """Returns by how much a counter grew.

        Where it became smaller, its process has begun anew and has counted from 0. A counter of the
        run (`COUNTERS`) went back to a checkpoint instead; its growth since then is unknown and
        counts as 0.
        """
        values = self._known(name)
        if len(values) < 2:
            return 0.0

        increases = np.diff(values)
        after_reset = 0.0 if name in COUNTERS else values[1:]
        return float(np.where(increases < 0, after_reset, increases).sum())

    def rate(self, name: str) -> float | None:
        """Returns `growth` per second; None if the window has fewer than two rows."""
        return self.growth(name) / self.seconds if self.seconds > 0 else None

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return float(_passed(self._known("time_s")).sum())

    def shares(self, prefix: str) -> dict[str, float]:
        """Returns the means of the shares below ``prefix``, by the rest of their names.

        Empty if no row has shares. Where a row lacks the share of one part, the thread has not
        entered it yet, which counts as 0.
        """
        names = self._columns.below(prefix)
        if not names:
            return {}

        # All at once: the ledgers of hundreds of processes are read every second.
        values = np.stack([self._columns.column(name)[self._rows] for name in names])
        has_share = ~np.isnan(values).all(0)
        if not has_share.any():
            return {}
        weights = self._weights_of(has_share)
        means = np.nan_to_num(values[:, has_share]) @ weights / weights.sum()

        parts = [name.removeprefix(prefix) for name in names]
        return dict(zip(parts, means.tolist(), strict=True))

    def ledgers(self) -> dict[str, dict[str, float]]:
        """Returns the shares of each process that ran in the window, by its name."""
        ledgers = {}
        for name in process_names(self._columns):
            shares = self.shares(f"{LEDGERS}{name}/")
            if shares:
                ledgers[name] = shares
        return ledgers

    def counts(self, name: str) -> dict[str, float]:
        """Returns the growth of the counters below ``name`` by their reason, where they grew."""
        prefix = f"{name}/"
        growth_by_reason = {
            counter.removeprefix(prefix): self.growth(counter)
            for counter in self._columns.below(prefix)
        }
        return {reason: growth for reason, growth in growth_by_reason.items() if growth > 0}

    def _weights_of(self, rows: Any) -> Floats:
        """Returns the weights of the rows that a mask chooses, all 1 if one of them is unknown."""
        weights: Floats = self._weights[rows]
        if weights.all():
            return weights
        return np.ones(len(weights))  # lines of another release have no interval

    def _known(self, name: str) -> Any:
        """Returns the values of a metric in the rows of the window that have it."""
        values = self._columns.column(name)[self._rows]
        return values[~np.isnan(values)]


def _passed(times: Floats) -> Floats:
    """Returns the seconds from each row to the next; 0 where the clock went back or is unknown."""
    passed_s = np.diff(times)
    return np.where(passed_s > 0, passed_s, 0.0)  # NaN > 0 is false


def process_names(columns: MetricColumns) -> list[str]:
    """Returns the processes that have a ledger in the metrics, in the order of `process_place`."""
    names = [name.split("/")[1] for name in columns.names if name.startswith(LEDGERS)]
    return sorted(dict.fromkeys(names), key=process_place)


def process_place(name: str) -> tuple[int, str, int]:
    """Returns a key that sorts processes in the order in which samples pass, then by number."""
    role = name.rpartition("-")[0]
    place = ROLES.index(role) if role in ROLES else len(ROLES)
    return place, role, _number(name)


def _number(name: str) -> int:
    """Returns the number of a process: 3 of "actor-3"."""
    number = name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def judge(
    columns: MetricColumns,
    options: Mapping[str, Any],
    status: Mapping[str, Any],
    *,
    live: bool,
    cores: float | None = None,
) -> dict[str, Any]:
    """Returns the verdict, further findings, and the length of the window in seconds.

    A finding that costs no throughput now, such as a slow learner on crowded cores, is marked by
    ``cost`` 0: it limits the run only once the others are removed.

    Args:
        columns: the metrics of the run.
        options: the config, as `load_options` returns it.
        status: the answer of the supervisor, of which the threads of the learners are used.
        live: whether the run is in progress, so that its last seconds are judged.
        cores: how many the run may use; None for those of this host.
    """
    window = MetricWindow(columns, WINDOW_S if live else None)
    profile = make_profile(columns, window, options, status, cores=cores)
    if profile is None:
        return {"verdict": None, "also": [], "seconds": 0.0}

    judged = with_verdict(profile)
    return {key: judged[key] for key in ("verdict", "also", "seconds")}


def make_profile(
    columns: MetricColumns,
    window: MetricWindow,
    options: Mapping[str, Any],
    status: Mapping[str, Any],
    cores: float | None = None,
) -> Profile | None:
    """Returns a profile as far as metrics have it; None before there are two lines with a ledger.

    The arguments are those of `judge`, and the ``window`` of ``columns``.
    """
    if window.seconds <= 0 or not window.shares("ledger/"):
        return None

    ledgers = window.ledgers()
    learners = _learners(columns, window, ledgers, status=status)
    device = str(option(options, "learner", "device"))
    on_gpu = device.startswith("cuda") or any(learner.parts.get(ON_GPU) for learner in learners)
    produced_steps_per_s = window.rate("env_steps")
    others = [
        ProcessEvidence(name=name, ledger=ledger, cpu=window.mean(f"cpu/{name}"))
        for name, ledger in ledgers.items()
        if not name.startswith(("learner-", "actor-", "connector-"))
    ]

    return build(
        seconds=window.seconds,
        cores=usable_cores() if cores is None else cores,
        device="cuda" if on_gpu else "cpu",
        learners=learners,
        actors=_actors(window, ledgers, options=options, steps_per_s=produced_steps_per_s or 0.0),
        connectors=_connectors(columns, window, ledgers, options=options),
        others=others,
        flow=FlowEvidence(
            produced_steps_per_s=produced_steps_per_s,
            trained_steps_per_s=window.rate("trained_steps"),
            dropped=window.counts("dropped"),
            lost=window.counts("lost"),
            policy_lag={
                "mean": window.mean("policy_lag_mean"),
                "max": window.highest("policy_lag_max"),
            },
            queue_fill=window.mean("queue_fill"),
            replay_size=columns.last("replay_size"),
        ),
        options=options,
    )


def _learners(
    columns: MetricColumns,
    window: MetricWindow,
    ledgers: Mapping[str, dict[str, float]],
    *,
    status: Mapping[str, Any],
) -> list[LearnerEvidence]:
    """Returns the evidence of each learner; of rank 0 alone where no learner has a ledger.

    ``ledgers`` are those of ``window``; the ledgers of further threads are in ``status``.
    """
    thread_ledgers = {
        process.get("name"): {
            thread["name"]: thread.get("ledger") or {}
            for thread in process.get("threads", [])
            if thread["name"] != "main"
        }
        for process in status.get("processes", [])
    }

    learners = []
    for name in [name for name in ledgers if name.startswith("learner-")] or ["learner-0"]:
        prefix = _rank_prefix(columns, _number(name))
        parts = ledgers.get(name, {})
        cpu = window.mean(f"cpu/{name}")
        learners.append(
            LearnerEvidence(
                rank=_number(name),
                name=name,
                ledger=window.shares(f"{prefix}ledger/") or by_learner_part(parts),
                parts=parts,
                threads=thread_ledgers.get(name, {}),
                cpu=cpu,
                coreless=None if cpu else 0.0,  # unknown without the processor's time
                steps_per_s=window.mean(f"{prefix}trained_steps_per_s"),
                updates_per_s=window.rate("learner_steps"),
                queue_fill=window.mean(f"{prefix}queue_fill"),
            )
        )
    return learners


def _actors(
    window: MetricWindow,
    ledgers: Mapping[str, Mapping[str, float]],
    *,
    options: Mapping[str, Any],
    steps_per_s: float,
) -> list[ActorEvidence]:
    """Returns the evidence of each actor.

    All of them together play ``steps_per_s`` agent steps per second, of which each is taken to have
    a part in proportion to the time in which it does not wait.
    """
    actor_ledgers = {name: shares for name, shares in ledgers.items() if name.startswith("actor-")}
    busy_shares = {name: 1.0 - shares.get("wait", 0.0) for name, shares in actor_ledgers.items()}
    total = sum(busy_shares.values()) or 1.0
    learners = _count(options, "learner", "most_count")

    return [
        ActorEvidence(
            name=name,
            ledger=shares,
            cpu=window.mean(f"cpu/{name}"),
            learner=_number(name) % learners,
            steps_per_s=steps_per_s * busy_shares[name] / total,
        )
        for name, shares in actor_ledgers.items()
    ]


def _connectors(
    columns: MetricColumns,
    window: MetricWindow,
    ledgers: Mapping[str, Mapping[str, float]],
    *,
    options: Mapping[str, Any],
) -> list[ConnectorEvidence]:
    """Returns the evidence of each connector, with what all connectors of its learner receive."""
    connectors_per_learner = _count(options, "transport", "first_connectors")

    connectors = []
    for name, ledger in ledgers.items():
        if not name.startswith("connector-"):
            continue
        rank = _number(name) // connectors_per_learner
        prefix = f"{_rank_prefix(columns, rank)}received/"
        rates: Any = {f"{counter}_per_s": window.rate(prefix + counter) for counter in RECEIVED}
        cpu = window.mean(f"cpu/{name}")
        connectors.append(
            ConnectorEvidence(name=name, ledger=ledger, cpu=cpu, learner=rank, **rates)
        )
    return connectors


def _rank_prefix(columns: MetricColumns, rank: int) -> str:
    """Returns what begins the names of a learner's own metrics; "" where there is only one."""
    prefix = f"ranks/{rank}/"
    return prefix if f"{prefix}trained_steps_per_s" in columns.names else ""


def load_options(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the rules read, with what the algorithm adds to them.

    Imports no code that a config names.

    Args:
        folder: of the run, which contains its config.
        config: is returned as it is where this version does not accept it.
    """
    is_short = stamp(folder, CONFIG_FILE)[1] <= CONFIG_NBYTES
    is_plain_file = is_short and read_text(folder, CONFIG_FILE, most=1) is not None
    if not is_plain_file:
        return {**config}
    try:
        resolved = resolve(str(folder / CONFIG_FILE))
    except (UserError, OSError, ValueError):
        return {**config}

    options = judged_options(resolved)
    options["learner"]["most_count"] = resolved.learner.most_count
    options["transport"]["first_connectors"] = resolved.transport.first_connectors
    return options


def option(options: Mapping[str, Any], section: str, name: str) -> Any:
    """Returns one of the options of `load_options`; None where its section is missing.

    A number that is not finite is None too.
    """
    values = options.get(section)
    value = values.get(name) if isinstance(values, Mapping) else None
    return finite(value) if isinstance(value, float) else value


def _count(options: Mapping[str, Any], section: str, name: str) -> int:
    """Returns a number that `load_options` adds; 1 where the config was not accepted."""
    number = option(options, section, name)
    return number if isinstance(number, int) and number > 0 else 1

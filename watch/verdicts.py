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
from penstock.profiling.ledger import Part, learner_parts
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

WINDOW_S = 20.0
LEDGERS = "ledgers/"
ON_GPU = Part.DEVICE.name.lower()  # a part of learners that wait for a GPU, and of no others


class MetricWindow:
    """The last rows of the metrics of a run, that cover about ``seconds``; all rows for None.

    A resume from a checkpoint sets the clock and the counters of the run back to those of the
    checkpoint. The time and the steps that the run repeats count a second time.
    """

    def __init__(self, columns: MetricColumns, seconds: float | None) -> None:
        times = columns.column("time_s")
        self._columns = columns
        first = 0
        if seconds is not None:
            # Seconds from each row to the last one, beginning with the last but one.
            left_s = np.cumsum(_passed(times)[::-1])
            first = len(left_s) - int(np.count_nonzero(left_s <= seconds))
        self._rows = slice(min(first, max(0, len(times) - 2)), None)

        covered = columns.column("interval_s")[self._rows]

        # Lines of a long run are left out, in its file and in its columns: a row stands for the
        # time since the one before. The first, and one after a resume from an older checkpoint,
        # stands for its own interval.
        since = np.diff(times[self._rows], prepend=np.nan)
        own = np.where(covered > 0, covered, 0.0)  # NaN > 0 is false
        self._weights = np.where(since > 0, since, own)

    def mean(self, name: str) -> float | None:
        """Returns the mean of a metric, each row weighted by the seconds that it is of.

        None if no row has it.
        """
        values = self._columns.column(name)[self._rows]
        have = ~np.isnan(values)
        if not have.any():
            return None
        return float(np.average(values[have], weights=self._weights_of(have)))

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

        grown = np.diff(values)
        anew = 0.0 if name in COUNTERS else values[1:]
        return float(np.where(grown < 0, anew, grown).sum())

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
        have = ~np.isnan(values).all(0)
        if not have.any():
            return {}
        weights = self._weights_of(have)
        means = np.nan_to_num(values[:, have]) @ weights / weights.sum()
        return dict(zip((name.removeprefix(prefix) for name in names), means.tolist(), strict=True))

    def ledgers(self) -> dict[str, dict[str, float]]:
        """Returns the shares of each process that ran in the window, by its name."""
        found = {name: self.shares(f"{LEDGERS}{name}/") for name in process_names(self._columns)}
        return {name: shares for name, shares in found.items() if shares}

    def counts(self, name: str) -> dict[str, float]:
        """Returns the growth of the counters below ``name`` by their reason, where they grew."""
        prefix = f"{name}/"
        grown = {
            known.removeprefix(prefix): self.growth(known) for known in self._columns.below(prefix)
        }
        return {reason: steps for reason, steps in grown.items() if steps > 0}

    def _weights_of(self, rows: Any) -> Floats:
        weights = self._weights[rows]
        return weights if weights.all() else np.ones(len(weights))  # of another release

    def _known(self, name: str) -> Any:
        values = self._columns.column(name)[self._rows]
        return values[~np.isnan(values)]


def _passed(times: Floats) -> Floats:
    """Returns the seconds from each row to the next; 0 where the clock went back or is unknown."""
    grown = np.diff(times)
    return np.where(grown > 0, grown, 0.0)  # NaN > 0 is false


def process_names(columns: MetricColumns) -> list[str]:
    """Returns the processes that have a ledger in the metrics, in the order of `process_place`."""
    found = [name.split("/")[1] for name in columns.names if name.startswith(LEDGERS)]
    return sorted(dict.fromkeys(found), key=process_place)


def process_place(name: str) -> tuple[int, str, int]:
    """Returns a key that sorts processes in the order in which samples pass, then by number."""
    role = name.rpartition("-")[0]
    first = ("learner", "connector", "relay", "actor", "evaluator")
    rank = first.index(role) if role in first else len(first)
    return rank, role, _number(name)


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
    profile = make_profile(columns, window, options, status, cores)
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
    produced = window.rate("env_steps")
    learners = _learners(columns, window, ledgers, status)
    on_gpu = any(learner.parts.get(ON_GPU) for learner in learners)
    on_gpu = on_gpu or str(option(options, "learner", "device")).startswith("cuda")

    return build(
        seconds=window.seconds,
        cores=usable_cores() if cores is None else cores,
        device="cuda" if on_gpu else "cpu",
        learners=learners,
        actors=_actors(ledgers, window, options, produced or 0.0),
        connectors=_connectors(columns, window, ledgers, options),
        others=[
            ProcessEvidence(name=name, ledger=ledger, cpu=window.mean(f"cpu/{name}"))
            for name, ledger in ledgers.items()
            if not name.startswith(("learner-", "actor-", "connector-"))
        ],
        flow=FlowEvidence(
            produced_steps_per_s=produced,
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
    status: Mapping[str, Any],
) -> list[LearnerEvidence]:
    threads = {
        process.get("name"): {
            thread["name"]: thread.get("ledger") or {}
            for thread in process.get("threads", [])
            if thread["name"] != "main"
        }
        for process in status.get("processes", [])
    }

    learners = []
    ranks = [name for name in ledgers if name.startswith("learner-")] or ["learner-0"]
    for name in ranks:
        own = _of_rank(columns, _number(name))
        parts = ledgers.get(name, {})
        cpu = window.mean(f"cpu/{name}")
        learners.append(
            LearnerEvidence(
                rank=_number(name),
                name=name,
                ledger=window.shares(f"{own}ledger/") or learner_parts(parts),
                parts=parts,
                threads=threads.get(name, {}),
                cpu=cpu,
                coreless=None if cpu else 0.0,  # unknown without the processor's time
                steps_per_s=window.mean(f"{own}trained_steps_per_s"),
                updates_per_s=window.rate("learner_steps"),
                queue_fill=window.mean(f"{own}queue_fill"),
            )
        )
    return learners


def _actors(
    ledgers: Mapping[str, Mapping[str, float]],
    window: MetricWindow,
    options: Mapping[str, Any],
    produced: float,
) -> list[ActorEvidence]:
    own = {name: ledger for name, ledger in ledgers.items() if name.startswith("actor-")}
    works = {name: 1.0 - ledger.get("wait", 0.0) for name, ledger in own.items()}
    total = sum(works.values()) or 1.0

    return [
        ActorEvidence(
            name=name,
            ledger=ledger,
            cpu=window.mean(f"cpu/{name}"),
            learner=_number(name) % _count(options, "learner", "most_count"),
            steps_per_s=produced * works[name] / total,
        )
        for name, ledger in own.items()
    ]


def _connectors(
    columns: MetricColumns,
    window: MetricWindow,
    ledgers: Mapping[str, Mapping[str, float]],
    options: Mapping[str, Any],
) -> list[ConnectorEvidence]:
    own = {name: ledger for name, ledger in ledgers.items() if name.startswith("connector-")}

    connectors = []
    for name, ledger in own.items():
        rank = _number(name) // _count(options, "transport", "first_connectors")
        received = f"{_of_rank(columns, rank)}received/"
        rates: Any = {f"{counter}_per_s": window.rate(received + counter) for counter in RECEIVED}
        cpu = window.mean(f"cpu/{name}")
        connectors.append(
            ConnectorEvidence(name=name, ledger=ledger, cpu=cpu, learner=rank, **rates)
        )
    return connectors


def _of_rank(columns: MetricColumns, rank: int) -> str:
    """What begins the names of a learner's own metrics; empty where there is only one."""
    own = f"ranks/{rank}/"
    return own if f"{own}trained_steps_per_s" in columns.names else ""


def load_options(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the rules read, with what the algorithm adds to them.

    Imports no code that a config names.

    Args:
        folder: of the run, which contains its config.
        config: is returned as it is where this version does not accept it.
    """
    is_short = stamp(folder, CONFIG_FILE)[1] <= CONFIG_NBYTES
    if not is_short or read_text(folder, CONFIG_FILE, most=1) is None:  # no plain file
        return {**config}
    try:
        checked = resolve(str(folder / CONFIG_FILE))
    except (UserError, OSError, ValueError):
        return {**config}

    options = judged_options(checked)
    options["learner"]["most_count"] = checked.learner.most_count
    options["transport"]["first_connectors"] = checked.transport.first_connectors
    return options


def option(options: Mapping[str, Any], section: str, name: str) -> Any:
    """Returns one of the options of `load_options`; None where its section is missing.

    A number that is not finite is None too.
    """
    found = options.get(section)
    value = found.get(name) if isinstance(found, Mapping) else None
    return value if not isinstance(value, float) else finite(value)


def _count(options: Mapping[str, Any], section: str, name: str) -> int:
    """Returns a number that `load_options` adds; 1 where the config was not accepted."""
    found = option(options, section, name)
    return found if isinstance(found, int) and found > 0 else 1

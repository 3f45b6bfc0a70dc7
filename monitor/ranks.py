"""What the learners of a run report, as that of one run.

The report of an only learner is that of the run, except for what earlier processes of it had
counted, where it was restarted from a checkpoint.

Counters are those of the whole group (`learner.progress`). With a parameter server a rank knows
them as of the server's last reply, so the highest figure of any rank, dead or alive, is the newest.
Other figures of the group are equal on every rank, and the lowest rank that lives gives them. A
rank's own amounts are added up, its shares and means averaged. A learner that died is gone
with what it held, but its status page and its last report remain: steps that had reached it and
were neither trained on nor dropped are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.profiling.histogram import latency_figures

Metrics = dict[str, Any]

COUNTERS = ("env_steps", "env_frames", "trained_steps", "learner_steps", "episodes")
# Figures that are equal on every rank, or nearly.
GROUPS = {
    "time_s", *COUNTERS, "episode_return_mean", "episode_length_mean",
    "return_reached_at_s", "solved_at_s",
}  # fmt: skip
SUMMED = {
    "steps_per_s", "trained_steps_per_s", "learner_ceiling_steps_per_s", "actors_alive",
    "replay_size", "received", "league_games", "games", "seats_held",
}  # fmt: skip
# Figures of which the highest of any rank counts: an update that all skip is one.
MOST = ("updates_skipped", "rollbacks")
# Counts by reason, since the rank's process began.
COUNTED = ("dropped", "lost", "rejected")
# Figures that `ranks` has of each rank.
OWN = (
    "steps_per_s", "trained_steps_per_s", "learner_ceiling_steps_per_s", "queue_fill",
    "actors_alive", "ledger", "received",
)  # fmt: skip
LAG = "policy_lag_histogram"
LATENCY = "latency_histogram"
LOST = "learner"


class RankPhase(NamedTuple):
    """The phase of a learner, its duration, and the number of the all-reduce if it is in one."""

    phase: str
    seconds: float
    reduction: int | None = None


class Ranks:
    """The reports of the learners of one run."""

    def __init__(self, ranks: Iterable[int], *, several: bool | None = None) -> None:
        """Begin without a report.

        Args:
            ranks: those of the learners with which the run begins.
            several: whether it may have more than one learner; None: whether it begins with
                several.
        """
        self._awaited = set(ranks)  # ranks without a report so far
        self._several = len(self._awaited) > 1 if several is None else several
        self._last: dict[int, Metrics] = {}  # last report of each rank that lives
        self._finals: dict[int, Metrics] = {}  # final reports

        # What has been reported since the last report of the run.
        self._lag: Counter[int] = Counter()
        self._latency: dict[int, float] = {}

        self._died = False  # whether any learner has died
        self._highest: dict[str, int] = {}  # the highest report of each counter
        self._dead: Metrics = {"produced": 0, "trained": 0, **{key: Counter() for key in COUNTED}}
        self._played = 0  # steps of actors of this host that have ended
        self.server: Metrics | None = None  # the last report of the parameter server

    def metrics(self, rank: int, message: Metrics) -> Metrics | None:
        """Add the report of a rank for an interval.

        Returns:
            The report of the run if ``rank`` is the lowest that lives and all have reported once;
            otherwise None.
        """
        self._awaited.discard(rank)
        self._last[rank] = message
        server = {} if self.server is None else {"server": self.server}
        if not self._several:
            return message | server | (self._counted([message]) if self._died else {})

        self._lag.update({int(lag): steps for lag, steps in message.get(LAG, {}).items()})
        for bin_, steps in message.get(LATENCY, {}).items():
            self._latency[int(bin_)] = self._latency.get(int(bin_), 0.0) + steps
        if self._awaited or rank != min(self._last):
            return None

        reports = {rank: self._last[rank] for rank in sorted(self._last)}
        merged = merge(message, list(reports.values()))
        if LAG in message:
            merged |= lags(self._lag)
            self._lag = Counter()
        if LATENCY in message:
            merged |= latency_figures(self._latency)
            self._latency = {}
        merged |= self._counted(reports.values()) | self._counters(reports.values())

        merged["ranks"] = [
            {"rank": rank, **{name: report[name] for name in OWN if name in report}}
            for rank, report in reports.items()
        ]
        return merged | server

    def final(self, rank: int, message: Metrics) -> Metrics:
        """Add the final report of a learner; returns that of the run, as far as it is known."""
        self._finals[rank] = message
        return self._sum() if self._several or self._died else message

    def actor_ended(self, played_steps: int) -> None:
        """Count the steps of an actor of this host that has ended, by its own count."""
        self._played += played_steps

    def learner_ended(self, rank: int, produced: int, trained: int) -> Metrics | None:
        """Count the steps of a learner that has ended.

        What it had produced and neither trained on nor dropped is lost. A learner whose final
        report is there has ended well, and is counted already.

        Args:
            rank: of the learner.
            produced: agent steps that had reached it, by its status page.
            trained: agent steps on which it had trained, by its status page.

        Returns:
            The final report of the run, if there is one and it has changed; otherwise None.
        """
        if rank in self._finals:
            return None

        self._awaited.discard(rank)
        last = self._last.pop(rank, {})
        self._died = True
        if not self._last:  # all are restarted from a checkpoint, whose counters are lower
            self._highest = {}

        dead = self._dead
        for key in COUNTED:
            dead[key].update(last.get(key, {}))
        accounted = trained + sum(sum(last.get(key, {}).values()) for key in ("dropped", "lost"))
        dead["lost"][LOST] += max(0, produced - accounted)
        dead["trained"] += trained
        dead["produced"] += max(produced, accounted)
        return self._sum() if self._finals else None

    def _sum(self) -> Metrics:
        """Returns the sum of the final reports so far, and of learners that died."""
        finals = [self._finals[rank] for rank in sorted(self._finals)]
        accounts = [final["accounting"] for final in finals]
        accounting: Metrics = {
            key: sum(account[key] for account in accounts)
            for key in ("produced", "trained", "in_flight")
        }
        accounting |= {key: _count(accounts, key) for key in ("dropped", "lost")}

        counted = self._counted(finals)
        if self._died:
            # Steps in flight to dead learners are known to the actors alone.
            dead = self._dead
            produced = max(dead["produced"], self._played - accounting["produced"])
            unreported = produced - dead["produced"]
            accounting["produced"] += produced
            accounting["trained"] += dead["trained"]
            for key in ("dropped", "lost"):
                accounting[key] = dict(Counter(accounting[key]) + dead[key])
            for lost in (accounting["lost"], counted["lost"]):
                lost[LOST] = lost.get(LOST, 0) + unreported

        summed: Metrics = {"accounting": accounting}
        if any("received" in final for final in finals):
            summed["received"] = _count(finals, "received")
        for key in MOST:
            if key in finals[0]:
                summed[key] = max(final.get(key, 0) for final in finals)
        return {**finals[0], **counted, **summed, **self._counters(finals)}

    def _counters(self, reports: Iterable[Metrics]) -> dict[str, int]:
        """Returns the highest value of each counter in these and all earlier reports."""
        for report in reports:
            for name in COUNTERS:
                if name in report:
                    self._highest[name] = max(self._highest.get(name, 0), report[name])
        return dict(self._highest)

    def _counted(self, reports: Iterable[Metrics]) -> Metrics:
        """Returns the `COUNTED` figures of these reports and of dead learners together."""
        reports = list(reports)
        return {key: dict(Counter(_count(reports, key)) + self._dead[key]) for key in COUNTED}


def merge(lowest: Metrics, reports: Sequence[Metrics]) -> Metrics:
    """Returns one report for the reports of several ranks.

    A learner without samples reports no means over them, so the others may have more names.

    Args:
        lowest: the report of the lowest rank, which gives the values that all share.
        reports: those of all ranks.
    """
    # All names, each with the value of `lowest` where it has one.
    named = {name: value for report in (*reports, lowest) for name, value in report.items()}
    merged = {}
    for name, value in named.items():
        if name in GROUPS:
            merged[name] = value
        else:
            merged[name] = _combined(name, [report.get(name) for report in reports], value)
    return merged


def whereabouts(places: Mapping[int, RankPhase]) -> str:
    """Returns the phases of all ranks as a sentence, the least common phase first.

    "rank 2 is in wait_data for 41 s; 0, 1, 3 in all-reduce 1207"
    """
    ranks_by_phase: dict[tuple[str, int | None], list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks_by_phase.setdefault((place.phase, place.reduction), []).append(rank)

    rarest_first = sorted(ranks_by_phase.items(), key=lambda item: len(item[1]))
    parts: list[str] = []
    for (phase, reduction), ranks in rarest_first:
        names = ", ".join(map(str, ranks))
        where = phase if reduction is None else f"{phase} {reduction}"
        if parts:
            parts.append(f"{names} in {where}")
            continue

        # Only the first part says how long: the others wait for it.
        subject = f"rank {names} is" if len(ranks) == 1 else f"ranks {names} are"
        longest_s = max(places[rank].seconds for rank in ranks)
        parts.append(f"{subject} in {where} for {longest_s:.0f} s")
    return "; ".join(parts)


def _combined(name: str, values: Sequence[Any], lowest: Any) -> Any:
    """Returns a figure of several ranks: added up or averaged; for a map, entry by entry.

    Args:
        name: of the figure, which decides how it is combined.
        values: of all ranks; None where a rank does not report it.
        lowest: the value of the lowest rank that has one, whose type decides.
    """
    if isinstance(lowest, dict):
        maps = [value for value in values if isinstance(value, dict)]
        if name.endswith("_histogram"):
            return _count([{name: value} for value in maps], name)

        keys = dict.fromkeys(key for value in maps for key in value)
        if name in SUMMED:
            return {key: sum(value.get(key, 0) for value in maps) for key in keys}
        return {key: _combined(key, [value.get(key) for value in maps], 0.0) for key in keys}

    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers or isinstance(lowest, bool | str | list):
        return lowest
    if name in MOST:
        return max(numbers)
    return sum(numbers) if name in SUMMED else sum(numbers) / len(numbers)


def _count(reports: Sequence[Metrics], key: str) -> dict[str, int]:
    """Returns the sum of the counts, by reason, that reports have under ``key``."""
    total: Counter[str] = Counter()
    for report in reports:
        total.update(report.get(key, {}))
    return dict(total)


def lags(histogram: Mapping[int, int]) -> Metrics:
    """Returns mean, maximum and histogram of policy lags, by their names in metrics.

    Args:
        histogram: the number of steps with each lag.
    """
    steps = sum(histogram.values())
    total = sum(lag * count for lag, count in histogram.items())

    return {
        "policy_lag_mean": total / steps if steps else None,
        "policy_lag_max": max(histogram, default=None),
        LAG: {str(lag): histogram[lag] for lag in sorted(histogram)},
    }

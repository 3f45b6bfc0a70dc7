"""The split of a host's cores between actors and learners, by `actors.count` auto or MIN..MAX and
`learner.threads=auto`.

It follows from what the processes of a run measure of themselves. A learner that waits for data
gets as many more actors as it lacks, if idle cores carry them. A learner that does not wait gets
one more thread, if a core is idle; it keeps the thread if it then trains faster. Where actors wait
for the learner, as many end as it does not need: the samples of the others are then younger. In
between nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from penstock.configs.schema import Config
from penstock.configs.transports import TRANSPORTS
from penstock.core.cores import IdleCores, most_actors, usable_cores

WINDOW_S = 5.0  # of what is measured, for one decision
STARVED = 0.05  # share of waiting above which a learner needs more actors
FED = 0.01  # below this it may need fewer, or train with more threads
BUSY = 0.1  # share of waiting below which actors are the limit
RESERVE = 0.15  # share of its time that an actor may wait
ROOM = 0.7  # cores that must be idle for one more thread of each learner
GAIN = 0.25  # of what one more thread gives at best, with which a learner keeps it
COLLAPSE = 0.8  # of the rate with one thread less: the threads wait for each other
SAVED = 0.1  # share of saving from which on an interval shows neither rates nor waiting

Shares = Mapping[str, float]


class Load(NamedTuple):
    """Means over the processes of a run, in one interval or several."""

    learner_waits: float
    """Share of a learner's time in which it waits for data."""
    actor_waits: float
    """Share of an actor's time in which it waits for a learner."""
    actor_cores: float
    """Cores that one actor keeps busy."""
    idle_cores: float
    ceiling: float
    """Agent steps that a learner would train per second if it never waited for data. Of one, as
    their number changes where one of several fails."""


class Split(NamedTuple):
    """A decision, and its reason."""

    actors: int
    threads: int
    """Threads of each learner."""
    reason: str


class CoreSplit:
    """Decides on actors and threads; call `interval` with each measurement of the run."""

    def __init__(
        self, actors: int, *, least: int, most: int, most_threads: int, learners: int = 1
    ) -> None:
        """At first ``actors`` play and a learner has one thread. Later from ``least`` to ``most``
        actors play, a multiple of the number of ``learners``."""
        self.now = Split(actors, 1, "")
        self._least, self._most, self._learners = least, most, learners
        self._most_threads = most_threads
        self._ceilings: list[float] = []  # with 1, 2, ... threads, up to one less than now
        self._on_trial = False  # whether the last thread was added a window ago
        self._idle = IdleCores()
        self._window: list[tuple[float, Load]] = []
        self._last_s: float | None = None

    @classmethod
    def of(cls, config: Config) -> CoreSplit | None:
        """The rule for a run; None where both numbers are fixed."""
        actors, most = config.first_actors, most_actors(config)
        learners = config.learner.most_count
        one_process = TRANSPORTS.one_process(config.transport.kind)
        adapts = config.learner.threads == "auto" and not one_process
        most_threads = int(usable_cores() // learners) if adapts else 1
        if most == actors and most_threads <= 1:
            return None
        least = config.least_actors if most > actors else actors
        return cls(
            actors, least=least, most=most, most_threads=max(1, most_threads), learners=learners
        )

    def interval(
        self,
        ledgers: Mapping[str, Shares],
        cores: Shares,
        ceilings: Sequence[float | None],
        alive: int,
        now_s: float,
    ) -> Split | None:
        """Take in what was measured since the last call; returns the new split, where it changes.

        Args:
            ledgers: time shares of the parts of each process, by name.
            cores: cores that each process keeps busy.
            ceilings: as of `Load`, of each learner that reports; None where it is not known.
            alive: actors that play.
            now_s: of the monotonic clock.
        """
        last_s, self._last_s = self._last_s, now_s
        load = load_of(ledgers, cores, ceilings, self._idle.since_last())
        if load is None or last_s is None or alive != self.now.actors:
            self._window.clear()  # it is still changing
            return None
        if any(found.get("save", 0.0) > SAVED for found in ledgers.values()):
            return None
        self._window.append((now_s - last_s, load))
        if sum(seconds for seconds, _ in self._window) < WINDOW_S:
            return None
        mean = _mean(self._window)
        self._window.clear()
        return self.decide(mean)

    def decide(self, load: Load) -> Split | None:
        """The split for a load under the present one; None where that is right."""
        found = self._fewer_threads(load) or self._more_actors(load)
        found = found or self._more_threads(load) or self._fewer_actors(load)
        self.now = found or self.now
        return found

    def _more_actors(self, load: Load) -> Split | None:
        now, waits = self.now.actors, min(load.learner_waits, 0.99)
        if waits <= STARVED or load.actor_waits >= BUSY:
            return None
        lacking = math.ceil(now * waits / (1.0 - waits))
        carried = int(load.idle_cores / max(load.actor_cores, 0.01))
        more = min(lacking, carried, now, self._most - now)  # at most twice as many at a time
        more = more // self._learners * self._learners
        text = f"the learner waits {waits:.0%} of its time for data, and "
        text += f"{load.idle_cores:.1f} cores are idle"
        return self.now._replace(actors=now + more, reason=text) if more else None

    def _fewer_actors(self, load: Load) -> Split | None:
        now = self.now.actors
        enough = math.ceil(now * (1.0 - load.actor_waits) / (1.0 - RESERVE))
        enough = max(self._least, -(-enough // self._learners) * self._learners)
        if load.learner_waits >= FED or enough >= now:
            return None
        text = f"actors wait {load.actor_waits:.0%} of their time for the learner"
        return self.now._replace(actors=enough, reason=text)

    def _more_threads(self, load: Load) -> Split | None:
        threads = self.now.threads
        has_room = load.idle_cores >= ROOM * self._learners
        if load.learner_waits >= FED or threads >= self._most_threads or not has_room:
            return None
        self._ceilings.append(load.ceiling)
        self._on_trial = True
        text = f"actors are ahead of the learner, and {load.idle_cores:.1f} cores are idle"
        return self.now._replace(threads=threads + 1, reason=text)

    def _fewer_threads(self, load: Load) -> Split | None:
        """Take the last thread back, where it gives too little, or since the cores are crowded."""
        less = self.now.threads - 1
        if not less:
            return None
        needed = (1.0 + GAIN / less if self._on_trial else COLLAPSE) * self._ceilings[-1]
        self._on_trial = False
        if load.ceiling >= needed:
            return None
        self._most_threads = less
        text = f"a learner trains {load.ceiling:,.0f} steps/s with {less + 1} threads, and "
        text += f"{self._ceilings.pop():,.0f} with {less}"
        return self.now._replace(threads=less, reason=text)


def load_of(
    ledgers: Mapping[str, Shares],
    cores: Shares,
    ceilings: Sequence[float | None],
    idle_cores: float | None,
) -> Load | None:
    """The load of one interval; None where a process has not been measured for all of it."""
    learners = {name: found for name, found in ledgers.items() if name.startswith("learner-")}
    actors = {name: found for name, found in ledgers.items() if name.startswith("actor-")}
    known = [ceiling for ceiling in ceilings if ceiling is not None]
    # A learner that was restarted has no processor time yet, and later no ceiling: its ledger is
    # that of its start, in which it waits for nothing, while all actors wait for it.
    measured = bool(learners) and bool(actors) and learners.keys() | actors.keys() <= cores.keys()
    if not measured or len(known) != len(learners) or idle_cores is None:
        return None
    return Load(
        fmean(found.get("wait", 0.0) for found in learners.values()),
        fmean(found.get("wait", 0.0) for found in actors.values()),
        fmean(cores[name] for name in actors),
        min(idle_cores, max(0.0, usable_cores() - sum(cores.values()))),
        fmean(known),
    )


def _mean(window: list[tuple[float, Load]]) -> Load:
    """The mean of loads, each over so many seconds."""
    total_s = sum(seconds for seconds, _ in window)
    columns = zip(*(load for _, load in window), strict=True)
    lengths = [seconds for seconds, _ in window]
    return Load(*(sum(s * v for s, v in zip(lengths, c, strict=True)) / total_s for c in columns))

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

WINDOW_S = 5.0  # seconds of measurements for one decision
STARVED = 0.05  # share of waiting above which a learner needs more actors
# Below this share of waiting a learner may need fewer actors, or train with more threads.
FED = 0.01
BUSY = 0.1  # share of waiting below which actors are the limit
RESERVE = 0.15  # share of its time that an actor may wait
ROOM = 0.7  # cores that must be idle for one more thread of each learner
# A learner keeps a further thread that gives at least this part of what a thread can give at best.
GAIN = 0.25
# A thread is taken back where a learner trains at less than this part of the rate that it had with
# one thread less: the threads then wait for each other.
COLLAPSE = 0.8
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
    """Cores of the host that nothing keeps busy."""
    ceiling: float
    """Agent steps per second that one learner would train if it never waited for data. It is the
    rate of one learner, as the number of learners changes where one of several fails."""


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
        """Begins with ``actors`` actors, and one thread for each learner.

        Args:
            actors: actors at the start.
            least: fewest actors of a later split.
            most: most actors of a later split.
            most_threads: most threads of each learner.
            learners: number of learners; the number of actors stays a multiple of it.
        """
        self.now = Split(actors, 1, "")
        self._least = least
        self._most = most
        self._learners = learners
        self._most_threads = most_threads

        # Ceilings that were measured with 1, 2, ... threads, up to one less than there are now.
        self._ceilings: list[float] = []
        self._on_trial = False  # whether the last thread was added a window ago

        self._idle = IdleCores()
        # Seconds and load of each interval since the last decision.
        self._window: list[tuple[float, Load]] = []
        self._last_s: float | None = None  # time of the last interval, on the monotonic clock

    @classmethod
    def of(cls, config: Config) -> CoreSplit | None:
        """Returns the rule for a run; None where the config fixes both numbers."""
        actors = config.first_actors
        most = most_actors(config)
        learners = config.learner.most_count

        one_process = TRANSPORTS.one_process(config.transport.kind)
        adapts_threads = config.learner.threads == "auto" and not one_process
        most_threads = int(usable_cores() // learners) if adapts_threads else 1
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
        """Add the measurements since the last call; decide once they span `WINDOW_S` seconds.

        Args:
            ledgers: time shares of the parts of each process, by name.
            cores: cores that each process keeps busy, by name.
            ceilings: `Load.ceiling` of each learner that reports; None where it is not known.
            alive: number of actors that play.
            now_s: time on the monotonic clock.

        Returns:
            The new split; None where the present one stays.
        """
        last_s, self._last_s = self._last_s, now_s
        load = load_of(ledgers, cores, ceilings, self._idle.since_last())

        # While processes start or end, nothing shows what the split gives: the window begins anew.
        if load is None or last_s is None or alive != self.now.actors:
            self._window.clear()
            return None
        if any(shares.get("save", 0.0) > SAVED for shares in ledgers.values()):
            return None

        self._window.append((now_s - last_s, load))
        if sum(seconds for seconds, _ in self._window) < WINDOW_S:
            return None
        mean_load = _mean(self._window)
        self._window.clear()
        return self.decide(mean_load)

    def decide(self, load: Load) -> Split | None:
        """Returns the split for a load that was measured under the present one.

        None where the present split is right.
        """
        split = (
            self._fewer_threads(load)
            or self._more_actors(load)
            or self._more_threads(load)
            or self._fewer_actors(load)
        )
        if split is not None:
            self.now = split
        return split

    def _more_actors(self, load: Load) -> Split | None:
        """Add the actors that a waiting learner lacks, as far as idle cores carry them."""
        actors = self.now.actors
        waits = min(load.learner_waits, 0.99)
        if waits <= STARVED or load.actor_waits >= BUSY:
            return None

        lacking = math.ceil(actors * waits / (1.0 - waits))
        carried = int(load.idle_cores / max(load.actor_cores, 0.01))
        # At most as many are added as there are, so that the number doubles at most.
        more = min(lacking, carried, actors, self._most - actors)
        more = more // self._learners * self._learners
        if not more:
            return None

        reason = (
            f"the learner waits {waits:.0%} of its time for data, and "
            f"{load.idle_cores:.1f} cores are idle"
        )
        return self.now._replace(actors=actors + more, reason=reason)

    def _fewer_actors(self, load: Load) -> Split | None:
        """End the actors that a learner which does not wait can do without."""
        actors = self.now.actors
        # With so many actors each waits for `RESERVE` of its time.
        enough = math.ceil(actors * (1.0 - load.actor_waits) / (1.0 - RESERVE))
        enough = max(self._least, -(-enough // self._learners) * self._learners)
        if load.learner_waits >= FED or enough >= actors:
            return None

        reason = f"actors wait {load.actor_waits:.0%} of their time for the learner"
        return self.now._replace(actors=enough, reason=reason)

    def _more_threads(self, load: Load) -> Split | None:
        """Add a thread to each learner, on trial, where actors are ahead and cores are idle."""
        threads = self.now.threads
        has_room = load.idle_cores >= ROOM * self._learners
        if load.learner_waits >= FED or threads >= self._most_threads or not has_room:
            return None

        self._ceilings.append(load.ceiling)
        self._on_trial = True
        reason = f"actors are ahead of the learner, and {load.idle_cores:.1f} cores are idle"
        return self.now._replace(threads=threads + 1, reason=reason)

    def _fewer_threads(self, load: Load) -> Split | None:
        """Take the last thread back, where it gives too little, or since the cores are crowded."""
        fewer = self.now.threads - 1
        if not fewer:
            return None

        # At best the thread on trial makes the rate larger by 1 / fewer.
        least_factor = 1.0 + GAIN / fewer if self._on_trial else COLLAPSE
        self._on_trial = False
        if load.ceiling >= least_factor * self._ceilings[-1]:
            return None

        self._most_threads = fewer
        reason = (
            f"a learner trains {load.ceiling:,.0f} steps/s with {fewer + 1} threads, and "
            f"{self._ceilings.pop():,.0f} with {fewer}"
        )
        return self.now._replace(threads=fewer, reason=reason)


def load_of(
    ledgers: Mapping[str, Shares],
    cores: Shares,
    ceilings: Sequence[float | None],
    idle_cores: float | None,
) -> Load | None:
    """Returns the load of one interval; None if a process was not measured for all of it.

    Args:
        ledgers: time shares of the parts of each process, by name.
        cores: cores that each process keeps busy, by name.
        ceilings: `Load.ceiling` of each learner that reports; None where it is not known.
        idle_cores: idle cores of the host; None where they were not measured.
    """
    learners = {name: shares for name, shares in ledgers.items() if name.startswith("learner-")}
    actors = {name: shares for name, shares in ledgers.items() if name.startswith("actor-")}
    known_ceilings = [ceiling for ceiling in ceilings if ceiling is not None]

    # A learner that was restarted has no processor time yet, and later no ceiling. Its ledger is
    # then that of its start, in which it waits for nothing, while all actors wait for it.
    has_cores = learners.keys() | actors.keys() <= cores.keys()
    is_measured = bool(learners) and bool(actors) and has_cores
    if not is_measured or len(known_ceilings) != len(learners) or idle_cores is None:
        return None

    return Load(
        learner_waits=fmean(shares.get("wait", 0.0) for shares in learners.values()),
        actor_waits=fmean(shares.get("wait", 0.0) for shares in actors.values()),
        actor_cores=fmean(cores[name] for name in actors),
        idle_cores=min(idle_cores, max(0.0, usable_cores() - sum(cores.values()))),
        ceiling=fmean(known_ceilings),
    )


def _mean(window: list[tuple[float, Load]]) -> Load:
    """Returns the mean of loads, each weighted with its seconds."""
    weights = [seconds for seconds, _ in window]
    total_s = sum(weights)
    fields = zip(*(load for _, load in window), strict=True)
    return Load(
        *(
            sum(weight * value for weight, value in zip(weights, values, strict=True)) / total_s
            for values in fields
        )
    )

"""The processor cores that this process may use, how many are idle, and how many actors fit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.configs.policy_lag import lent_by_batch
from penstock.configs.transports import TRANSPORTS
from penstock.configs.value_types import bounds
from penstock.core import cgroup

if TYPE_CHECKING:
    from penstock.configs.schema import Config

# The most actors for each core; more than one helps where environments wait outside Python.
ACTORS_PER_CORE = 4
STAT = Path("/proc/stat")
# The fields of idle ticks in a core's line: idle, and idle while a disk works.
IDLE = slice(3, 5)


def usable_cores() -> float:
    """Returns the number of cores that this process may use, a fraction under some quotas."""
    present = len(os.sched_getaffinity(0))
    return min(float(present), cgroup.cores() or present)


def most_actors(config: Config) -> int:
    """Returns the most actors that a run may have at a time.

    They are more than at its start only with `actors.count` auto or MIN..MAX. The number never
    changes if all roles are in one process, nor if slots are lent by batch: actors then wait for
    their turn, whatever their number is.
    """
    count = config.actors.count
    is_fixed = TRANSPORTS.one_process(config.transport.kind) or lent_by_batch(config)
    if isinstance(count, int) or is_fixed:
        return config.first_actors
    if count != "auto":
        _, maximum = bounds(count)
        return maximum

    # As many for each learner, by the number of cores.
    learners = config.learner.most_count
    per_learner = int(ACTORS_PER_CORE * usable_cores()) // learners
    return max(config.first_actors, per_learner * learners)


class IdleReading(NamedTuple):
    """A reading of the kernel's count of idle time."""

    idle_s: float | None
    """Seconds for which usable cores have been idle, added up; None if they are not counted."""
    time_s: float
    """The monotonic time of the reading."""


class IdleCores:
    """Measures how many of the usable cores no process has used since the last call."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._last_reading = self._read()

    def since_last(self) -> float | None:
        """Returns the mean number of idle cores since the last call, or since this was made.

        None if the kernel does not count them. The quota of a control group is not subtracted.
        """
        previous = self._last_reading
        reading = self._read()
        self._last_reading = reading
        duration_s = reading.time_s - previous.time_s
        if previous.idle_s is None or reading.idle_s is None or duration_s <= 0:
            return None
        return max(0.0, reading.idle_s - previous.idle_s) / duration_s

    def _read(self) -> IdleReading:
        """Take a reading now."""
        idle_s = self._idle_s()
        return IdleReading(idle_s, time.monotonic())

    def _idle_s(self) -> float | None:
        """Returns the seconds for which usable cores have been idle, added up.

        None if the kernel does not count them for each of these cores.
        """
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None

        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        cores = [fields[1:] for fields in map(str.split, lines) if fields and fields[0] in names]
        if len(cores) < len(names):
            return None
        idle_ticks = sum(int(ticks) for core in cores for ticks in core[IDLE])
        return idle_ticks / self._ticks_per_s

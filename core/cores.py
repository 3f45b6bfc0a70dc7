"""The processor cores that this process may use, how many are idle, and how many actors fit."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

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
    first, learners = config.first_actors, config.learner.most_count
    fixed = TRANSPORTS.one_process(config.transport.kind) or lent_by_batch(config)
    count = config.actors.count
    if isinstance(count, int) or fixed:
        return first
    if count != "auto":
        return bounds(count)[1]
    return max(first, int(ACTORS_PER_CORE * usable_cores()) // learners * learners)


class IdleCores:
    """Measures how many of the usable cores no process has used since the last call."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._before = self._idle_s(), time.monotonic()

    def since_last(self) -> float | None:
        """Returns the mean number of idle cores since the last call, or since this was made.

        None if the kernel does not count them. The quota of a control group is not subtracted.
        """
        (before_s, at_s), self._before = self._before, (self._idle_s(), time.monotonic())
        now_s = self._before[0]
        if before_s is None or now_s is None or self._before[1] <= at_s:
            return None
        return max(0.0, now_s - before_s) / (self._before[1] - at_s)

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
        return sum(int(ticks) for core in cores for ticks in core[IDLE]) / self._ticks_per_s

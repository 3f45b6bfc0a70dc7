"""What must hold: balanced accounting, a named cause, flat memory and descriptors."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

from faults.injection import Struck
from faults.program import Broken, wait_until
from faults.vitals import descriptors, memory, slope
from faults.world import REPEAT_S, World

CAUSE_S = 2.0  # the first event of its like is written at once; "repeated" ones later
LEAST_SAMPLES = 10
MOST_GROWN = 0.10  # of its memory, in the second half of a session
MOST_GROWN_NBYTES = 24 << 20
MOST_GROWN_DESCRIPTORS = 8
OF_THE_RUN = ("end", "stop")
Seen = frozenset[str]
TOLD = ("damaged", "checksum", "corrupt", "not whole")


def check_balance(answer: dict[str, Any]) -> None:
    """produced = trained + dropped + lost + in flight. Raises Broken."""
    found = answer.get("accounting")
    if not found:
        raise Broken(f"the run has no summary: {answer}")
    if not answer.get("accounting_complete", True):  # the learner died: its pages tell the rest
        if (found["produced"] or 0) < (found["trained"] or 0):
            raise Broken(f"more was trained than produced: {found}")
        return
    went = found["trained"] + sum(found["dropped"].values()) + sum(found["lost"].values())
    went += found["in_flight"]
    if found["produced"] != went:
        raise Broken(f"the accounting does not balance, by {found['produced'] - went}: {found}")
    if min(found["produced"], found["trained"], found["in_flight"]) < 0:
        raise Broken(f"the accounting is negative: {found}")
    if not found["produced"] and answer.get("trained_steps"):
        raise Broken(f"produced is 0 beside {answer['trained_steps']} trained steps")


def check_stored(answer: dict[str, Any]) -> None:
    """Of a replay server: inserted = stored + evicted. Raises Broken."""
    evicted = answer.get("evicted", {})
    gone = sum(evicted.values()) if isinstance(evicted, dict) else evicted
    if not answer or answer["inserted"] != answer["stored"] + gone:
        raise Broken(f"inserted is not stored + evicted: {answer}")


class Causes:
    """Looks for the causes of faults in logs/events.jsonl, while that exists.

    An event that is like one of the last ten seconds is counted there and written later. So a
    second death within that time is not waited for: the counts are compared at the end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._deaths: Counter[str] = Counter()

    @property
    def seen(self) -> Seen:
        """The events so far."""
        return frozenset(map(_key, self._world.events() or []))

    def check(self, struck: Struck, seen: Seen) -> bool:
        """Whether there are events at all. Raises Broken where none that is not among ``seen``
        names the role and what befell it."""
        if self._world.events() is None:
            return False
        if "exit" in struck.causes:
            self._deaths[struck.role] += 1

        def named() -> bool:
            events = self._world.events() or []
            latest_s = max((event["uptime_s"] for event in events), default=0.0)
            return any(
                event.get("kind") in struck.causes
                and (event.get("role") == struck.role or event.get("kind") in OF_THE_RUN)
                for event in events
                # One alike that was written a moment ago counts this one, too.
                if _key(event) not in seen or latest_s - event["uptime_s"] < 2 * REPEAT_S + CAUSE_S
            )

        if not wait_until(named, CAUSE_S, 0.1):
            events = self._world.events() or []
            new = [(e.get("kind"), e.get("role")) for e in events if _key(e) not in seen]
            wanted = " or ".join(struck.causes)
            raise Broken(
                f"no event {wanted} of {struck.role} in logs/events.jsonl; there are {new}"
            )
        return True

    def check_counts(self) -> None:
        """At the end: every death has been counted. Raises Broken."""
        counted: Counter[str] = Counter()
        for event in self._world.events() or []:
            if event.get("kind") == "exit":
                counted[str(event.get("role"))] += int(event.get("count", 1))
        for role, deaths in self._deaths.items():
            if counted[role] < deaths:
                raise Broken(f"{role} died {deaths} times, and events count {counted[role]}")


def check_damage_told(world: World) -> None:
    """A damaged checkpoint is never taken without a word. Raises Broken."""
    said = world.main.said.lower()
    texts = [str(event.get("text", "")).lower() for event in world.events() or []]
    if not any(word in text for word in TOLD for text in (said, *texts)):
        raise Broken(f"a damaged checkpoint was taken without a word: {said[-400:]}")


class Vitals:
    """Memory and descriptors of the processes that last, sampled between faults."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._samples: dict[tuple[str, int], list[tuple[float, int, int]]] = {}

    def sample(self) -> None:
        for role in self._world.roles():
            held, open_ = memory(role.pid), descriptors(role.pid)
            if held is not None and open_ is not None:
                key = (f"{role.program.name}/{role.name}", role.pid)
                self._samples.setdefault(key, []).append((time.monotonic(), held, open_))

    def check(self) -> None:
        """Raises Broken where one process has grown beyond what is noise over the second half of
        its samples."""
        for (name, _), samples in self._samples.items():
            half = samples[len(samples) // 2 :]
            if len(half) < LEAST_SAMPLES:
                continue
            times = [at_s for at_s, _, _ in half]
            span_s = times[-1] - times[0]
            held = [float(nbytes) for _, nbytes, _ in half]
            open_ = [float(count) for _, _, count in half]
            least = slope(times, held).interval[0] * span_s
            if least > max(MOST_GROWN * held[0], MOST_GROWN_NBYTES):
                raise Broken(f"the memory of {name} grew by {least / 1e6:.0f} MB in {span_s:.0f} s")
            least = slope(times, open_).interval[0] * span_s
            if least > MOST_GROWN_DESCRIPTORS:
                raise Broken(f"{name} has {least:.0f} descriptors more after {span_s:.0f} s")


def _key(event: dict[str, Any]) -> str:
    return json.dumps(event, sort_keys=True)

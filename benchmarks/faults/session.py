"""One session: a topology, a seed, so many faults; what must hold is checked after each and at the
end."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from faults.injection import Ending, Struck, harm_checkpoint, inject
from faults.invariants import Causes, Seen, Vitals, check_balance, check_damage_told, check_stored
from faults.program import Broken, NotHereError, wait_until
from faults.schedule import Fault, schedule
from faults.topologies import GRACE_S, Topology
from faults.world import LEAVE_S, World

LONGEST_BACKOFF_S = 10.0
FIRST_BACKOFF_S = 0.1
HEALTHY_S = 10.0
SAMPLE_EVERY = 2  # faults


@dataclass
class Result:
    """``recoveries`` are kinds of faults, each with the seconds until training went on; ``failure``
    says what did not hold."""

    topology: str
    seed: int
    faults: int
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    injected: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    unchecked: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    failure: str | None = None
    folder: str | None = None


class Session:
    """``slack`` widens every bound on time, for a machine that does much else."""

    def __init__(
        self,
        topology: Topology,
        seed: int,
        faults: list[Fault],
        *,
        slack: float,
        strict: bool,
        until_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._topology = topology
        self._faults = faults
        self._slack = slack
        self._strict = strict
        self._until_s = until_s
        self._say = say
        self._deaths: dict[str, tuple[int, float]] = {}  # of a role: attempts, when the last was
        self.result = Result(topology.name, seed, len(faults))

    def run(self) -> Result:
        """Never raises but for an interrupt: a failure is in the result, its folder is kept."""
        began_s = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        try:
            with World(self._topology, folder) as world:
                self._inject_all(world)
        except Broken as error:
            self.result.failure = str(error)
        except NotHereError as error:
            self.result.skipped[str(error)] += len(self._faults)
        except Exception:  # a fault of this program is not one of Penstock's
            self.result.failure = "the harness failed: " + traceback.format_exc()
        if self.result.failure is None:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            self.result.folder = str(folder)
        self.result.seconds = time.monotonic() - began_s
        return self.result

    def _inject_all(self, world: World) -> None:
        world.start()
        self._say(f"     started after {world.start_s:.2f} s")
        vitals, causes = Vitals(world), Causes(world)
        fault: Fault | None = None
        try:
            for fault in self._faults:
                if time.monotonic() > self._until_s:
                    break
                if fault.number % SAMPLE_EVERY == 0:
                    vitals.sample()
                self._one(world, fault, causes)
                time.sleep(fault.gap_s)
        except Broken as error:
            where = f"fault {fault.number} ({fault.kind})" if fault else "the start"
            raise Broken(f"{where}: {error}") from error
        if not self._topology.served and not wait_until(world.whole, 30.0 * self._slack, 0.1):
            raise Broken("not every role lives 30 s after the last fault")
        vitals.sample()
        vitals.check()
        answer = world.finish()
        if self._topology.served:
            check_stored(answer)
        else:
            check_balance(answer)
            causes.check_counts()

    def _one(self, world: World, fault: Fault, causes: Causes) -> None:
        seen = causes.seen
        try:
            struck = inject(world, fault)
        except NotHereError as error:
            self.result.skipped[str(error)] += 1
            return
        self._say(f"{fault.number:4} {fault.kind:22} {struck.role}")
        if struck.ending is not None:
            self._ended(world, struck, struck.ending)
            self._named(causes, struck, seen)
            self._resume(world, fault, struck.ending)
        else:
            self._goes_on(world, fault, struck)
            self._named(causes, struck, seen)
        # Clients of a replay server write times, which may pass each other.
        if not self._topology.served and (fallen := world.progress.fallen()):
            raise Broken(fallen)
        self.result.injected += 1

    def _named(self, causes: Causes, struck: Struck, seen: Seen) -> None:
        """The cause is among the events that were not ``seen`` before."""
        if not struck.causes or self._topology.served or not self._strict:
            return
        if not causes.check(struck, seen):
            self.result.unchecked["cause: this version writes no logs/events.jsonl"] += 1

    def _goes_on(self, world: World, fault: Fault, struck: Struck) -> None:
        bound_s = struck.bound_s + (world.start_s if struck.starts else 0.0)
        bound_s = (bound_s + self._backoff(struck)) * self._slack
        found: list[float] = []

        def trains() -> bool:
            if not world.main.runs:
                raise Broken(f"the run ended: {world.main.said.strip()[-800:]}")
            at_s = world.progress.since(struck.from_s)
            found[:] = [] if at_s is None else [at_s]
            return bool(found)

        ends_s = struck.from_s + bound_s
        if not wait_until(trains, max(0.1, ends_s - time.monotonic())):
            raise Broken(f"{struck.role}: no training within {bound_s:.1f} s")
        self._recovered(fault, max(0.0, found[0] - struck.from_s))

    def _backoff(self, struck: Struck) -> float:
        """What the supervisor waits before it starts this role again: twice as long each time, anew
        after it had worked for ten seconds."""
        now_s = time.monotonic()
        attempts, at_s = self._deaths.get(struck.role, (0, -HEALTHY_S))
        attempts = 0 if now_s - at_s > 2 * HEALTHY_S else attempts
        self._deaths[struck.role] = (attempts + 1, now_s)
        if not struck.starts:
            return 0.0
        return min(FIRST_BACKOFF_S * 2.0**attempts, LONGEST_BACKOFF_S)

    def _ended(self, world: World, struck: Struck, ending: Ending) -> None:
        """In time, with the right code, the cause and the accounting."""
        code = world.main.end((GRACE_S + LEAVE_S) * self._slack, None)
        if code not in ending.codes:
            said = world.main.said.strip()[-800:]
            raise Broken(f"exit code {code} instead of {ending.codes}: {said}")
        if ending.role is not None and ending.role not in world.main.said:
            raise Broken(f"what the run said does not name {ending.role}: {world.main.said[-400:]}")
        if ending.accounted:
            check_balance(world.main.answer())
        if len(world.programs) == 1:
            world.check_nothing_left(folders=ending.accounted)

    def _resume(self, world: World, fault: Fault, ending: Ending) -> None:
        began_s = time.monotonic()
        saved = (world.run_dir / "checkpoints" / "last").exists()
        if ending.harm is not None:
            harm_checkpoint(world.run_dir, ending.harm, fault.seed)
        world.start("--resume", "auto")
        if ending.harm is not None:
            check_damage_told(world)
        elif saved and not world.progress.last.get("learner_steps"):
            raise Broken("the resumed run has not gone on from its checkpoint")
        self._recovered(fault, time.monotonic() - began_s)
        self._deaths.clear()

    def _recovered(self, fault: Fault, seconds: float) -> None:
        self.result.recoveries.append((fault.kind, seconds))
        self._say(f"     went on after {seconds:.2f} s")


def make(
    topology: Topology,
    seed: int,
    faults: int,
    *,
    kinds: Collection[str] | None = None,
    slack: float = 1.0,
    strict: bool = True,
    until_s: float = float("inf"),
    verbose: bool = False,
) -> Session:
    """A session of ``faults`` drawn by ``seed``, of ``kinds`` alone if these are given."""
    weights = {k: w for k, w in topology.kinds.items() if kinds is None or k in kinds}

    def say(text: str) -> None:
        if verbose:
            with suppress(OSError):
                print(f"  {topology.name} {text}", file=sys.stderr, flush=True)

    plan = schedule(seed, weights, faults)
    return Session(topology, seed, plan, slack=slack, strict=strict, until_s=until_s, say=say)

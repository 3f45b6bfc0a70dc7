"""A set of processes for the supervisor's decisions, without a process or a clock."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch.decisions import Decisions
from penstock.launch.supervisor_messages import Effect, End, RestartLimits, Start

LEARNER = RoleSpec("learner", 0, "m:f", Stage.LEARNER, informed=True)
CONNECTOR = RoleSpec("connector", 0, "m:f", Stage.CARRIERS)
ACTORS = tuple(RoleSpec("actor", i, "m:f", Stage.ACTORS) for i in range(2))


class Scene:
    """Processes that obey the supervisor's decisions, and a clock that a test advances."""

    def __init__(self, specs: Sequence[RoleSpec], ready: bool = True, **limits: float) -> None:
        self.decisions = Decisions(specs, RestartLimits(**limits))  # type: ignore[arg-type]
        self.now_s = 1000.0
        self.beats: dict[str, float] = {}
        self.phases = {"actor-0": "environment"}
        self.incarnations: dict[str, int] = {}
        self.tick()
        for spec in specs:
            if ready:
                self.decisions.on_ready(spec.name, self.now_s)

    def tick(self, after_s: float = 0.0, beating: Sequence[str] = ()) -> list[Effect]:
        """Advances the clock and returns the effects of a tick."""
        self.now_s += after_s
        self.beats |= dict.fromkeys(beating, self.now_s)
        effects = self.decisions.tick(self.now_s, self.beats, self.phases)
        self.incarnations |= {e.name: e.incarnation for e in effects if isinstance(e, Start)}
        return effects

    def wait(self, seconds: float, beating: Sequence[str] = ()) -> list[Effect]:
        """Ticks through ``seconds``, one second at a time, and returns all effects."""
        return [e for _ in range(int(seconds)) for e in self.tick(1.0, beating)]

    def ends(self, name: str, code: int, produced: int = 0, log: str = "") -> list[Effect]:
        """Ends a role's process and returns the effects."""
        end = End(code, produced, produced // 10, self.incarnations.get(name, 0), log)
        return self.decisions.on_ended(name, end, self.now_s)

    def crash_and_restart(self, name: str, produced: int = 0) -> float:
        """Returns the seconds from a crash to the new start."""
        self.ends(name, 1, produced)
        waited_s = 0.0
        while not any(isinstance(e, Start) for e in self.tick(0.05)):
            waited_s += 0.05
        return round(waited_s, 2)

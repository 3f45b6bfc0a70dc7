"""A program that supervises roles of `tiny_roles`, and prints how it ended as one JSON line.

Arguments: a JSON object {"dir": ..., "actors": [...], "learner": ..., "limits": {...}};
several are "learners": [...].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from penstock.core.interfaces import EngineContext, Json, MetricSink, RunEvent
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.run_dir import run_folder
from penstock.core.runtime_folder import RuntimeFolder
from penstock.launch.engines.local import LocalEngine
from penstock.launch.supervisor import Supervisor
from penstock.launch.supervisor_messages import RestartLimits
from penstock.launch.topology import role_arguments


class Ears(MetricSink):
    """Keeps what a sink receives; says on standard error that the run has come alive."""

    def __init__(self, fault: bool) -> None:
        self.notes: list[str] = []
        self.last: dict[str, Any] = {}
        self._fault = fault

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, file=sys.stderr, flush=True)

    def event(self, event: RunEvent) -> bool:
        assert event.result is None, "tiny roles have no results"
        if event.kind in ("note", "restart"):
            self.note(event.text)
        return False

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        if self._fault:
            raise RuntimeError("a fault of the supervisor itself")
        if not self.last:
            print("metrics", file=sys.stderr, flush=True)
        self.last |= metrics


def main() -> None:
    plan = json.loads(sys.argv[1])
    run_dir = Path(plan["dir"])
    learners = [plan["learner"]] if "learner" in plan else plan.get("learners", [])
    specs = [
        RoleSpec("actor", i, f"tiny_roles:{main}", Stage.ACTORS, learner=i % max(1, len(learners)))
        for i, main in enumerate(plan.get("actors", []))
    ]
    specs += [
        RoleSpec("learner", i, f"tiny_roles:{main}", Stage.LEARNER, informed=True, learner=i)
        for i, main in enumerate(learners)
    ]
    ears = Ears(plan.get("fault", False))
    with run_folder(run_dir, "auto") as lock, RuntimeFolder() as runtime_dir:
        arguments = role_arguments(run_dir, runtime_dir)
        limits = RestartLimits(**plan.get("limits", {}))
        engine = LocalEngine(EngineContext(runtime_dir, (lock,)))
        supervisor = Supervisor(specs, limits, arguments, run_dir / "logs", ears, engine)
        outcome = supervisor.run()
    failure = outcome.failure and vars(outcome.failure)
    print(json.dumps({"notes": ears.notes, "last": ears.last, "failure": failure}))
    print(json.dumps({"exit_code": outcome.exit_code, "reason": outcome.reason}))


if __name__ == "__main__":
    main()

"""Watches a run from within its supervisor: lets it warm up, takes the window, ends the run.

Everything happens in the ticks of the supervisor, in its thread, and asks nothing of the processes:
what they do stands in the memory that they share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from penstock.launch.profile.data import Window
from penstock.launch.profile.readings import (
    MAIN,
    SUPERVISOR,
    Reading,
    Thread,
    read,
    read_own,
    spans,
    threads,
)
from penstock.launch.supervisor import Audience, Supervisor
from penstock.launch.topology import Stage

WARM_UP_S = 3.0  # of training, before the window begins
TORCH_TURNS = 20  # of the learner, under torch's profiler,
TORCH_S = 5.0  # or so long, if that is over first
TORCH_PATIENCE_S = 60.0  # until its trace must be there
DONE = "profiled"


class State(Enum):
    """Where the watch is."""

    WARMING = "warming"
    WINDOW = "window"
    TORCH = "torch"
    OVER = "over"


class Watch:
    """One window of ``seconds`` over one run, whose `Audience` it is in front of another.

    ``torch_trace`` is where the first learner is to leave a trace of torch's profiler, after the
    window.
    """

    def __init__(self, seconds: float, torch_trace: Path | None = None) -> None:
        self._seconds = seconds
        self._torch_trace = torch_trace
        self._supervisor: Supervisor | None = None
        self._audience: Audience | None = None
        self._state = State.WARMING
        self._training_s: float | None = None  # since when
        self._torch_until_s = 0.0
        self._begin: dict[str, Reading] = {}
        self._begin_ns = 0
        self._metrics: list[tuple[int, Mapping[str, Any]]] = []
        self.window: Window | None = None
        self.threads: list[Thread] = []
        self.interrupted = False

    def attach(self, supervisor: Supervisor, audience: Audience) -> None:
        """Watch the processes of ``supervisor``, and tell ``audience`` what it says."""
        self._supervisor, self._audience = supervisor, audience

    def note(self, text: str) -> None:
        assert self._audience is not None
        self._audience.note(text)

    def metrics(self, metrics: dict[str, Any], *, final: bool) -> None:
        assert self._audience is not None
        self._audience.metrics(metrics, final=final)
        if final or self.window is not None:
            return
        self._metrics.append((time.perf_counter_ns(), metrics))
        if self._training_s is None and metrics.get("learner_steps"):
            self._training_s = time.monotonic()

    def tick(self) -> None:
        assert self._audience is not None
        assert self._supervisor is not None
        self._audience.tick()
        self._move(self._supervisor, time.monotonic())

    def _move(self, supervisor: Supervisor, now_s: float) -> None:
        if self._state is State.OVER:
            return
        if self._state is State.WARMING:
            if supervisor.stopping:
                self._state = State.OVER
            elif self._training_s is not None and now_s >= self._training_s + WARM_UP_S:
                self._open(supervisor)
        elif self._state is State.WINDOW:
            left_ns = self._begin_ns + self._seconds * 1e9 - time.perf_counter_ns()
            if left_ns <= 0 or supervisor.stopping:
                self._close(supervisor)
        elif self._has_torch_trace() or supervisor.stopping or now_s >= self._torch_until_s:
            self._end(supervisor)

    def _open(self, supervisor: Supervisor) -> None:
        self._state = State.WINDOW
        self._begin = _readings(supervisor)
        self._begin_ns = time.perf_counter_ns()
        del self._metrics[:-1]

    def _close(self, supervisor: Supervisor) -> None:
        self.interrupted = supervisor.stopping
        end_ns = time.perf_counter_ns()
        self.window = Window(
            self._begin, _readings(supervisor), self._begin_ns, end_ns, self._metrics
        )
        for child in supervisor.children.values():
            self.threads += threads(child.spec, child.pid, child.status, self._begin_ns)
        own = spans(supervisor.ledger.lane, self._begin_ns)
        self.threads.append(Thread(SUPERVISOR.name, os.getpid(), MAIN, 0, own))
        learner = min(
            (c for c in supervisor.children.values() if c.spec.stage is Stage.LEARNER),
            key=lambda child: child.spec.learner,
            default=None,
        )
        if self._torch_trace is None or learner is None or supervisor.stopping:
            self._end(supervisor)
            return
        self._state = State.TORCH
        self._torch_until_s = time.monotonic() + TORCH_PATIENCE_S
        learner.send(
            {
                "kind": "torch_profile",
                "path": str(self._torch_trace.absolute()),
                "turns": TORCH_TURNS,
                "seconds": TORCH_S,
            }
        )

    def _has_torch_trace(self) -> bool:
        return self._torch_trace is not None and self._torch_trace.exists()

    def _end(self, supervisor: Supervisor) -> None:
        self._state = State.OVER
        if not supervisor.stopping:
            supervisor.stop(DONE)


def _readings(supervisor: Supervisor) -> dict[str, Reading]:
    children = supervisor.children.items()
    found = {name: read(child.spec, child.pid, child.status) for name, child in children}
    return found | {SUPERVISOR.name: read_own(supervisor.ledger)}

"""Watches a run in its supervisor: waits for the warm-up, measures the window, ends the run.

Everything happens in the ticks of the supervisor, in its thread, and asks nothing of the processes:
what they do is in what they share with their engine, or with that of their host.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from penstock.core.cores import IdleCores
from penstock.core.interfaces import Handle, Json, MetricSink
from penstock.core.notes import note_logger
from penstock.core.role_spec import Stage
from penstock.launch.supervisor import Supervisor
from penstock.profiling.report.readings import (
    MAIN,
    SUPERVISOR,
    Reading,
    Thread,
    read_own,
    spans,
)
from penstock.profiling.report.window import GPU, ProfileWindow

WARM_UP_S = 3.0
PATIENCE_S = 60.0
WORD_S = 15.0
TORCH_TURNS = 20
TORCH_S = 5.0
TORCH_PATIENCE_S = 60.0
SPANS_PATIENCE_S = 10.0
DONE = "profiled"
logger = note_logger(__name__)


class WatchState(Enum):
    """State of the watch, in this order."""

    WARMING = "warming"
    WINDOW = "window"
    SPANS = "spans"
    TORCH = "torch"
    OVER = "over"


class Watch(MetricSink):
    """Measures one window of ``seconds`` of one run.

    After the window the first learner, if it runs on this host, leaves traces of torch's profiler:
    of its GPU, where it has one, in ``kernels``, and of everything in ``torch_trace``, if given.

    Give `on_role_end` to the `Supervisor` of the run, then call `attach`, and add the watch to the
    sinks of the run.
    """

    def __init__(self, seconds: float, kernels: Path, torch_trace: Path | None = None) -> None:
        self._seconds = seconds
        self._kernels = kernels
        self._torch_trace = torch_trace
        self._to_trace: deque[tuple[str, Path]] = deque()  # the first of them is being made
        self._supervisor: Supervisor | None = None
        self._state = WatchState.WARMING

        self._waiting_s: float | None = None  # since when there is a learner,
        self._training_s: float | None = None  # and since when it has trained
        self._torch_until_s = 0.0
        self._begin: dict[str, Reading] = {}
        self._begin_ns = 0
        self._metrics: list[tuple[int, Json]] = []
        self._ended: list[Reading] = []  # processes that have ended in the window
        self.window: ProfileWindow | None = None
        self.threads: list[Thread] = []
        self._awaited: dict[str, Handle] = {}  # whose spans are on their way
        self._spans_until_s = 0.0
        self.cores: float | None = None
        """Those of all hosts of the engine's cluster; None without one."""
        self.idle_cores: float | None = None
        """Of this host, in the window; None where that is not known, and on a cluster."""
        self._idle: IdleCores | None = None  # counts since the window began
        self.learner_host: str | None = None
        """Where the first learner ran in the window."""
        self.learner_threads: int | None = None
        """As `Supervisor.learner_threads` at the end of the window."""
        self.without_spans: list[str] = []
        """Processes of other hosts whose spans did not arrive."""
        self.interrupted = False

    def attach(self, supervisor: Supervisor, hosts: Sequence[int] = ()) -> None:
        """Watch the processes of ``supervisor``.

        Args:
            supervisor: that of the run, which calls `on_role_end`.
            hosts: cores of each other host that the processes run on.
        """
        self._supervisor = supervisor
        self.cores = float(sum(hosts)) if hosts else None
        supervisor.last_look = self._last_look

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        if final or self.window is not None:
            return
        self._metrics.append((time.perf_counter_ns(), metrics))
        if self._waiting_s is None:
            self._waiting_s = time.monotonic()
        if self._training_s is None and metrics.get("learner_steps"):
            self._training_s = time.monotonic()

    def tick(self) -> None:
        assert self._supervisor is not None
        self._move(self._supervisor, time.monotonic())

    def _move(self, supervisor: Supervisor, now_s: float) -> None:
        if self._state is WatchState.OVER:
            return
        if self._state is WatchState.WARMING:
            if supervisor.stopping:
                self._state = WatchState.OVER
            elif self._warm(now_s):
                self._open(supervisor)
        elif self._state is WatchState.WINDOW:
            left_ns = self._begin_ns + self._seconds * 1e9 - time.perf_counter_ns()
            if left_ns <= 0 or supervisor.stopping:
                self._close(supervisor)
        elif self._state is WatchState.SPANS:
            self._take_spans()
            for name in self._awaited.keys() - supervisor.handles.keys():  # it has ended
                self.without_spans.append(name)
                del self._awaited[name]
            if not self._awaited or supervisor.stopping or now_s >= self._spans_until_s:
                self.without_spans += self._awaited
                self._begin_traces(supervisor, now_s)
        elif self._to_trace[0][1].exists():
            self._to_trace.popleft()
            self._trace(supervisor, now_s)
        elif supervisor.stopping or now_s >= self._torch_until_s:
            self._end(supervisor)

    def _warm(self, now_s: float) -> bool:
        """Whether the window may start, which it also does if the learner never trains."""
        if self._training_s is not None:
            return now_s >= self._training_s + WARM_UP_S
        if self._waiting_s is None or now_s < self._waiting_s + WORD_S:
            return False

        if now_s < self._waiting_s + PATIENCE_S:
            logger.info(
                f"no optimizer step yet: the profiled window starts {WARM_UP_S:g} s after the "
                f"first step, or at the latest {PATIENCE_S:g} s after the learner began to wait"
            )
            return False

        logger.info(
            f"no optimizer step in {PATIENCE_S:g} s: the profiled window starts now, to show the "
            "cause"
        )
        return True

    def _open(self, supervisor: Supervisor) -> None:
        self._state = WatchState.WINDOW
        self._idle = IdleCores() if self.cores is None else None
        self._begin = _readings(supervisor)
        self._begin_ns = time.perf_counter_ns()
        del self._metrics[:-1]

    def _last_look(self, handle: Handle) -> None:
        """A process has ended."""
        if self._state is WatchState.WINDOW:
            self._ended.append(read(handle))
            found = handle.spans(self._begin_ns) if handle.shares_memory else None
            self.threads += found or ()
            if found is None:
                self.without_spans.append(handle.spec.name)

    def _close(self, supervisor: Supervisor) -> None:
        self.interrupted = supervisor.stopping
        end_ns = time.perf_counter_ns()
        self.window = ProfileWindow(
            self._begin,
            _readings(supervisor),
            self._begin_ns,
            end_ns,
            self._metrics,
            self._ended,
        )
        self.idle_cores = self._idle.since_last() if self._idle else None
        own = spans(supervisor.ledger.lane, self._begin_ns)
        self.threads.append(Thread(SUPERVISOR.name, os.getpid(), MAIN, 0, own))
        learner = _first_learner(supervisor)
        self.learner_host = None if learner is None else learner.host
        self.learner_threads = supervisor.learner_threads

        self._state = WatchState.SPANS
        self._awaited = dict(supervisor.handles)
        now_s = time.monotonic()
        self._spans_until_s = now_s + SPANS_PATIENCE_S
        self._move(supervisor, now_s)

    def _take_spans(self) -> None:
        for name, handle in list(self._awaited.items()):
            found = handle.spans(self._begin_ns)
            if found is not None:
                self.threads += found
                del self._awaited[name]

    def _begin_traces(self, supervisor: Supervisor, now_s: float) -> None:
        """Choose the traces of torch's profiler, and request the first one."""
        learner = _first_learner(supervisor)
        self._state = WatchState.TORCH
        if learner is None or learner.host != socket.gethostname():
            learner = None  # its files would be on its host
        if learner is not None and GPU in read(learner).lanes:
            self._to_trace.append((learner.spec.name, self._kernels))
        if learner is not None and self._torch_trace is not None:
            self._to_trace.append((learner.spec.name, self._torch_trace))
        self._trace(supervisor, now_s)
        # A learner of another host would write the files there.

    def _trace(self, supervisor: Supervisor, now_s: float) -> None:
        """Request the next trace, or end the run if there is none."""
        name, path = self._to_trace[0] if self._to_trace else ("", Path())
        learner = supervisor.handles.get(name)
        if learner is None or supervisor.stopping:
            self._end(supervisor)
            return

        self._torch_until_s = now_s + TORCH_PATIENCE_S
        learner.send(
            {
                "kind": "torch_profile",
                "path": str(path.absolute()),
                "turns": TORCH_TURNS,
                "seconds": TORCH_S,
                "host": path == self._torch_trace,
            }
        )

    def _end(self, supervisor: Supervisor) -> None:
        self._state = WatchState.OVER
        if not supervisor.stopping:
            supervisor.stop(DONE)


def _first_learner(supervisor: Supervisor) -> Handle | None:
    return min(
        (h for h in supervisor.handles.values() if h.spec.stage is Stage.LEARNER),
        key=lambda handle: handle.spec.learner,
        default=None,
    )


def read(handle: Handle) -> Reading:
    """Returns the present figures of a role that runs or has just ended."""
    usage, status = handle.usage(), handle.status()
    return Reading(
        spec=handle.spec,
        pid=usage.pid,
        at_ns=usage.at_ns,
        lanes={thread.name: thread.seconds for thread in usage.threads},
        cpu_s=math.nan if usage.cpu_s is None else usage.cpu_s,
        coreless_s=usage.coreless_s,
        played_steps=status.played_steps,
        trained_steps=status.trained_steps,
        slots=status.sequence,
    )


def _readings(supervisor: Supervisor) -> dict[str, Reading]:
    found = {name: read(handle) for name, handle in supervisor.handles.items()}
    return found | {SUPERVISOR.name: read_own(supervisor.ledger)}

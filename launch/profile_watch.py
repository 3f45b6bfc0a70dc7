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
    read_spans,
    read_supervisor,
)
from penstock.profiling.report.window import GPU, ProfileWindow

WARM_UP_S = 3.0
"""Seconds of training before the window begins."""
PATIENCE_S = 60.0
"""Seconds to wait for a learner's first optimizer step; then the window begins without one."""
WORD_S = 15.0
"""Seconds of such waiting after which a note says so."""
TORCH_TURNS = 20
"""Turns of the learner that torch's profiler traces."""
TORCH_S = 5.0
"""Most seconds that torch's profiler traces."""
TORCH_PATIENCE_S = 60.0
"""Most seconds until a trace of torch's profiler must be written."""
SPANS_PATIENCE_S = 10.0
"""Most seconds until other hosts must have sent the spans of their processes."""
DONE = "profiled"
"""The reason of a run's end after its window."""
logger = note_logger(__name__)


class WatchState(Enum):
    """State of the watch, in this order."""

    WARMING = "warming"
    """The run starts, and trains for `WARM_UP_S`."""
    WINDOW = "window"
    """The window is open."""
    SPANS = "spans"
    """The window is closed, and spans of processes on other hosts are on their way."""
    TORCH = "torch"
    """The first learner runs under torch's profiler."""
    OVER = "over"


class ProfileWatch(MetricSink):
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
        self._supervisor: Supervisor | None = None
        self._state = WatchState.WARMING

        self._waiting_since_s: float | None = None  # since the learner's first metrics
        self._training_since_s: float | None = None  # since those of its first optimizer step
        self._metrics: list[tuple[int, Json]] = []  # with the times of their arrival, ns
        self._readings_at_begin: dict[str, Reading] = {}
        self._begin_ns = 0
        self._idle: IdleCores | None = None  # counts since the window began
        self._ended: list[Reading] = []  # processes that have ended in the window
        self._awaiting_spans: dict[str, Handle] = {}  # roles whose spans are on their way
        self._spans_deadline_s = 0.0
        self._pending_traces: deque[tuple[str, Path]] = deque()  # learner and file of each
        self._trace_deadline_s = 0.0  # of the first of them, which is being made

        self.window: ProfileWindow | None = None
        """The measurements, once the window is closed."""
        self.threads: list[Thread] = []
        """What the threads of all processes did in the window."""
        self.cores: float | None = None
        """Cores of all hosts of the engine's cluster; None without one."""
        self.idle_cores: float | None = None
        """Idle cores of this host in the window; None if that is not known, and on a cluster."""
        self.learner_host: str | None = None
        """Where the first learner ran in the window."""
        self.learner_threads: int | None = None
        """As `Supervisor.learner_threads` at the end of the window."""
        self.without_spans: list[str] = []
        """Processes of other hosts whose spans did not arrive."""
        self.interrupted = False
        """Whether the run was stopped before the end of the window."""

    def attach(self, supervisor: Supervisor, hosts: Sequence[int] = ()) -> None:
        """Watch the processes of ``supervisor``.

        Args:
            supervisor: that of the run, which calls `on_role_end`.
            hosts: cores of each other host that the processes run on.
        """
        self._supervisor = supervisor
        self.cores = float(sum(hosts)) if hosts else None

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        if final or self.window is not None:
            return
        self._metrics.append((time.perf_counter_ns(), metrics))
        if self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        if self._training_since_s is None and metrics.get("learner_steps"):
            self._training_since_s = time.monotonic()

    def tick(self) -> None:
        assert self._supervisor is not None
        self._advance(self._supervisor, time.monotonic())

    def on_role_end(self, handle: Handle) -> None:
        """Read a process that has ended in the window, before it is reaped."""
        if self._state is not WatchState.WINDOW:
            return
        self._ended.append(take_reading(handle))
        spans_of_process = handle.spans(self._begin_ns) if handle.shares_memory else None
        if spans_of_process is None:
            self.without_spans.append(handle.spec.name)
        else:
            self.threads += spans_of_process

    def _advance(self, supervisor: Supervisor, now_s: float) -> None:
        """Do what is due in the present state, which may lead to the next one."""
        match self._state:
            case WatchState.WARMING:
                if supervisor.stopping:
                    self._state = WatchState.OVER
                elif self._is_warm(now_s):
                    self._open_window(supervisor)
            case WatchState.WINDOW:
                remaining_ns = self._begin_ns + self._seconds * 1e9 - time.perf_counter_ns()
                if remaining_ns <= 0 or supervisor.stopping:
                    self._close_window(supervisor)
            case WatchState.SPANS:
                self._await_spans(supervisor, now_s)
            case WatchState.TORCH:
                self._await_trace(supervisor, now_s)
            case WatchState.OVER:
                pass

    def _is_warm(self, now_s: float) -> bool:
        """Whether the window may begin, which it also does if the learner never trains."""
        if self._training_since_s is not None:
            return now_s >= self._training_since_s + WARM_UP_S
        if self._waiting_since_s is None or now_s < self._waiting_since_s + WORD_S:
            return False

        if now_s < self._waiting_since_s + PATIENCE_S:
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

    def _open_window(self, supervisor: Supervisor) -> None:
        """Begin the measurement."""
        self._state = WatchState.WINDOW
        self._idle = IdleCores() if self.cores is None else None
        self._readings_at_begin = _readings(supervisor)
        self._begin_ns = time.perf_counter_ns()
        del self._metrics[:-1]

    def _close_window(self, supervisor: Supervisor) -> None:
        """End the measurement, and request the spans of processes that still run."""
        self.interrupted = supervisor.stopping
        end_ns = time.perf_counter_ns()
        self.window = ProfileWindow(
            begin=self._readings_at_begin,
            end=_readings(supervisor),
            begin_ns=self._begin_ns,
            end_ns=end_ns,
            metrics=self._metrics,
            ended=self._ended,
        )
        if self._idle is not None:
            self.idle_cores = self._idle.since_last()
        supervisor_spans = read_spans(supervisor.ledger.lane, self._begin_ns)
        self.threads.append(Thread(SUPERVISOR.name, os.getpid(), MAIN, 0, supervisor_spans))
        learner = _first_learner(supervisor)
        self.learner_host = None if learner is None else learner.host
        self.learner_threads = supervisor.learner_threads

        self._state = WatchState.SPANS
        self._awaiting_spans = dict(supervisor.handles)
        now_s = time.monotonic()
        self._spans_deadline_s = now_s + SPANS_PATIENCE_S
        self._await_spans(supervisor, now_s)

    def _await_spans(self, supervisor: Supervisor, now_s: float) -> None:
        """Take the spans that have arrived; begin the traces when no others are awaited."""
        for name, handle in list(self._awaiting_spans.items()):
            spans_of_process = handle.spans(self._begin_ns)
            if spans_of_process is not None:
                self.threads += spans_of_process
                del self._awaiting_spans[name]

        for name in self._awaiting_spans.keys() - supervisor.handles.keys():  # it has ended
            self.without_spans.append(name)
            del self._awaiting_spans[name]

        is_late = supervisor.stopping or now_s >= self._spans_deadline_s
        if is_late or not self._awaiting_spans:
            self.without_spans += self._awaiting_spans
            self._begin_traces(supervisor, now_s)

    def _begin_traces(self, supervisor: Supervisor, now_s: float) -> None:
        """Choose the traces of torch's profiler, and request the first one."""
        self._state = WatchState.TORCH
        learner = _first_learner(supervisor)
        # A learner of another host would write the files there.
        if learner is not None and learner.host == socket.gethostname():
            if GPU in take_reading(learner).lanes:
                self._pending_traces.append((learner.spec.name, self._kernels))
            if self._torch_trace is not None:
                self._pending_traces.append((learner.spec.name, self._torch_trace))
        self._request_trace(supervisor, now_s)

    def _request_trace(self, supervisor: Supervisor, now_s: float) -> None:
        """Have the learner make the next trace, or end the run if there is none."""
        if not self._pending_traces:
            self._end_run(supervisor)
            return
        name, path = self._pending_traces[0]
        learner = supervisor.handles.get(name)
        if learner is None or supervisor.stopping:
            self._end_run(supervisor)
            return

        self._trace_deadline_s = now_s + TORCH_PATIENCE_S
        learner.send(
            {
                "kind": "torch_profile",
                "path": str(path.absolute()),
                "turns": TORCH_TURNS,
                "seconds": TORCH_S,
                "host": path == self._torch_trace,
            }
        )

    def _await_trace(self, supervisor: Supervisor, now_s: float) -> None:
        """Request the next trace when the present one is written; end the run if it is late."""
        _, path = self._pending_traces[0]
        if path.exists():
            self._pending_traces.popleft()
            self._request_trace(supervisor, now_s)
        elif supervisor.stopping or now_s >= self._trace_deadline_s:
            self._end_run(supervisor)

    def _end_run(self, supervisor: Supervisor) -> None:
        self._state = WatchState.OVER
        if not supervisor.stopping:
            supervisor.stop(DONE)


def _first_learner(supervisor: Supervisor) -> Handle | None:
    """The process of the learner with the lowest rank that runs."""
    learners = [h for h in supervisor.handles.values() if h.spec.stage is Stage.LEARNER]
    return min(learners, key=lambda handle: handle.spec.learner, default=None)


def take_reading(handle: Handle) -> Reading:
    """Returns the present figures of a role that runs or has just ended."""
    usage = handle.usage()
    status = handle.status()
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
    """Figures of all processes by name, the supervisor's own among them."""
    readings = {name: take_reading(handle) for name, handle in supervisor.handles.items()}
    readings[SUPERVISOR.name] = read_supervisor(supervisor.ledger)
    return readings

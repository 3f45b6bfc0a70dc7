"""The commands that run processes: a whole run, a learner by hand, actors by hand.

Each resolves what it is asked to do, makes the folders, and lets a `Supervisor` work; each returns
the exit code: 0 done, 2 the user's mistake, 1 a fault, 130 or 143 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, Resolved, dump
from penstock.configs.secrets import redacted, resolve
from penstock.configs.sections import RunConfig
from penstock.core.files import write_atomic
from penstock.core.processes import die_with
from penstock.core.role_spec import RoleSpec
from penstock.core.run_dir import (
    Resume,
    check_not_replaced,
    default_run_dir,
    run_folder,
    runtime_folder,
)
from penstock.launch import actor_socket, topology
from penstock.launch.callbacks import Hooks, Run
from penstock.launch.machines import LearnerPlace, check_place, where_to_write
from penstock.launch.process import role_arguments
from penstock.launch.resumed import begin_from, differences, find_source, resolve_resumed
from penstock.launch.run_attempt import Attempt, missing, undone_where_refused
from penstock.launch.supervisor import Supervisor
from penstock.launch.supervisor_messages import Outcome, RestartLimits
from penstock.monitor import summary as last_words
from penstock.monitor.events import EventLog
from penstock.monitor.record import Record
from penstock.monitor.sinks import check_libraries, writers
from penstock.monitor.view import View, make_view

if TYPE_CHECKING:
    from penstock.launch.profile_watch import Watch

TRACEBACK_LINES = 40
SHOWN = ("note", "restart", "refused", "rollback")  # events that the user sees at once
AGAIN_S = 60.0  # between two times that the same note is shown
NOTES = 1000  # different ones that are counted


@dataclass
class _Note:
    """A note that was shown or waits for a view."""

    clock: str  # when it was last said, as far as it was shown
    count: int = 0  # since it was last shown
    next_s: float = 0.0  # when it may be shown again


class RunReporter:
    """Hears what the supervisor has to say: shows it, and has it written down.

    Neither a full disk nor a closed terminal ends a run. The view is made at the first tick, when
    the processes have been started: what it imports must not delay them.
    """

    def __init__(
        self,
        view: Callable[[], View],
        record: Record | None,
        hooks: Hooks | None = None,
        events: EventLog | None = None,
    ) -> None:
        self._make_view = view
        self._view: View | None = None
        self._record = record
        self._hooks = hooks
        self._events = events
        if hooks is not None:
            hooks.note = self.note
        self._notes: dict[str, _Note] = {}

    def tick(self) -> None:
        if self._events is not None:
            self._events.tick()
        if self._view is None:
            with suppress(OSError):
                self._view = self._make_view()
                for text, note in self._notes.items():
                    self._show_note(self._view, text, note)

    def note(self, text: str) -> None:
        """A sentence for the user."""
        self.log("note", text)

    def log(
        self,
        kind: str,
        text: str,
        role: str | None = None,
        incarnation: int | None = None,
        data: Mapping[str, Any] | None = None,
        *,
        reported: bool = False,
    ) -> None:
        """Have an event written, and shown if it is for the user."""
        shown, text = reported or kind in SHOWN, redacted(text)
        if self._events is None:
            pass
        elif not reported:
            self._events.add(kind, text, role, incarnation, data)
        else:
            shown = self._events.report(kind, text, role or "", incarnation or 0, data or {})
        if shown:
            self._count_note(text)

    def _count_note(self, text: str) -> None:
        """Show a note at once, or count it where it was shown less than a minute ago: every actor
        may say the same."""
        if len(self._notes) >= NOTES and text not in self._notes:
            del self._notes[next(iter(self._notes))]
        note = self._notes.setdefault(text, _Note(time.strftime("%H:%M:%S")))
        note.count += 1
        if self._view is not None and time.monotonic() >= note.next_s:
            note.clock = time.strftime("%H:%M:%S")
            self._show_note(self._view, text, note)

    def _show_note(self, view: View, text: str, note: _Note) -> None:
        often = f" ({note.count} times)" if note.count > 1 and note.next_s else ""
        note.count, note.next_s = 0, time.monotonic() + AGAIN_S
        with suppress(OSError):
            view.note(f"{note.clock} {text}{often}")

    def metrics(self, metrics: dict[str, Any], *, final: bool) -> None:
        if self._record is None:
            return
        try:
            self._record.final(metrics) if final else self._record.metrics(metrics)
        except OSError as error:
            name = error.filename or "metrics.jsonl"
            self.note(f"{name} cannot be written: {error.strerror}")
        if self._view is not None:
            with suppress(OSError):
                self._view.show(self._record.last)

    def event(self, kind: str, message: dict[str, Any]) -> bool:
        """An "evaluation" or a "checkpoint"; whether a callback asks to end the run."""
        if kind == "evaluation" and self._record is not None:
            try:
                self._record.evaluation(message)
            except OSError as error:
                self.note(f"evaluations.jsonl cannot be written: {error.strerror}")
        return self._hooks is not None and self._hooks.event(kind, message)

    def end(self, outcome: Outcome) -> None:
        """The run has ended."""
        about = {"exit_code": outcome.exit_code, "reason": outcome.reason, "error": outcome.error}
        self.log("end", outcome.error or f"ended by {outcome.reason}", data=about)

    def close(self) -> None:
        if self._view is not None:
            with suppress(OSError):
                self._view.close()


def train(
    target: str,
    overrides: Sequence[str],
    resume: Resume,
    as_json: bool,
    source: str | None = None,
) -> int:
    """Learner and actors on this host; ``source`` is what ``--resume-from`` names."""
    resolved = resolve_resumed(target, overrides, resume, source)
    make_specs = partial(topology.train, resolved.config)
    return _with_learner(resolved, _run_dir(resolved), resume, as_json, make_specs, source)


def learner(
    target: str,
    overrides: Sequence[str],
    bind: str | None,
    place: LearnerPlace | None,
    resume: Resume,
    as_json: bool,
    source: str | None = None,
) -> int:
    """Learners that actors join from elsewhere: all of the run, or the one of a ``place``;
    ``source`` is what ``--resume-from`` names."""
    if bind is not None:
        overrides = [*overrides, f"transport.bind={bind}"]
    if place is not None:
        overrides = [*overrides, f"learner.count={place.world}"]
    resolve = partial(resolve_resumed, target, resume=resume, source=source)
    if place is not None and place.rank:  # it has its state from rank 0
        resolve, source = partial(resolve, source=source or ""), None
    resolved = resolve(overrides)
    write_to = _run_dir(resolved)
    if place is not None:
        check_place(place, resolved.config, os.environ)
        write_to, resume = where_to_write(place, write_to, resume)
    if place is not None and place.torchrun:
        die_with(os.getppid(), signal.SIGTERM)  # it has nobody else, should torchrun be killed
    in_folder = resolved.config.transport.bind is None
    if in_folder:
        resolved = resolve([*overrides, f"transport.bind={actor_socket.address_in(write_to)}"])
    config = resolved.config
    address = config.transport.bind
    assert address is not None

    def make_specs(runtime_dir: Path) -> Sequence[RoleSpec]:
        if place is None:
            specs = topology.learner(config, address, runtime_dir)
        else:
            specs = topology.one_of_several(config, address, place.rank, place.store)
        if in_folder:
            actor_socket.make_folder(write_to)
            for spec in specs:
                if spec.role == "connector":
                    print(f"actors join by: penstock actor --connect {spec.address}", file=stream)
        return specs

    stream = sys.stderr if as_json else sys.stdout
    return _with_learner(resolved, write_to, resume, as_json, make_specs, source)


def actors(
    connect: str,
    count: int,
    transport: str,
    curve: str | None,
    run_dir: str | None,
    as_json: bool,
    insecure: bool = False,
    allow: Sequence[str] = (),
) -> int:
    """Actors for a learner that runs elsewhere, now or later. ``connect`` is its address or, on
    this host, the folder of its run; ``allow`` as in `configs.code_references.check`."""
    from penstock.transport.zmq.sockets import check_connect  # zmq takes a moment to load

    address = actor_socket.address_of(connect)
    check_connect(address, keys=curve is not None, insecure=insecure)
    _require_linux()
    path = Path(run_dir) if run_dir else default_run_dir("actors")
    specs = topology.actors(count, address, relay=transport != "shm")
    stream = sys.stderr if as_json else sys.stdout
    with (
        run_folder(path, "auto"),
        runtime_folder() as runtime_dir,
        closing(EventLog(path / "logs")) as events,
    ):
        audience = RunReporter(
            lambda: make_view(stream, _title(path, specs), None), None, events=events
        )
        arguments = role_arguments(path, runtime_dir) | {
            "transport": transport,
            "curve": curve,
            "insecure": insecure,
            "allow": list(allow),
        }
        outcome = _supervise(
            Supervisor(specs, RestartLimits(), arguments, path / "logs", audience), audience
        )
    _explain(outcome)
    if as_json:
        print(
            json.dumps(
                {
                    "exit_code": outcome.exit_code,
                    "exit_reason": outcome.reason,
                    "error": outcome.error,
                }
            )
        )
    return outcome.exit_code


def _run_dir(resolved: Resolved) -> Path:
    path = resolved.config.run.dir
    return Path(path) if path else default_run_dir(resolved.name)


def _with_learner(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    as_json: bool,
    make_specs: Callable[[Path], Sequence[RoleSpec]],
    source: str | None,
) -> int:
    outcome, summary = with_learner(resolved, path, resume, as_json, make_specs, source=source)
    if as_json:
        print(json.dumps({"run_dir": str(path), "exit_code": outcome.exit_code, **summary}))
    return outcome.exit_code


def with_learner(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    as_json: bool,
    make_specs: Callable[[Path], Sequence[RoleSpec]],
    watch: Watch | None = None,
    source: str | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """A run in the folder ``path``, from its start to its end and farewell: how it ended, and its
    summary. ``watch`` may see its processes, and end it."""
    stream = sys.stderr if as_json else sys.stdout
    stop = resolved.config.stop
    outcome, summary = conduct(
        resolved,
        path,
        resume,
        make_specs,
        lambda title: make_view(stream, title, stop),
        watch,
        source=source,
    )
    _explain(outcome)
    if "env_steps" in summary and path.is_dir():
        with suppress(OSError):
            last_words.show(last_words.rows(summary, path), stream)
    return outcome, summary


def conduct(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    make_specs: Callable[[Path], Sequence[RoleSpec]],
    view: Callable[[str], View],
    watch: Watch | None = None,
    callbacks: Sequence[object] = (),
    source: str | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """`with_learner` without its words: all that is shown goes to the ``view`` of a title.
    ``callbacks`` are called beside those of the config; ``source`` is what ``--resume-from`` names.
    """
    _require_linux()
    config = resolved.config
    check_libraries(config)
    hooks = Hooks(config.run.callbacks, Run(path, config), callbacks)
    resolve(config.env)  # refuse now what would fail in every role
    check_not_replaced(path)
    new = missing(path)
    folder = None
    if source is not None:
        folder, resume = find_source(source, path, resume)
    with (
        run_folder(path, resume) as lock,
        undone_where_refused(path, new) as attempt,
        runtime_folder() as runtime_dir,
        closing(EventLog(path / "logs")) as events,
    ):
        begun = ""
        if folder is not None:
            begun, resume = begin_from(path, folder), "must"
        changed = differences(path, config, resume)
        specs = make_specs(runtime_dir)
        record = Record(path, writers(config, path), config.env)
        write_atomic(path / CONFIG_FILE, dump(config))
        audience = RunReporter(lambda: view(_title(path, specs)), record, hooks, events)
        for text in filter(None, (begun, changed)):
            audience.note(text)
        arguments = role_arguments(path, runtime_dir) | {
            "config": config.model_dump(mode="json"),
            "resume": resume,
        }
        supervisor = Supervisor(
            specs, _limits(config.run), arguments, path / "logs", watch or audience, (lock,)
        )
        if watch is not None:
            watch.attach(supervisor, audience)
        outcome = _supervise(supervisor, audience)
        summary = record.close(outcome.reason, outcome.error)
        if record.problem is not None:
            _say(f"summary.json cannot be written: {record.problem.strerror}")
        hooks.end(summary)
        if not supervisor.began and not summary["accounting"]["produced"]:
            _take_back(attempt, outcome.reason)
        return outcome, summary


def _take_back(attempt: Attempt, reason: str) -> None:
    """A run that ended before its first step leaves the one that was there as it was."""
    if reason == "user_error":
        attempt.undo()
    elif reason in ("fault", *last_words.INTERRUPTED):
        attempt.put_back()


def _limits(run: RunConfig) -> RestartLimits:
    return RestartLimits(run.grace_s, run.hang_timeout_s, run.start_timeout_s, run.max_restarts)


def _require_linux() -> None:
    if sys.platform != "linux":
        raise UserError(
            f"training needs Linux, and this is {sys.platform}; configs and the replay library "
            "work here"
        )


def _supervise(supervisor: Supervisor, audience: RunReporter) -> Outcome:
    try:
        outcome = supervisor.run()
        audience.end(outcome)
        return outcome
    finally:
        audience.close()


def _title(run_dir: Path, specs: Sequence[RoleSpec]) -> str:
    return f"penstock {run_dir}: {topology.names(specs)}"


def _explain(outcome: Outcome) -> None:
    """Say on standard error what went wrong, if anything did."""
    failure = outcome.failure
    if failure is None:
        return
    lines = failure.traceback.splitlines()[-TRACEBACK_LINES:]
    _say(*lines, f"penstock: {outcome.error}")


def _say(*lines: str) -> None:
    with suppress(OSError):
        print(*lines, sep="\n", file=sys.stderr, flush=True)

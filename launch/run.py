"""The commands that run processes: a whole run, a learner by hand, actors by hand.

Each resolves what it is asked to do, makes the folders, and lets a `Supervisor` work; each returns
the exit code: 0 done, 2 the user's mistake, 1 a fault, 130 or 143 interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, Resolved, dump, resolve_target
from penstock.configs.schema import RunConfig
from penstock.launch import actor_socket, topology
from penstock.launch import summary as last_words
from penstock.launch.attempt import Attempt, missing, undone_where_refused
from penstock.launch.callbacks import Hooks, Run
from penstock.launch.effects import Limits, Outcome
from penstock.launch.folders import Resume, default_run_dir, run_folder, runtime_folder
from penstock.launch.machines import Place, check_place, where_to_write
from penstock.launch.process import role_arguments
from penstock.launch.record import Record, write_atomic
from penstock.launch.resumed import check_folder_named, differences
from penstock.launch.role import die_with
from penstock.launch.supervisor import Supervisor
from penstock.launch.topology import RoleSpec
from penstock.launch.view import View, make_view
from penstock.launch.writers import check_libraries, writers

if TYPE_CHECKING:
    from penstock.launch.profile.watch import Watch

TRACEBACK_LINES = 40


class Audience:
    """Hears what the supervisor has to say: shows it, and has it written down.

    Neither a full disk nor a closed terminal ends a run. The view is made at the first tick, when
    the processes have been started: what it imports must not delay them.
    """

    def __init__(
        self, view: Callable[[], View], record: Record | None, hooks: Hooks | None = None
    ) -> None:
        self._make_view = view
        self._view: View | None = None
        self._record = record
        self._hooks = hooks
        if hooks is not None:
            hooks.note = self.note
        self._said: dict[str, bool] = {}  # and whether it was shown

    def tick(self) -> None:
        if self._view is None:
            with suppress(OSError):
                self._view = self._make_view()
                self._show_notes(self._view)

    def note(self, text: str) -> None:
        """Show a sentence, once: every actor may say the same."""
        self._said.setdefault(text, False)
        if self._view is not None:
            self._show_notes(self._view)

    def _show_notes(self, view: View) -> None:
        for text in [text for text, shown in self._said.items() if not shown]:
            self._said[text] = True
            with suppress(OSError):
                view.note(text)

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

    def close(self) -> None:
        if self._view is not None:
            with suppress(OSError):
                self._view.close()


def train(target: str, overrides: Sequence[str], resume: Resume, as_json: bool) -> int:
    """Learner and actors on this host."""
    resolved = resolve_target(target, overrides)
    check_folder_named(resolved.config, resume)
    make_specs = partial(topology.train, resolved.config)
    return _with_learner(resolved, _run_dir(resolved), resume, as_json, make_specs)


def learner(
    target: str,
    overrides: Sequence[str],
    bind: str | None,
    place: Place | None,
    resume: Resume,
    as_json: bool,
) -> int:
    """Learners that actors join from elsewhere: all of the run, or the one of a ``place``."""
    if bind is not None:
        overrides = [*overrides, f"transport.bind={bind}"]
    if place is not None:
        overrides = [*overrides, f"learner.count={place.world}"]
    resolved = resolve_target(target, overrides)
    path = _run_dir(resolved)
    if place is None or not place.rank:  # the others have their state from there
        check_folder_named(resolved.config, resume)
    write_to = path
    if place is not None:
        check_place(place, resolved.config, os.environ)
        write_to, resume = where_to_write(place, path, resume)
    if place is not None and place.torchrun:
        die_with(os.getppid(), signal.SIGTERM)  # it has nobody else, should torchrun be killed
    in_folder = resolved.config.transport.bind is None
    if in_folder:
        bind = actor_socket.address_in(write_to)
        resolved = resolve_target(target, [*overrides, f"transport.bind={bind}"])
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
    return _with_learner(resolved, write_to, resume, as_json, make_specs)


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
    this host, the folder of its run; ``allow`` as in `configs.references.check`."""
    from penstock.transport.sockets import check_connect  # zmq takes a moment to load

    address = actor_socket.address_of(connect)
    check_connect(address, keys=curve is not None, insecure=insecure)
    _require_linux()
    path = Path(run_dir) if run_dir else default_run_dir("actors")
    specs = topology.actors(count, address, relay=transport != "shm")
    stream = sys.stderr if as_json else sys.stdout
    audience = Audience(lambda: make_view(stream, _title(path, specs), None), None)
    with run_folder(path, "auto"), runtime_folder() as runtime_dir:
        arguments = role_arguments(path, runtime_dir) | {
            "transport": transport,
            "curve": curve,
            "insecure": insecure,
            "allow": list(allow),
        }
        outcome = _supervise(
            Supervisor(specs, Limits(), arguments, path / "logs", audience), audience
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
) -> int:
    outcome, summary = with_learner(resolved, path, resume, as_json, make_specs)
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
) -> tuple[Outcome, dict[str, Any]]:
    """A run in the folder ``path``, from its start to its end and farewell: how it ended, and its
    summary. ``watch`` may see its processes, and end it."""
    stream = sys.stderr if as_json else sys.stdout
    stop = resolved.config.stop
    outcome, summary = conduct(
        resolved, path, resume, make_specs, lambda title: make_view(stream, title, stop), watch
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
) -> tuple[Outcome, dict[str, Any]]:
    """`with_learner` without its words: all that is shown goes to the ``view`` of a title.
    ``callbacks`` are called beside those of the config."""
    _require_linux()
    config = resolved.config
    check_libraries(config)
    hooks = Hooks(config.run.callbacks, Run(path, config), callbacks)
    new = missing(path)
    with (
        run_folder(path, resume) as lock,
        undone_where_refused(path, new) as attempt,
        runtime_folder() as runtime_dir,
    ):
        changed = differences(path, config, resume)
        specs = make_specs(runtime_dir)
        record = Record(path, writers(config, path), config.env)
        write_atomic(path / CONFIG_FILE, dump(config))
        audience = Audience(lambda: view(_title(path, specs)), record, hooks)
        if changed:
            audience.note(changed)
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


def _limits(run: RunConfig) -> Limits:
    return Limits(run.grace_s, run.hang_timeout_s, run.start_timeout_s, run.max_restarts)


def _require_linux() -> None:
    if sys.platform != "linux":
        raise UserError(
            f"training needs Linux, and this is {sys.platform}; configs and the replay library "
            "work here"
        )


def _supervise(supervisor: Supervisor, audience: Audience) -> Outcome:
    try:
        return supervisor.run()
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
    with suppress(OSError):
        print(*lines, f"penstock: {outcome.error}", sep="\n", file=sys.stderr)

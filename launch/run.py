"""The commands that run processes: a whole run, a learner alone, actors alone.

Each resolves its config, makes the folders, and runs a `Supervisor`. Each returns the exit code: 0
for success, 1 for a failure, 2 for a mistake of the user, 130 or 143 if it was interrupted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from penstock.autotune.cores import CoreSplit
from penstock.configs.errors import UserError
from penstock.configs.load import CONFIG_FILE, Resolved, dump
from penstock.configs.run import Log, RunConfig
from penstock.configs.secrets import resolve
from penstock.configs.transports import TRANSPORTS
from penstock.configs.value_types import either
from penstock.core import used_names
from penstock.core.files import write_atomic
from penstock.core.interfaces import Engine, EngineContext, MetricSink, RunEvent
from penstock.core.machine import record_versions
from penstock.core.notes import note_logger, notes_to
from penstock.core.processes import die_with
from penstock.core.role_spec import RoleSpec, Stage
from penstock.core.run_dir import (
    Resume,
    check,
    check_not_replaced,
    default_run_dir,
    has_checkpoint,
    run_folder,
)
from penstock.core.runtime_folder import RuntimeFolder
from penstock.launch import placement, topology
from penstock.launch.callbacks import Hooks, Run
from penstock.launch.engines.registry import ENGINES, LOCAL, make_engine
from penstock.launch.join_note import join_note
from penstock.launch.machines import LearnerPlace, check_place, where_to_write
from penstock.launch.resumed import (
    begin_from,
    differences,
    find_source,
    resolve_resumed,
    take_from_store,
)
from penstock.launch.run_attempt import Attempt, missing, undone_where_refused
from penstock.launch.signals import SignalHandler, SignalsAfterRun
from penstock.launch.supervisor import Supervisor
from penstock.launch.supervisor_messages import Outcome, RestartLimits
from penstock.monitor import summary as last_words
from penstock.monitor.json_view import write_line
from penstock.monitor.run_folder.events import EventLog
from penstock.monitor.run_folder.record import Record
from penstock.monitor.sinks import FanOut, check_libraries, make_sinks
from penstock.monitor.view import make_deferred, make_view
from penstock.transport.addresses import (
    address_in_run,
    address_of,
    check_connect,
    make_socket_folder,
)

if TYPE_CHECKING:
    from penstock.configs.schema import Config
    from penstock.launch.profile_watch import Watch


class EngineChoice(NamedTuple):
    """The engine of a run, by its name, and its options."""

    name: str = LOCAL
    cluster: str | None = None
    """The address of the engine's cluster; None for the engine's own default."""
    working_dir: str | None = None
    """A folder that is copied to the other hosts, where it is the current folder of all roles."""


HERE = EngineChoice()
PlaceSpecs = Callable[[], Sequence[RoleSpec]]
MakeSink = Callable[[Path], MetricSink]
MakeSpecs = Callable[["Config", Path], Sequence[RoleSpec]]
TRACEBACK_LINES = 40
logger = note_logger(__name__)


def choose_engine(name: str, cluster: str | None, working_dir: str | None) -> EngineChoice:
    """The engine that a command names. Raises UserError for options that do not go together."""
    if name not in ENGINES:
        raise UserError(f"--engine {name} is unknown; it must be {either(tuple(ENGINES))}")
    if name == LOCAL and (cluster or working_dir):
        option = "--address" if cluster else "--working-dir"
        raise UserError(f"{option} is of a cluster; add --engine ray, or leave it out")
    if working_dir is not None and not Path(working_dir).is_dir():
        raise UserError(f"--working-dir {working_dir} is not a folder; name one that exists")
    return EngineChoice(name, cluster, working_dir)


def train(
    target: str,
    overrides: Sequence[str],
    resume: Resume,
    as_json: bool,
    source: str | None = None,
    place: EngineChoice = HERE,
    make_sink: MakeSink | None = None,
) -> int:
    """Run learners and actors until the run ends; returns the exit code.

    Args:
        target: as of `resolve_resumed`.
        overrides: ``key=value``.
        resume: "no", "auto" or "must".
        as_json: whether the summary is printed as JSON, and the view on standard error.
        source: the value of ``--resume-from``.
        place: the engine that starts the processes.
        make_sink: makes a further sink.
    """
    resolved = resolve_resumed(target, overrides, resume, source)
    path = _run_dir(resolved)
    sinks = () if make_sink is None else (make_sink(path),)
    return _with_learner(resolved, path, resume, as_json, topology.train, source, place, sinks)


def learner(
    target: str,
    overrides: Sequence[str],
    bind: str | None,
    place: LearnerPlace | None,
    resume: Resume,
    as_json: bool,
    source: str | None = None,
) -> int:
    """Run learners that actors join, until the run ends; returns the exit code.

    Args:
        target: as of `resolve_resumed`.
        overrides: ``key=value``.
        bind: where the learners listen; None: `transport.bind`, or else a socket in the run's
            folder.
        place: of the only learner that this command starts; None: it starts all of the run.
        resume: "no", "auto" or "must".
        as_json: whether the summary is printed as JSON, and the view on standard error.
        source: the value of ``--resume-from``.
    """
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
        die_with(os.getppid(), signal.SIGTERM)  # ends with torchrun, also if that is killed
    in_folder = resolved.config.transport.bind is None
    if in_folder:
        resolved = resolve([*overrides, f"transport.bind={address_in_run(write_to)}"])
    address = resolved.config.transport.bind
    assert address is not None

    def make_specs(config: Config, runtime_dir: Path) -> Sequence[RoleSpec]:
        if place is None:
            specs = topology.learner(config, address, runtime_dir)
        else:
            specs = topology.one_of_several(config, address, place.rank, place.store)
        if in_folder:
            make_socket_folder(write_to, place.rank if place else 0)
        for spec in specs:
            is_connector = spec.stage is Stage.CARRIERS and spec.listens
            is_first = is_connector and not spec.index % config.transport.first_connectors
            if is_first and (note := join_note(config, spec.address or "")):
                _show_note(stream, log, note)
        return specs

    stream = sys.stderr if as_json else sys.stdout
    log = resolved.config.run.log
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
    log: Log = "text",
    wait_s: float | None = None,
) -> int:
    """Run actors that join a learner, until that ends; returns the exit code.

    Args:
        connect: address of the learner or, on this host, the folder of its run.
        count: number of actors.
        transport: a transport between hosts.
        curve: folder of the keys for encryption; None for none.
        run_dir: folder of the actors' logs; None for a new one.
        as_json: whether the outcome is printed as JSON, and the view on standard error.
        insecure: whether an address on another host may be used without keys.
        allow: names that may be imported, as of `configs.code_references.check`.
        log: as `run.log`.
        wait_s: as of `RoleContext`.
    """
    if transport not in TRANSPORTS.joined_by_hand:
        raise UserError(
            f"--transport is {transport!r}; it must be {either(TRANSPORTS.joined_by_hand)}"
        )
    address = address_of(connect)
    check_connect(address, keys=curve is not None, insecure=insecure)
    _require_linux()

    path = Path(run_dir) if run_dir else default_run_dir("actors")
    specs = topology.actors(count, address, transport)
    stream = sys.stderr if as_json else sys.stdout
    with (
        run_folder(path, "auto"),
        RuntimeFolder() as runtime_dir,
        closing(_engine(HERE, runtime_dir)) as engine,
        closing(EventLog(path / "logs")) as events,
    ):
        title = _title(path, specs)
        view = make_deferred(lambda: make_view(stream, title, None, log=log), log)
        sinks = FanOut([events, view])
        arguments = topology.role_arguments(path, runtime_dir) | {
            "transport": transport,
            "curve": curve,
            "insecure": insecure,
            "allow": list(allow),
            "wait_s": wait_s,
        }
        place = _place(specs, engine)
        logs = path / "logs"
        supervisor = Supervisor(place(), RestartLimits(), arguments, logs, sinks, engine)
        with notes_to(sinks.note):
            outcome = _supervise(supervisor, sinks, view, after=SignalsAfterRun())[0]
    _explain(outcome, log)
    if as_json:
        print(
            json.dumps(
                {
                    "exit_code": outcome.exit_code,
                    "exit_reason": outcome.reason,
                    "error": outcome.error,
                }
            ),
            flush=True,
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
    make_specs: MakeSpecs,
    source: str | None,
    place: EngineChoice = HERE,
    sinks: Sequence[MetricSink] = (),
) -> int:
    outcome, summary = with_learner(
        resolved,
        path,
        resume,
        as_json,
        make_specs,
        source=source,
        place=place,
        sinks=sinks,
        after=SignalsAfterRun(),
    )
    if as_json:
        about = {"run_dir": str(path), "exit_code": outcome.exit_code}
        print(json.dumps({**about, **summary}), flush=True)
    return outcome.exit_code


def with_learner(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    as_json: bool,
    make_specs: MakeSpecs,
    watch: Watch | None = None,
    source: str | None = None,
    place: EngineChoice = HERE,
    sinks: Sequence[MetricSink] = (),
    after: SignalHandler | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Do a run in the folder ``path``, show it, and print its final messages.

    Args:
        as_json: whether it is shown on standard error.
        sinks: further sinks.

    The other arguments are as of `conduct`.
    """
    stream = sys.stderr if as_json else sys.stdout
    stop, log = resolved.config.stop, resolved.config.run.log
    outcome, summary = conduct(
        resolved,
        path,
        resume,
        make_specs,
        lambda title: make_view(stream, title, stop, _about(resolved), log),
        watch,
        source=source,
        place=place,
        more_sinks=sinks,
        early_note=partial(_show_note, stream, log),
        after=after,
    )
    _explain(outcome, log)
    if "env_steps" in summary and path.is_dir() and log == "text":
        with suppress(OSError):
            last_words.show(last_words.rows(summary, path), stream)
    return outcome, summary


def conduct(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    make_specs: MakeSpecs,
    view: Callable[[str], MetricSink],
    watch: Watch | None = None,
    callbacks: Sequence[object] = (),
    source: str | None = None,
    place: EngineChoice = HERE,
    more_sinks: Sequence[MetricSink] = (),
    early_note: Callable[[str], object] = lambda text: None,
    after: SignalHandler | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Do a run in the folder ``path``, without final messages.

    Args:
        resolved: the config of the run.
        path: folder of the run.
        resume: whether to resume the run in ``path``: "no", "auto" (if it has a checkpoint) or
            "must".
        make_specs: returns the roles of the run.
        view: makes the sink that shows the run, by its title.
        watch: inspects the run's processes, and may end the run.
        callbacks: objects that are called in addition to those of the config.
        source: the value of ``--resume-from``.
        place: the engine that starts the processes.
        more_sinks: further sinks.
        early_note: shows notes from before the view exists.
        after: as of `Supervisor.run`.

    Raises UserError. A run that fails before its first step leaves the folder as it was.
    """
    config = resolved.config
    _preflight(config, path)
    new = missing(path)
    stored = config.checkpoint.store is not None
    folder = None
    if source is not None:
        folder, resume = find_source(source, path, resume)
    with (
        run_folder(path, "auto" if stored and resume == "must" else resume) as lock,
        undone_where_refused(path, new) as attempt,
        RuntimeFolder() as runtime_dir,
        closing(_engine(place, runtime_dir, (lock,))) as engine,
        closing(EventLog(path / "logs")) as events,
    ):
        begun = take_from_store(config, path, resume if folder is None else "no")
        check(path, resume)
        hosts = engine.hosts()
        hooks = Hooks(config.run.callbacks, Run(path, config), callbacks)
        with notes_to(early_note):
            config, found = _with_numbers(config, path, resume, on_cluster=bool(hosts))
        hooks.run = Run(path, config)
        if folder is not None:
            begun, resume = begin_from(path, folder), "must"
        changed = differences(path, config, resume)
        placed = (
            placement.on_hosts(config, hosts, path) if hosts else placement.on_this_host(config)
        )
        place_specs = _place(make_specs(placed, runtime_dir), engine)
        specs = place_specs()

        optional = make_sinks(config, path)
        resumed = resume != "no" and has_checkpoint(path)
        record = Record(path, config.env, config.stop.return_, resumed=resumed)
        _record_start(path, config)
        title = _title(path, specs)
        shown = make_deferred(lambda: view(title), config.run.log)
        watching = [*more_sinks] if watch is None else [*more_sinks, watch]
        sinks = FanOut([events, record, *optional, shown, hooks, *watching], record.evaluation)
        arguments = topology.role_arguments(path, runtime_dir) | {
            "config": placed.model_dump(mode="json"),
            "resume": resume,
        }
        supervisor = Supervisor(
            specs,
            _limits(config.run),
            arguments,
            path / "logs",
            sinks,
            engine,
            None if hosts else CoreSplit.of(config),
            place_specs,
        )
        if watch is not None:
            watch.attach(supervisor, hosts)

        with notes_to(sinks.note):
            for text in filter(None, (resolved.note, begun, changed, *found)):
                logger.info(text)
            outcome, summary = _supervise(supervisor, sinks, shown, record, after)
            sinks.close()
        if not supervisor.began and not summary["accounting"]["produced"]:
            _take_back(attempt, outcome.reason)
        return outcome, summary


def _preflight(config: Config, path: Path) -> None:
    """Refuse now what would fail in every role. Raises UserError."""
    _require_linux()
    check_libraries(config)
    resolve(config.env)
    check_not_replaced(path)


def _record_start(run_dir: Path, config: Config) -> None:
    path = run_dir / CONFIG_FILE
    try:
        write_atomic(path, dump(config))
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; free some space or set run.dir to "
            "another disk"
        ) from error

    used_names.note(config)
    with suppress(OSError):  # only checkpoints need the disk
        record_versions(run_dir)


def _with_numbers(
    config: Config, path: Path, resume: Resume, *, on_cluster: bool
) -> tuple[Config, Sequence[str]]:
    """Replace `auto` by numbers where the roles need to know them, some of which are measured.

    Returns the config, and sentences about the numbers. Raises UserError.
    """
    if "auto" not in (config.actors.envs, config.transport.connectors):
        return config, ()

    from penstock.autotune import connectors, envs
    from penstock.launch import measuring

    if on_cluster:
        connectors.check_not_auto(config, "on a cluster learners may run on other hosts")
    config, about_envs = envs.with_envs(config, path, resume, measuring.step_seconds)
    config, about_connectors = connectors.with_connectors(config, measuring.connector_seconds)
    return config, (about_envs, about_connectors)


def _place(specs: Sequence[RoleSpec], engine: Engine) -> PlaceSpecs:
    """Have the engine find hosts; returns a function that returns the specs on their hosts."""
    hosts = engine.hosts()
    several = len(hosts) > 1 or any(spec.spare for spec in specs)  # now or later
    specs, bundles = placement.bundles(specs, hosts if several else ())
    engine.reserve(bundles)
    port = placement.any_port()
    return lambda: placement.placed(specs, engine.endpoints(), bundles, port)


def _engine(place: EngineChoice, runtime_dir: Path, keep_fds: tuple[int, ...] = ()) -> Engine:
    context = EngineContext(runtime_dir, keep_fds, place.cluster, place.working_dir)
    return make_engine(place.name, context)


def _take_back(attempt: Attempt, reason: str) -> None:
    """Restore the files of an earlier run if this one ended before its first step."""
    if reason == "user_error":
        attempt.undo()
    elif reason in ("fault", *last_words.INTERRUPTED):
        attempt.put_back()


def _limits(run: RunConfig) -> RestartLimits:
    times_s = run.grace_s, run.hang_timeout_s, run.start_timeout_s
    return RestartLimits(*times_s, run.max_restarts, run.restarts)


def _require_linux() -> None:
    if sys.platform != "linux":
        raise UserError(
            f"training needs Linux, and this is {sys.platform}; only configs and the replay "
            "library work here, so train on a Linux machine"
        )


def _supervise(
    supervisor: Supervisor,
    sinks: MetricSink,
    view: MetricSink,
    record: Record | None = None,
    after: SignalHandler | None = None,
) -> tuple[Outcome, dict[str, Any]]:
    """Run the roles until the run has ended, report its end to the sinks, and close the view.

    Args:
        supervisor: that of the run.
        sinks: all sinks of the run.
        view: the one of them that shows the run.
        record: the one of them that makes the summary; None for a run without a summary.
        after: as of `Supervisor.run`.
    """
    try:
        outcome = supervisor.run(after)
        summary = {} if record is None else record.summary(outcome.reason, outcome.error)
        about = {"exit_code": outcome.exit_code, "reason": outcome.reason, "error": outcome.error}
        text = outcome.error or f"ended by {outcome.reason}"
        sinks.event(RunEvent("end", text, data=about, result=summary))
        return outcome, summary
    finally:
        view.close()


def _about(resolved: Resolved) -> str:
    """Environment, algorithm and base of a run, as a line of its view."""
    about = f"{resolved.config.env.id}, {resolved.config.algo.name}, {resolved.origin}"
    return f"{about}; {resolved.defaults}" if resolved.defaults else about


def _title(run_dir: Path, specs: Sequence[RoleSpec]) -> str:
    return f"penstock {run_dir}: {topology.names(specs)}"


def _explain(outcome: Outcome, log: Log) -> None:
    """Print the failure of a run, if any, on standard error."""
    failure = outcome.failure
    if failure is None:
        return

    lines = failure.traceback.splitlines()[-TRACEBACK_LINES:]
    if log == "json":
        write_line(sys.stderr, "error", "failure", str(outcome.error), {"traceback": lines})
    else:
        with suppress(OSError):
            print(*lines, f"penstock: {outcome.error}", sep="\n", file=sys.stderr, flush=True)


def _show_note(stream: TextIO, log: Log, text: str) -> None:
    """Show a note where the run has no view."""
    if log == "json":
        write_line(stream, "info", "note", text)
    else:
        with suppress(OSError):
            print(text, file=stream, flush=True)

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
from penstock.configs.schedules import schedules
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
from penstock.launch.callbacks import Hook, Hooks, Run, load_hooks
from penstock.launch.engines.registry import ENGINES, LOCAL, make_engine
from penstock.launch.join_note import join_note
from penstock.launch.machines import LearnerPlace, check_place, choose_run_dir
from penstock.launch.resumed import (
    describe_changed_options,
    find_source,
    resolve_resumed,
    start_from_checkpoint,
    take_from_store,
)
from penstock.launch.run_attempt import Attempt, missing_folders, undone_on_user_error
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
    from penstock.launch.profile_watch import ProfileWatch


class EngineChoice(NamedTuple):
    """The engine of a run, by its name, and its options."""

    name: str = LOCAL
    cluster: str | None = None
    """The address of the engine's cluster; None for the engine's own default."""
    working_dir: str | None = None
    """A folder that is copied to the other hosts, where it is the current folder of all roles."""


class RunResult(NamedTuple):
    """How a run has ended."""

    outcome: Outcome
    summary: dict[str, Any]
    """Its `summary.json`; empty if it has no record, as one of actors alone."""


class Beginning(NamedTuple):
    """With what a run begins."""

    config: Config
    """The config with numbers in place of `auto`, where the roles need to know them."""
    resume: Resume
    hooks: Sequence[Hook]
    """The callbacks of the run."""
    hosts: Sequence[int]
    """Cores of each host of a cluster; empty if all roles run on this host."""
    notes: Sequence[str]
    """Sentences about these for the user."""


LOCAL_ENGINE = EngineChoice()
PlaceSpecs = Callable[[], Sequence[RoleSpec]]
MakeSink = Callable[[Path], MetricSink]
"""Makes a sink for the run in a folder."""
MakeSpecs = Callable[["Config", Path], Sequence[RoleSpec]]
"""Returns the roles of a run, by its config and its folder for sockets."""
TRACEBACK_LINES = 40
"""Most lines of a failed role's traceback that are shown."""
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
    place: EngineChoice = LOCAL_ENGINE,
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
    path = run_dir_of(resolved)
    sinks = () if make_sink is None else (make_sink(path),)
    return print_result(
        resolved,
        path,
        resume,
        as_json,
        make_specs=topology.train_roles,
        source=source,
        place=place,
        sinks=sinks,
    )


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
    resolve_config = partial(resolve_resumed, target, resume=resume, source=source)
    if place is not None and place.rank > 0:
        # The learner gets its state from rank 0, so it begins from no checkpoint itself.
        resolve_config = partial(resolve_config, source=source or "")
        source = None
    resolved = resolve_config(overrides)

    write_to = run_dir_of(resolved)
    if place is not None:
        check_place(place, resolved.config, os.environ)
        write_to, resume = choose_run_dir(place, write_to, resume)
        if place.torchrun:
            die_with(os.getppid(), signal.SIGTERM)  # ends with torchrun, also if that is killed

    listens_in_run_dir = resolved.config.transport.bind is None
    if listens_in_run_dir:
        resolved = resolve_config([*overrides, f"transport.bind={address_in_run(write_to)}"])
    address = resolved.config.transport.bind
    assert address is not None
    log = resolved.config.run.log

    def make_specs(config: Config, runtime_dir: Path) -> Sequence[RoleSpec]:
        if place is None:
            specs = topology.learner_roles(config, address, runtime_dir)
        else:
            specs = topology.one_of_several(config, address, place.rank, place.store)
        if listens_in_run_dir:
            make_socket_folder(write_to, place.rank if place else 0)
        for note in _join_notes(config, specs):
            _show_note(_view_stream(as_json), log, note)
        return specs

    return print_result(resolved, write_to, resume, as_json, make_specs=make_specs, source=source)


def _join_notes(config: Config, specs: Sequence[RoleSpec]) -> list[str]:
    """How actors join each learner of ``specs``: at the first of its connectors."""
    notes: list[str] = []
    for spec in specs:
        is_connector = spec.stage is Stage.CARRIERS and spec.listens
        if is_connector and spec.index % config.transport.first_connectors == 0:
            notes.append(join_note(config, spec.address or ""))
    return [note for note in notes if note]


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
    specs = topology.actor_roles(count, address, transport)
    with (
        run_folder(path, "auto"),
        RuntimeFolder() as runtime_dir,
        closing(_engine(LOCAL_ENGINE, runtime_dir)) as engine,
        closing(EventLog(path / "logs")) as events,
    ):
        title = _title(path, specs)
        view = make_deferred(lambda: make_view(_view_stream(as_json), title, None, log=log), log)
        sinks = FanOut([events, view])
        arguments = topology.role_arguments(path, runtime_dir) | {
            "transport": transport,
            "curve": curve,
            "insecure": insecure,
            "allow": list(allow),
            "wait_s": wait_s,
        }
        place_specs = _place(specs, engine)
        supervisor = Supervisor(
            place_specs(),
            limits=RestartLimits(),
            arguments=arguments,
            logs=path / "logs",
            sinks=sinks,
            engine=engine,
        )
        with notes_to(sinks.note):
            outcome = _supervise(supervisor, sinks, view, handler_after=SignalsAfterRun()).outcome

    _explain(outcome, log)
    if as_json:
        result = {
            "exit_code": outcome.exit_code,
            "exit_reason": outcome.reason,
            "error": outcome.error,
        }
        print(json.dumps(result), flush=True)
    return outcome.exit_code


def run_dir_of(resolved: Resolved) -> Path:
    """The folder of a run: `run.dir`, or a new one."""
    path = resolved.config.run.dir
    return Path(path) if path else default_run_dir(resolved.name)


def _view_stream(as_json: bool) -> TextIO:
    """Where a run is shown: not where its result is printed as JSON."""
    return sys.stderr if as_json else sys.stdout


def print_result(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    as_json: bool,
    *,
    make_specs: MakeSpecs,
    source: str | None,
    place: EngineChoice = LOCAL_ENGINE,
    sinks: Sequence[MetricSink] = (),
) -> int:
    """Do a run, and print its result if that is wanted ``as_json``; returns the exit code."""
    outcome, summary = run_and_show(
        resolved,
        path,
        resume,
        as_json,
        make_specs,
        source=source,
        place=place,
        sinks=sinks,
        handler_after=SignalsAfterRun(),
    )
    if as_json:
        result = {"run_dir": str(path), "exit_code": outcome.exit_code, **summary}
        print(json.dumps(result), flush=True)
    return outcome.exit_code


def run_and_show(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    as_json: bool,
    make_specs: MakeSpecs,
    watch: ProfileWatch | None = None,
    source: str | None = None,
    place: EngineChoice = LOCAL_ENGINE,
    sinks: Sequence[MetricSink] = (),
    handler_after: SignalHandler | None = None,
) -> RunResult:
    """Do a run in the folder ``path``, show it, and print its final messages.

    Args:
        as_json: whether it is shown on standard error.
        sinks: further sinks.

    The other arguments are as of `run_in_folder`.
    """
    stream = _view_stream(as_json)
    limits = resolved.config.stop
    log = resolved.config.run.log
    outcome, summary = run_in_folder(
        resolved,
        path,
        resume,
        make_specs,
        view=lambda title: make_view(stream, title, limits, _about(resolved), log),
        watch=watch,
        source=source,
        place=place,
        more_sinks=sinks,
        early_note=partial(_show_note, stream, log),
        handler_after=handler_after,
    )
    _explain(outcome, log)
    if "env_steps" in summary and path.is_dir() and log == "text":
        with suppress(OSError):
            games_play = resolved.config.actors.games
            last_words.show(last_words.rows(summary, path, games_play=games_play), stream)
    return RunResult(outcome, summary)


def run_in_folder(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    make_specs: MakeSpecs,
    view: Callable[[str], MetricSink],
    watch: ProfileWatch | None = None,
    callbacks: Sequence[object] = (),
    source: str | None = None,
    place: EngineChoice = LOCAL_ENGINE,
    more_sinks: Sequence[MetricSink] = (),
    early_note: Callable[[str], object] = lambda text: None,
    handler_after: SignalHandler | None = None,
) -> RunResult:
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
        handler_after: as of `Supervisor.run`.

    Raises UserError. A run that fails before its first step leaves the folder as it was.
    """
    config = resolved.config
    _preflight(config, path)
    new_folders = missing_folders(path)
    checkpoint = None  # that of another run, from which this one begins
    if source is not None:
        checkpoint, resume = find_source(source, path, resume)

    # With a store, the run's checkpoint may be only there.
    has_store = config.checkpoint.store is not None
    folder_resume = "auto" if has_store and resume == "must" else resume
    with (
        run_folder(path, folder_resume) as lock,
        undone_on_user_error(path, new_folders) as attempt,
        RuntimeFolder() as runtime_dir,
        closing(_engine(place, runtime_dir, (lock,))) as engine,
        closing(EventLog(path / "logs")) as events,
    ):
        begin = _begin(
            resolved,
            path,
            resume,
            checkpoint=checkpoint,
            callbacks=callbacks,
            engine=engine,
            early_note=early_note,
        )
        config = begin.config

        # Where the roles of the run are.
        hosts = begin.hosts
        if hosts:
            placed = placement.adapt_to_hosts(config, hosts, path)
        else:
            placed = placement.adapt_to_this_host(config)
        place_specs = _place(make_specs(placed, runtime_dir), engine)
        specs = place_specs()

        # What receives events and metrics of the run.
        optional_sinks = make_sinks(config, path)
        resumed = begin.resume != "no" and has_checkpoint(path)
        record = Record(path, config.env, config.stop.return_, resumed=resumed)
        _record_start(path, config)
        title = _title(path, specs)
        shown = make_deferred(lambda: view(title), config.run.log)
        hooks = Hooks(begin.hooks, Run(path, config))
        watching = [] if watch is None else [watch]
        sinks = FanOut(
            [events, record, *optional_sinks, shown, hooks, *more_sinks, *watching],
            record.evaluation,
        )

        arguments = topology.role_arguments(path, runtime_dir) | {
            "config": placed.model_dump(mode="json"),
            "resume": begin.resume,
        }
        supervisor = Supervisor(
            specs,
            limits=_limits(config.run),
            arguments=arguments,
            logs=path / "logs",
            sinks=sinks,
            engine=engine,
            core_split=None if hosts else CoreSplit.of(config),
            place=place_specs,
            on_role_end=None if watch is None else watch.on_role_end,
        )
        if watch is not None:
            watch.attach(supervisor, hosts)

        with notes_to(sinks.note):
            for text in begin.notes:
                logger.info(text)
            result = _supervise(supervisor, sinks, shown, record, handler_after)
            sinks.close()
        if not supervisor.began and not result.summary["accounting"]["produced"]:
            _take_back(attempt, result.outcome.reason)
        return result


def _begin(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    *,
    checkpoint: Path | None,
    callbacks: Sequence[object],
    engine: Engine,
    early_note: Callable[[str], object],
) -> Beginning:
    """Prepare what a run begins with: its checkpoint, its callbacks and its numbers.

    Args:
        checkpoint: folder of another run's checkpoint that this run begins from, if any.
        engine: that of the run, whose hosts are read here.

    The other arguments are as of `run_in_folder`. Raises UserError.
    """
    config = resolved.config
    begin_note = take_from_store(config, path, resume if checkpoint is None else "no")
    check(path, resume)
    hosts = engine.hosts()
    hooks = load_hooks(config.run.callbacks, callbacks)
    with notes_to(early_note):
        config, number_notes = _with_numbers(config, path, resume, on_cluster=bool(hosts))

    if checkpoint is not None:
        begin_note = start_from_checkpoint(path, checkpoint)
        resume = "must"
    change_note = describe_changed_options(path, config, resume)
    notes = [resolved.note, begin_note, change_note, *number_notes]
    return Beginning(
        config=config,
        resume=resume,
        hooks=hooks,
        hosts=hosts,
        notes=[note for note in notes if note],
    )


def _preflight(config: Config, path: Path) -> None:
    """Refuse now what would fail in every role. Raises UserError."""
    _require_linux()
    check_libraries(config)
    _check_exploration(config)
    resolve(config.env)
    check_not_replaced(path)
    if config.eval.against:
        from penstock.evaluation.opponents import check_opponents

        check_opponents(config)


def _check_exploration(config: Config) -> None:
    """Raise UserError for a rate of random actions that would never change.

    Other schedules without a length may well stay at their first value. It is no check of every
    config, as those of policies have no limits of a run.
    """
    epsilon = schedules(config.algo).get("epsilon")
    if epsilon is None or epsilon.steps is not None or config.stop.env_steps is not None:
        return
    rate = f"{{from: {epsilon.from_:g}, to: {epsilon.to:g}, steps: 100_000}}"
    raise UserError(
        f"algo.epsilon changes from {epsilon.from_:g} to {epsilon.to:g} over stop.env_steps, which "
        f"is null, so it would stay at {epsilon.from_:g}; give it a length, such as "
        f"algo.epsilon='{rate}', or set stop.env_steps"
    )


def _record_start(run_dir: Path, config: Config) -> None:
    """Write the config and the versions of a run to its folder. Raises UserError if the config
    cannot be written."""
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
    config, envs_note = envs.with_envs(config, path, resume, measuring.step_seconds)
    config, connectors_note = connectors.with_connectors(config, measuring.connector_seconds)
    return config, (envs_note, connectors_note)


def _place(specs: Sequence[RoleSpec], engine: Engine) -> PlaceSpecs:
    """Have the engine find hosts; returns a function that returns the specs on their hosts."""
    hosts = engine.hosts()
    # Spare roles may get a further host during the run.
    has_several_hosts = len(hosts) > 1 or any(spec.spare for spec in specs)
    specs, bundles = placement.make_bundles(specs, hosts if has_several_hosts else ())
    engine.reserve(bundles)
    port = placement.choose_port()
    return lambda: placement.with_addresses(specs, engine.endpoints(), bundles, port)


def _engine(place: EngineChoice, runtime_dir: Path, keep_fds: tuple[int, ...] = ()) -> Engine:
    """Make the engine of a run; ``keep_fds`` are as of `EngineContext`."""
    context = EngineContext(
        runtime_dir=runtime_dir,
        keep_fds=keep_fds,
        cluster=place.cluster,
        working_dir=place.working_dir,
    )
    return make_engine(place.name, context)


def _take_back(attempt: Attempt, reason: str) -> None:
    """Restore the files of an earlier run if this one ended before its first step."""
    if reason == "user_error":
        attempt.undo()
    elif reason in ("fault", *last_words.INTERRUPTED):
        attempt.restore_earlier_run()


def _limits(run: RunConfig) -> RestartLimits:
    """The limits of restarts and timeouts, by the options of a run."""
    return RestartLimits(
        grace_s=run.grace_s,
        hang_timeout_s=run.hang_timeout_s,
        start_timeout_s=run.start_timeout_s,
        max_restarts=run.max_restarts,
        restarts=run.restarts,
    )


def _require_linux() -> None:
    """Raise UserError on any other system."""
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
    handler_after: SignalHandler | None = None,
) -> RunResult:
    """Run the roles until the run has ended, report its end to the sinks, and close the view.

    Args:
        supervisor: that of the run.
        sinks: all sinks of the run.
        view: the one of them that shows the run.
        record: the one of them that makes the summary; None for a run without a summary.
        handler_after: as of `Supervisor.run`.
    """
    try:
        outcome = supervisor.run(handler_after)
        summary = {} if record is None else record.summary(outcome.reason, outcome.error)
        text = outcome.error or f"ended by {outcome.reason}"
        data = {"exit_code": outcome.exit_code, "reason": outcome.reason, "error": outcome.error}
        sinks.event(RunEvent("end", text, data=data, result=summary))
        return RunResult(outcome, summary)
    finally:
        view.close()


def _about(resolved: Resolved) -> str:
    """Environment, algorithm and base of a run, as a line of its view."""
    about = f"{resolved.config.env.id}, {resolved.config.algo.name}, {resolved.origin}"
    return f"{about}; {resolved.defaults}" if resolved.defaults else about


def _title(run_dir: Path, specs: Sequence[RoleSpec]) -> str:
    """The first line of a run's view."""
    return f"penstock {run_dir}: {topology.describe_roles(specs)}"


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

"""The command `penstock`. Each command imports its modules when it is called.

Every command has --json: the last line of standard output is then one JSON object, and other text
goes to standard error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Annotated, Literal, NoReturn

import typer

import penstock
from penstock.cli.bench import bench_app
from penstock.cli.check_client import check_client
from penstock.cli.league import league
from penstock.cli.options import (
    LOOK,
    MEASURE,
    PREPARE,
    TRAIN,
    WATCH,
    ClusterAddress,
    EngineName,
    Grouped,
    Json,
    ListsTransports,
    LivingRun,
    Overrides,
    ResumeFrom,
    ResumeOption,
    Target,
    TargetOrRun,
    WorkingDir,
    answer,
    escaped,
    sampler_name,
)
from penstock.cli.render import render_app
from penstock.cli.runs import COMMANDS
from penstock.cli.serve import serve
from penstock.cli.serve_env import serve_env
from penstock.cli.tune import tune
from penstock.cli.watch import watch
from penstock.configs.errors import UserError
from penstock.configs.samplers import SAMPLERS
from penstock.core.descriptors import limit
from penstock.core.imports import exit_on_interrupt, gc_paused

EPILOG = (
    "A TARGET is a preset, a YAML file, a gymnasium id, module:EnvId-v0 or module:function; "
    "KEY=VALUE are options of the configuration. Exit codes: 0 success, 2 a mistake in the input, "
    "1 a fault, 130 and 143 interrupted (Ctrl-C, SIGTERM) after a clean end. With --json "
    "the last line of standard output is one JSON object, and all other text goes to "
    "standard error."
)
# A longer path is cut in an error message.
SHOWN_CHARS = 200
# Errors of the system for a path that this user cannot access; the user can name another one.
OUT_OF_REACH = {errno.ENAMETOOLONG, errno.EACCES, errno.ELOOP}
app = typer.Typer(
    cls=Grouped,
    help="Train game agents by reinforcement learning, with many actors and fast learners.",
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    help="Show presets and resolved configs.", no_args_is_help=True, rich_markup_mode=None
)
keys_app = typer.Typer(
    help="Make keys for encrypted connections.", no_args_is_help=True, rich_markup_mode=None
)
replay_app = typer.Typer(help="Serve replay buffers.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config", rich_help_panel=PREPARE)
app.add_typer(keys_app, name="keys", rich_help_panel=PREPARE)
app.add_typer(render_app, name="render", rich_help_panel=PREPARE)
app.add_typer(replay_app, name="replay", rich_help_panel=PREPARE)
app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)


def main() -> None:
    """Run the command `penstock` and translate its errors into messages and exit codes.

    What a user can correct is printed as one sentence, with exit code 2:

    - a UserError;
    - an error of an environment that the command plays itself;
    - a lack of file descriptors, which any call may meet;
    - a path that cannot be accessed. Every command takes paths and uses them in many places.

    Ctrl-C gives exit code 130. Any other error is a fault of Penstock and keeps its traceback.
    """
    try:
        _run()
    except UserError as error:
        _refuse(str(error), error.traceback)
    except OSError as error:
        message = _correctable_message(error)
        if message is None:
            raise
        _refuse(message)
    except KeyboardInterrupt:
        sys.exit(130)


def _run() -> None:
    """Run a command.

    Raises:
        UserError: a mistake of the user, or an error of an environment that this process plays.
    """
    try:
        app()
    except UserError:
        raise
    except Exception as error:
        from penstock.core.place import brief_with_place, is_of_environment, users_error

        if not is_of_environment(error):
            raise
        text = f"the environment failed with {brief_with_place(error)}; correct it"
        raise users_error(text, error) from error


def _correctable_message(error: OSError) -> str | None:
    """Returns what the user can do about an error of the system; None if there is nothing."""
    if error.errno == errno.EMFILE:
        return (
            f"the limit of {limit()} open files is used up, and the command needs more; raise "
            "it with `ulimit -n`"
        )
    if error.errno not in OUT_OF_REACH or error.filename is None:
        return None

    path = str(error.filename)
    if len(path) > SHOWN_CHARS:
        path = f"{path[:SHOWN_CHARS]}..."
    return (
        f"{path} cannot be accessed: {error.strerror}; name another path, or change the "
        "permissions of its folder"
    )


def _refuse(text: str, traceback: str = "") -> NoReturn:
    """Print a mistake of the user and end the process with exit code 2."""
    _show_mistake(text, traceback)
    sys.exit(2)


def _show_mistake(text: str, traceback: str = "") -> None:
    """Print a mistake of the user, with the ``traceback`` of the user's code, without secrets.

    It goes to standard error, and with --json to standard output too.
    """
    from penstock.configs.secrets import redacted

    text = redacted(text)
    traceback_lines = redacted(traceback).splitlines()
    print(*map(escaped, traceback_lines), f"penstock: {escaped(text)}", sep="\n", file=sys.stderr)

    if "--json" in sys.argv:
        result: dict[str, object] = {"error": text, "exit_code": 2}
        if traceback_lines:
            result["traceback"] = traceback_lines
        print(json.dumps(result))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Print the version, or the help if no command is given."""
    if version:
        print(penstock.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(rich_help_panel=TRAIN)
def train(
    target: TargetOrRun,
    overrides: Overrides = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of runs, with the seeds run.seed, run.seed + 1, ...",
        ),
    ] = 1,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Number of runs of --seeds that train at the same time. By default as many as the "
            "cores allow; 1 runs them one after another, with the live view.",
        ),
    ] = None,
    resume: ResumeOption = "no",
    resume_from: ResumeFrom = None,
    engine: EngineName = "local",
    address: ClusterAddress = None,
    working_dir: WorkingDir = None,
    show_page: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Serve the page of `penstock watch` beside the run, as long as it lasts.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train with actors and learners, until a limit in stop.* is reached or Ctrl-C."""
    options = overrides or []

    # Several seeds: a group of runs, each a process of its own.
    if seeds > 1:
        if show_page:
            raise UserError("--watch is of one run; start `penstock watch runs` beside --seeds")
        if engine != "local":
            raise UserError(f"--engine {engine} starts one run; leave out --seeds")
        if resume_from is not None:
            raise UserError("--resume-from starts one run; leave out --seeds")
        from penstock.launch import seeds as run_group

        exit_code = run_group.train_seeds(
            target, options, seeds=seeds, resume=resume, as_json=as_json, parallel=parallel
        )
        sys.exit(exit_code)

    # One seed: a single run, supervised by this process.
    if parallel is not None:
        raise UserError("--parallel is of several runs; add --seeds N, or leave it out")
    with gc_paused(), exit_on_interrupt():
        from penstock.launch import run

    make_sink = None
    engine_choice = run.choose_engine(engine, address, working_dir)
    if show_page:
        from penstock.watch.beside import PageBeside

        make_sink = PageBeside
    exit_code = run.train(
        target,
        options,
        resume=resume,
        as_json=as_json,
        source=resume_from,
        place=engine_choice,
        make_sink=make_sink,
    )
    sys.exit(exit_code)


@app.command(rich_help_panel=MEASURE)
def profile(
    target: Target,
    overrides: Overrides = None,
    seconds: Annotated[
        float, typer.Option(help="Length of the profiled window, in seconds.")
    ] = 30.0,
    with_torch: Annotated[
        bool,
        typer.Option(
            "--torch", help="After the window, run torch's profiler over some learner steps."
        ),
    ] = False,
    as_json: Json = False,
    engine: EngineName = "local",
    address: ClusterAddress = None,
    working_dir: WorkingDir = None,
) -> None:
    """Train for a while and report where the time went, the bottleneck and what to change."""
    from penstock.cli import profile
    from penstock.launch import run

    engine_choice = run.choose_engine(engine, address, working_dir)
    exit_code = profile.main(
        target,
        overrides or [],
        seconds=seconds,
        with_torch=with_torch,
        as_json=as_json,
        place=engine_choice,
    )
    sys.exit(exit_code)


@app.command(rich_help_panel=TRAIN)
def learner(
    target: TargetOrRun,
    overrides: Overrides = None,
    bind: Annotated[
        str | None,
        typer.Option(
            help="Address at which actors join, such as tcp://0.0.0.0:7700; the same as "
            "transport.bind=. By default a socket in the run's folder, for actors of this user on "
            "this host."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Accept actors without authentication, from every host that reaches the address.",
        ),
    ] = False,
    trusted_network: Annotated[
        bool,
        typer.Option(
            "--trusted-network",
            help="Allow a --store that other hosts reach. Connections between learners are not "
            "authenticated, so the network must be trusted.",
        ),
    ] = False,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Rank of this learner among --world learners, counted from 0."),
    ] = None,
    world: Annotated[
        int | None, typer.Option(min=1, help="Number of learners, over all machines.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Rendezvous of the learners: host:port on the machine of rank 0."),
    ] = None,
    resume: ResumeOption = "no",
    resume_from: ResumeFrom = None,
    as_json: Json = False,
) -> None:
    """Start a learner without actors; actors join it from this host or others. Works with
    torchrun."""
    from penstock.launch import run
    from penstock.launch.machines import check_store, find_place

    # The place among several learners, by these options or by torchrun's variables.
    place = find_place(rank=rank, world=world, store=store, environ=os.environ)
    if place is not None:
        check_store(place, trusted=trusted_network or insecure)

    options = list(overrides or [])
    if insecure:
        options.append("transport.insecure=true")
    exit_code = run.learner(
        target,
        options,
        bind=bind,
        place=place,
        resume=resume,
        as_json=as_json,
        source=resume_from,
    )
    sys.exit(exit_code)


@app.command(cls=ListsTransports, rich_help_panel=TRAIN)
def actor(
    connect: Annotated[
        str,
        typer.Option(
            help="Address of the learner, such as tcp://10.0.0.1:7700, or the folder of its run on "
            "this host."
        ),
    ],
    count: Annotated[int, typer.Option(min=1, help="Number of actor processes.")] = 1,
    transport: Annotated[
        str, typer.Option(help="Transport of samples and weights.")
    ] = "auto",  # `ListsTransports` adds the names
    curve: Annotated[
        str | None, typer.Option(help="Folder with this host's CURVE keys (penstock keys new).")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Connect without keys, and run the environment, network and algorithm that the "
            "config received from the address names.",
        ),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Environment, wrapper, network or algorithm that the learner's config may name, "
            "such as my_game:make_env or 'my_game:*'; others are refused. May be repeated. By "
            "default every name is allowed from an authenticated learner, and only gymnasium ids "
            "from others.",
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Longest time to wait for the learner, at the start and when it is lost; then the "
            "command ends with exit code 1. By default it waits without limit. When the run has "
            "reached its end, the command ends with exit code 0 in any case.",
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option("--dir", help="Folder for the logs; by default runs/actors-<time>."),
    ] = None,
    log: Annotated[
        Literal["text", "json"],
        typer.Option(help="Output on the terminal, as with run.log: text, or JSON lines."),
    ] = "text",
    as_json: Json = False,
) -> None:
    """Start actors that join a learner, and end with its run. The learner may be started before or
    after them."""
    from penstock.launch import run

    exit_code = run.actors(
        connect,
        count=count,
        transport=transport,
        curve=curve,
        run_dir=run_dir,
        as_json=as_json,
        insecure=insecure,
        allow=allow or (),
        log=log,
        wait_s=wait,
    )
    sys.exit(exit_code)


@app.command(rich_help_panel=MEASURE)
def doctor(as_json: Json = False) -> None:
    """Check this machine: cores, memory, limits, packages and GPUs, with warnings for problems."""
    from penstock.cli.doctor import describe, examine

    facts = examine()
    answer(describe(facts), facts, as_json)


@app.command(rich_help_panel=WATCH)
def status(
    run_dir: LivingRun,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Only check that the supervisor replies: exit code 0 if it does and 2 if not, for "
            "the probes of a scheduler.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the current phase of each process of a live run, and its duration."""
    from penstock.monitor import status

    if probe:
        pid = status.probe(run_dir)
        answer(f"the supervisor of {run_dir} replies, pid {pid}", {"pid": pid}, as_json)
        return

    report = status.status(run_dir)
    answer(status.describe(report), report, as_json)


@app.command(rich_help_panel=WATCH)
def stacks(run_dir: LivingRun, as_json: Json = False) -> None:
    """Print the Python stacks of each process of a live run, including hung processes."""
    from penstock.monitor import stacks

    report = stacks.stacks(run_dir)
    answer(stacks.describe(report), report, as_json)


@app.command(rich_help_panel=WATCH)
def save(
    run_dir: LivingRun,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Longest time to wait for the checkpoint.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Have a live run write a checkpoint now, and wait until it is written."""
    from penstock.monitor import supervisor_client

    saved = supervisor_client.save(run_dir, timeout)
    text = f"{saved['folder']} was written, after {saved['trained_steps']:,} trained agent steps"
    answer(text, saved, as_json)


@config_app.command("show")
def config_show(target: Target, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the complete config of a target with overrides."""
    from penstock.configs.load import dump, resolve_target

    resolved = resolve_target(target, overrides or [])
    comments = "".join(f"# {note}\n" for note in (resolved.origin, resolved.defaults) if note)
    text = comments + dump(resolved.config).rstrip()
    answer(text, resolved.config.model_dump(mode="json"), as_json)


@config_app.command("list")
def config_list(as_json: Json = False) -> None:
    """List the presets."""
    from penstock.configs.load import presets

    descriptions = presets()
    width = max(map(len, descriptions))
    lines = [f"{name:{width}}  {text}" for name, text in descriptions.items()]
    answer("\n".join(lines), descriptions, as_json)


@config_app.command("schema")
def config_schema(as_json: Json = False) -> None:
    """Print the JSON Schema of a YAML file, by which editors complete and check it."""
    from penstock.configs.json_schema import json_schema

    schema = json_schema()
    answer(json.dumps(schema, indent=2), schema, as_json)


@keys_app.command("new")
def keys_new(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER", help="Folder to create for the keys; it must not hold keys."
        ),
    ] = "keys",
    as_json: Json = False,
) -> None:
    """Make the CURVE keys of a run: a pair for the learner, and a pair for its actors."""
    from pathlib import Path

    from penstock.transport.zmq import keys

    paths = [str(path) for path in keys.make_keys(Path(folder))]
    answer("\n".join(paths), {"files": paths}, as_json)


@replay_app.command("serve")
def replay_serve(
    spec: Annotated[
        str,
        typer.Option(
            help="YAML file that describes the buffer: columns, envs, unroll, frame_stack, n_step, "
            "discount, autoreset."
        ),
    ],
    bind: Annotated[
        str, typer.Option(help="Address for clients: tcp://host:port or ipc://path.")
    ] = "tcp://127.0.0.1:7800",
    capacity: Annotated[
        int, typer.Option(help="Minimum number of rows that the buffer keeps.")
    ] = 1_000_000,
    sampler: Annotated[
        str,
        typer.Option(
            metavar="|".join(SAMPLERS),
            callback=sampler_name,
            help="Distribution from which rows are sampled.",
        ),
    ] = "uniform",
    alpha: Annotated[
        float,
        typer.Option(
            help="Exponent of the priorities with --sampler prioritized: 0 is uniform, 1 "
            "proportional."
        ),
    ] = 0.6,
    beta: Annotated[
        float,
        typer.Option(
            help="Exponent of the importance weights with --sampler prioritized: 1 corrects in "
            "full."
        ),
    ] = 0.4,
    curve: Annotated[
        str | None, typer.Option(help="Folder with CURVE keys (penstock keys new).")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Accept clients without authentication, from every host that reaches the address.",
        ),
    ] = False,
    snapshot: Annotated[
        str | None,
        typer.Option(
            help="Folder for snapshots of the buffer. A complete snapshot in it is restored at the "
            "start. By default no snapshots are written."
        ),
    ] = None,
    snapshot_every: Annotated[
        float,
        typer.Option(help="Seconds between snapshots; another one is written at the end."),
    ] = 600.0,
    max_clients: Annotated[
        int, typer.Option(min=1, help="Maximum number of connected clients.")
    ] = 1024,
    client_mb: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum of sampled batches that one client has not read, in MiB. A single batch "
            "may be larger.",
        ),
    ] = 32,
    batches_mb: Annotated[
        int,
        typer.Option(
            min=1,
            help="Maximum of sampled batches that all clients together have not read, in MiB, and "
            "of a single batch.",
        ),
    ] = 512,
    slots_mb: Annotated[
        int, typer.Option(min=1, help="Maximum of received slots that wait to be stored, in MiB.")
    ] = 256,
    as_json: Json = False,
) -> None:
    """Serve a replay buffer that clients write to and sample from over the network, until
    Ctrl-C."""
    from pathlib import Path

    from penstock.cli.replay_server import serve
    from penstock.configs.sections import ReplayConfig
    from penstock.replay.remote.peers import ServiceLimits

    if client_mb > batches_mb:
        raise UserError(
            f"--client-mb {client_mb} is more than --batches-mb {batches_mb}, the limit for all "
            f"clients together; set --client-mb {batches_mb} or less"
        )

    # Not validated: the sampler checks its own arguments, and `--sampler` was checked.
    sampling = ReplayConfig.model_construct(sampler=sampler, alpha=alpha, beta=beta)
    limits = ServiceLimits(
        peers=max_clients,
        peer_nbytes=client_mb << 20,
        answers_nbytes=batches_mb << 20,
        waiting_nbytes=slots_mb << 20,
    )
    serve(
        bind,
        Path(spec),
        capacity=capacity,
        sampling=sampling,
        curve=Path(curve) if curve else None,
        insecure=insecure,
        snapshot=Path(snapshot) if snapshot else None,
        snapshot_every_s=snapshot_every,
        limits=limits,
        as_json=as_json,
    )


for name, command in COMMANDS.items():
    app.command(name, rich_help_panel=LOOK)(command)


@app.command("check-env", rich_help_panel=MEASURE)
def check_env(
    target: Target,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=10, help="Number of random steps to play.")] = 2000,
    envs: Annotated[
        int, typer.Option(min=1, help="Number of environments in the speed measurement.")
    ] = 16,
    hang_s: Annotated[
        float,
        typer.Option(min=1, help="Seconds after which a call of the environment counts as hung."),
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Check an environment for errors and measure its speed. Exit code 2 if errors are found."""
    from penstock.cli.check_env import check, describe, hang_report
    from penstock.core.processes import ending_programs
    from penstock.envs.checking.hung import end_all, reporting_hung_calls

    def end_with_hang(clause: str) -> None:
        """Report the call that does not return, and end; it is called from another thread."""
        report = hang_report(target, clause)
        answer(describe(report), report, as_json)
        end_all(2)

    # Each way out is `end_all`: programs and threads that the environment leaves behind end with
    # the command.
    try:
        with ending_programs(), reporting_hung_calls(hang_s, end_with_hang) as beat:
            report = check(target, overrides or [], steps=steps, envs=envs, beat=beat)
    except UserError as error:
        _show_mistake(str(error), error.traceback)
        end_all(2)
    except KeyboardInterrupt:
        end_all(130)

    answer(describe(report), report, as_json)
    end_all(2 if report["problems"] else 0)


app.command("check-client", rich_help_panel=MEASURE)(check_client)
app.command("watch", rich_help_panel=WATCH)(watch)
app.command("serve", rich_help_panel=LOOK)(serve)
app.command("serve-env", rich_help_panel=TRAIN)(serve_env)
app.command("tune", rich_help_panel=TRAIN)(tune)
app.command("league", rich_help_panel=TRAIN)(league)

"""The command `penstock`. Thin: each command imports what it needs when it is called.

Every command takes --json: then the last line of standard output is one JSON object, and what is
for people goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Literal

import typer

import penstock
from penstock.cli import bench, env, runs
from penstock.cli.options import (
    MEASURE,
    PREPARE,
    TRAIN,
    WATCH,
    Grouped,
    Json,
    LivingRun,
    Overrides,
    ResumeFrom,
    ResumeOption,
    Target,
    TargetOrRun,
    answer,
)
from penstock.configs.errors import UserError

EPILOG = (
    "A TARGET is a preset, a YAML file, a gymnasium id, module:EnvId-v0 or module:function; "
    "KEY=VALUE are options of the configuration. Exit codes: 0 done, 2 a mistake in what was "
    "asked, 1 a fault, 130 and 143 interrupted (Ctrl-C, SIGTERM) after a clean end. With --json "
    "the last line of standard output is one JSON object, and what is for people goes to "
    "standard error."
)
app = typer.Typer(
    cls=Grouped,
    help="Trains game agents: actors play, learners learn, and nothing waits.",
    epilog=EPILOG,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Show configs.", no_args_is_help=True, rich_markup_mode=None)
keys_app = typer.Typer(help="Keys for encrypted runs.", no_args_is_help=True, rich_markup_mode=None)
replay_app = typer.Typer(help="Replay buffers.", no_args_is_help=True, rich_markup_mode=None)
runs.register(app)
bench.register(app)
env.register(app)
app.add_typer(config_app, name="config", rich_help_panel=PREPARE)
app.add_typer(keys_app, name="keys", rich_help_panel=PREPARE)
app.add_typer(replay_app, name="replay", rich_help_panel=PREPARE)


def main() -> None:
    """Run a command; a user's mistake is one sentence and exit code 2."""
    if "" not in sys.path:
        sys.path.append("")  # a user's game lies where the command is given
    try:
        app()
    except UserError as error:
        print(f"penstock: {error}", file=sys.stderr)
        if "--json" in sys.argv:
            print(json.dumps({"error": str(error), "exit_code": 2}))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(penstock.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command(rich_help_panel=TRAIN)
def train(
    target: TargetOrRun,
    overrides: Overrides = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs, one after another, of run.seed and those after it.")
    ] = 1,
    resume: ResumeOption = "no",
    resume_from: ResumeFrom = None,
    as_json: Json = False,
) -> None:
    """Train on this host: actors and a learner, until stop.* or Ctrl-C."""
    if seeds > 1:
        from penstock.launch import seeds as group

        if resume_from is not None:
            raise UserError("--resume-from begins one run; leave out --seeds")

        sys.exit(group.train(target, overrides or [], seeds, resume, as_json))
    from penstock.launch import run

    sys.exit(run.train(target, overrides or [], resume, as_json, resume_from))


@app.command(rich_help_panel=WATCH)
def profile(
    target: Target,
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(help="Of the window that is looked at.")] = 30.0,
    with_torch: Annotated[
        bool, typer.Option("--torch", help="Then run torch's profiler over some learner steps.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train for a while, and say where the time went and what to change."""
    from penstock.cli import profile

    sys.exit(profile.main(target, overrides or [], seconds, with_torch, as_json))


@app.command(rich_help_panel=TRAIN)
def learner(
    target: TargetOrRun,
    overrides: Overrides = None,
    bind: Annotated[
        str | None,
        typer.Option(
            help="Where actors join, the same as transport.bind=; without it a socket in the run's "
            "folder, for this user's actors on this host."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let anybody join who reaches the address.")
    ] = False,
    trusted_network: Annotated[
        bool,
        typer.Option(
            "--trusted-network",
            help="Allow a --store off this host: learners among themselves have no keys.",
        ),
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Which of several learners this one is, from 0.")
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="How many learners there are.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Where they meet: host:port at the machine of rank 0.")
    ] = None,
    resume: ResumeOption = "no",
    resume_from: ResumeFrom = None,
    as_json: Json = False,
) -> None:
    """Start a learner that actors join, from this host or others; also by torchrun."""
    from penstock.launch import run
    from penstock.launch.machines import check_store, find_place

    place = find_place(rank, world, store, os.environ)
    if place is not None:
        check_store(place, trusted=trusted_network or insecure)
    options = [*(overrides or []), *(["transport.insecure=true"] if insecure else [])]
    sys.exit(run.learner(target, options, bind, place, resume, as_json, resume_from))


@app.command(rich_help_panel=TRAIN)
def actor(
    connect: Annotated[
        str,
        typer.Option(help="The learner's address, or the folder of its run on this host."),
    ],
    count: Annotated[int, typer.Option(min=1, help="Actor processes to start.")] = 1,
    transport: Annotated[
        str,
        typer.Option(
            metavar="auto|shm|zmq",
            help="Shared memory or ZeroMQ; auto: by whether the learner is on this host.",
        ),
    ] = "auto",
    curve: Annotated[str | None, typer.Option(help="Folder with this host's keys.")] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Run what whoever answers at the address asks for."),
    ] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Environment, wrapper, network or algorithm that the learner may name, such as "
            "my_game:make_env or 'my_game:*'; all others are refused. May be repeated.",
        ),
    ] = None,
    run_dir: Annotated[str | None, typer.Option("--dir", help="Folder for the logs.")] = None,
    as_json: Json = False,
) -> None:
    """Start actors for a learner, which may come up earlier or later."""
    from penstock.launch import run

    sys.exit(run.actors(connect, count, transport, curve, run_dir, as_json, insecure, allow or ()))


@app.command(rich_help_panel=MEASURE)
def doctor(as_json: Json = False) -> None:
    """Look at this machine, and say what would hurt a run."""
    from penstock.cli.doctor import describe, examine

    facts = examine()
    answer(describe(facts), facts, as_json)


@app.command(rich_help_panel=WATCH)
def status(run_dir: LivingRun, as_json: Json = False) -> None:
    """Say what each process of a living run is in, and since when."""
    from penstock.monitor import status_client

    report = status_client.status(run_dir)
    answer(status_client.describe(report), report, as_json)


@app.command(rich_help_panel=WATCH)
def stacks(run_dir: LivingRun, as_json: Json = False) -> None:
    """Print the Python stacks of each process of a living run, stuck ones too."""
    from penstock.monitor import stacks

    report = stacks.stacks(run_dir)
    answer(stacks.describe(report), report, as_json)


@config_app.command("show")
def config_show(target: Target, overrides: Overrides = None, as_json: Json = False) -> None:
    """Print the resolved, checked config."""
    from penstock.configs.load import dump, resolve

    config = resolve(target, overrides or [])
    answer(dump(config).rstrip(), config.model_dump(mode="json"), as_json)


@config_app.command("list")
def config_list(as_json: Json = False) -> None:
    """List the presets."""
    from penstock.configs.load import presets

    found = presets()
    width = max(map(len, found))
    answer("\n".join(f"{name:{width}}  {text}" for name, text in found.items()), found, as_json)


@keys_app.command("new")
def keys_new(
    folder: Annotated[str, typer.Argument(help="Folder to make.")] = "keys", as_json: Json = False
) -> None:
    """Make the CURVE keys of a run: the learner's, and one pair for its actors."""
    from pathlib import Path

    from penstock.transport.zmq.keys import new

    paths = [str(path) for path in new(Path(folder))]
    answer("\n".join(paths), {"files": paths}, as_json)


@replay_app.command("serve")
def replay_serve(
    spec: Annotated[str, typer.Option(help="YAML file: columns, envs, n_step, frame_stack ...")],
    bind: Annotated[
        str, typer.Option(help="Where clients connect: tcp://host:port, or ipc://path.")
    ] = "tcp://127.0.0.1:7800",
    capacity: Annotated[int, typer.Option(help="Rows that are kept at least.")] = 1_000_000,
    sampler: Annotated[
        Literal["uniform", "prioritized"], typer.Option(help="How rows are drawn.")
    ] = "uniform",
    alpha: Annotated[float, typer.Option(help="Of prioritized: how much priorities count.")] = 0.6,
    beta: Annotated[float, typer.Option(help="Of prioritized: how much weights correct.")] = 0.4,
    curve: Annotated[str | None, typer.Option(help="Folder with keys of `keys new`.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let anybody in who reaches the address.")
    ] = False,
    snapshot: Annotated[
        str | None,
        typer.Option(
            help="Folder for snapshots of the buffer; a whole one in it is restored at the start."
        ),
    ] = None,
    snapshot_every: Annotated[
        float, typer.Option(help="Seconds between snapshots; a last one is written at the end.")
    ] = 600.0,
    as_json: Json = False,
) -> None:
    """Keep a replay buffer that clients fill and sample over the network, until Ctrl-C."""
    from pathlib import Path

    from penstock.cli.replay_server import serve

    keys = Path(curve) if curve else None
    folder = Path(snapshot) if snapshot else None
    serve(
        bind, Path(spec), capacity, sampler, alpha, beta, keys, insecure, folder, snapshot_every,
        as_json,
    )  # fmt: skip

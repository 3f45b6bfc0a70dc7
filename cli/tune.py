"""The command tune, which trains with options from a space."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from penstock.cli.options import Json, Overrides, Target
from penstock.configs.errors import UserError


def tune(
    target: Target,
    space: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="YAML file of the space: a line per option, with a list of choices or {low: A, "
            "high: B, log: true}.",
        ),
    ],
    overrides: Overrides = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of random trials, or size of the population with --pbt. By default all "
            "combinations of a space that has only lists.",
        ),
    ] = None,
    asha: Annotated[
        bool,
        typer.Option(
            "--asha", help="Stop trials early that are worse than others (ASHA of Ray Tune)."
        ),
    ] = False,
    pbt: Annotated[
        bool,
        typer.Option(
            "--pbt",
            help="Population based training of Ray Tune: the worst trials continue from the "
            "checkpoints of the best ones, with perturbed options.",
        ),
    ] = False,
    metric: Annotated[
        Literal["eval", "return"],
        typer.Option(
            help="Figure by which trials are compared: `eval` is the mean return of their "
            "evaluations, `return` that of the last 100 episodes in training."
        ),
    ] = "eval",
    interval: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Agent steps between two decisions of --pbt, or before the first of --asha; "
            "evaluations are at least as frequent. By default a tenth of stop.env_steps.",
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            help="Number of trials that train at the same time. By default as many as the cores "
            "allow.",
        ),
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(
            "--dir",
            help="New folder for the runs of all trials; by default runs/tune-<target>-<time>.",
        ),
    ] = None,
    no_ray: Annotated[
        bool,
        typer.Option("--no-ray", help="Do not use Ray Tune, which is used where it is installed."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare runs with options drawn from a space, by Ray Tune or without it."""
    from penstock.launch.tuning.sweep import Scheduler, make_sweep
    from penstock.launch.tuning.tune import run_sweep as run_sweep
    from penstock.launch.tuning.tune import uses_tune

    if asha and pbt:
        raise UserError("--asha and --pbt are two schedulers; give one of them")
    scheduler: Scheduler = "none"
    if asha:
        scheduler = "asha"
    elif pbt:
        scheduler = "pbt"

    # A missing Ray Tune is refused first, before anything else of the sweep is checked.
    with_ray = not no_ray
    uses_tune(scheduler, with_ray)
    sweep = make_sweep(
        target,
        overrides or [],
        space=space,
        number=trials,
        scheduler=scheduler,
        metric=metric,
        interval=interval,
        parallel=parallel,
        folder=folder,
    )
    sys.exit(run_sweep(sweep, with_ray, as_json))

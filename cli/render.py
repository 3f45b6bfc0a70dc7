"""`penstock render`: scripts and manifests that start a run on other schedulers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import Json, Overrides, Target, answer

render_app = typer.Typer(
    help="Print scripts that start a run on a cluster.", no_args_is_help=True, rich_markup_mode=None
)


@render_app.command("slurm")
def slurm(
    target: Target,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    cpus: Annotated[
        int | None,
        typer.Option(min=1, help="Cores of each node; by default the job has whole nodes."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node; each gets a learner.")] = 0,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time limit of the job, such as 12:00:00."),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="SLURM's partition.")] = None,
    account: Annotated[str | None, typer.Option(help="SLURM's account.")] = None,
    engine: Annotated[
        Literal["ray", "none"],
        typer.Option(
            help="`ray` starts a Ray cluster on the nodes, which places all processes; `none` "
            "starts a learner and its actors on each node, without Ray."
        ),
    ] = "ray",
    grace: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Time that the run has to save before the job ends; sets run.grace_s.",
        ),
    ] = 60,
    as_json: Json = False,
) -> None:
    """Print a batch script for SLURM: redirect it to a file, read it, and submit it by sbatch."""
    from penstock.launch.render import slurm

    program = shutil.which("penstock")
    environment = str(Path(program).parent) if program else None
    job = slurm.Job(nodes, cpus, gpus, time, partition, account)
    text = slurm.render(target, overrides or [], job, engine, grace, environment)
    answer(text.rstrip(), {"script": text}, as_json)

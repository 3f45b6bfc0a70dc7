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
    partition: Annotated[
        str | None, typer.Option(help="Partition of the cluster; by default the cluster's own.")
    ] = None,
    account: Annotated[
        str | None, typer.Option(help="Account that is charged for the job; by default your own.")
    ] = None,
    engine: Annotated[
        Literal["ray", "none"],
        typer.Option(
            help="What places the processes: `ray` (a Ray cluster that the job starts on its "
            "nodes) or `none` (a learner and its actors on each node)."
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
    working_dir: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with code of your own, which becomes the current folder of all processes.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a batch script for SLURM: redirect it to a file, read it, and submit it by sbatch."""
    from penstock.launch.render import slurm

    # The script starts the command of the environment that this one is installed in.
    program = shutil.which("penstock")
    environment = str(Path(program).parent) if program else None

    job = slurm.Job(
        nodes=nodes, cpus=cpus, gpus=gpus, time=time, partition=partition, account=account
    )
    text = slurm.render(
        target,
        overrides or [],
        job,
        engine=engine,
        grace_s=grace,
        environment=environment,
        working_dir=working_dir,
    )
    answer(text.rstrip(), {"script": text}, as_json)


@render_app.command("kubernetes")
def kubernetes(
    target: Target,
    image: Annotated[
        str, typer.Option(help="Container image with Penstock, such as that of the Dockerfile.")
    ],
    overrides: Overrides = None,
    nodes: Annotated[
        int, typer.Option(min=1, help="Number of pods of actors, or with Ray of its nodes.")
    ] = 1,
    learners: Annotated[
        int, typer.Option(min=1, help="Number of pods of learners, with --engine none.")
    ] = 1,
    cpus: Annotated[int, typer.Option(min=1, help="Cores of each pod.")] = 4,
    gpus: Annotated[
        int,
        typer.Option(min=0, help="GPUs of each pod of a learner, or with Ray of each node."),
    ] = 0,
    memory: Annotated[str, typer.Option(help="Memory of each pod, such as 8Gi.")] = "8Gi",
    claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim on which the runs are.")
    ] = "penstock-runs",
    name: Annotated[
        str | None,
        typer.Option(help="Name of the run and its objects; by default that of the target."),
    ] = None,
    engine: Annotated[
        Literal["ray", "none"],
        typer.Option(
            help="What places the processes: `ray` (KubeRay, by a RayJob) or `none` (a Job of "
            "learners and a StatefulSet of actors)."
        ),
    ] = "ray",
    grace: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Time that the run has to save before its pod ends; sets run.grace_s.",
        ),
    ] = 60,
    as_json: Json = False,
) -> None:
    """Print manifests for Kubernetes: redirect them to a file, read it, and apply it by kubectl."""
    from penstock.launch.render import kubernetes

    pods = kubernetes.Pods(
        image=image,
        nodes=nodes,
        learners=learners,
        cpus=cpus,
        gpus=gpus,
        memory=memory,
        claim=claim,
    )
    text = kubernetes.render(target, overrides or [], pods, engine=engine, name=name, grace_s=grace)
    answer(text.rstrip(), {"manifests": text}, as_json)

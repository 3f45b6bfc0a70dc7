"""The benchmark commands: bench and bench reduce."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import Json

bench_app = typer.Typer(rich_markup_mode=None)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    target: Annotated[
        str, typer.Option(help="Config to measure: a TARGET of `penstock train`.")
    ] = "pong",
    seconds: Annotated[float, typer.Option(help="Duration of each stage, in seconds.")] = 2.0,
    only: Annotated[
        str | None,
        typer.Option(help="Stages to measure, such as environment,learner,whole; by default all."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Earlier output of --json; differences from it are printed."
        ),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also measure other RL systems, in turns with Penstock."),
    ] = False,
    peers_in: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Folder in which `make peers` installed the peers."),
    ] = ".",
    as_json: Json = False,
) -> None:
    """Measure the throughput of each stage of a run alone, and of all stages together."""
    # typer calls this function before `bench reduce` too.
    if context.invoked_subcommand is not None:
        return
    from penstock.bench import stages

    peers_folder = peers_in if peers else None
    plan = stages.make_plan(target, seconds, only, old=compare, peers=peers_folder)
    stages.main(plan, as_json)


@bench_app.command("reduce")
def bench_reduce(
    learners: Annotated[
        int, typer.Option(help="Number of learners, each on a simulated host.")
    ] = 4,
    parameters: Annotated[
        str, typer.Option(help="Approximate number of values in a gradient.")
    ] = "1.7M",
    codecs: Annotated[
        str,
        typer.Option(help="Codecs to measure, such as int8,dgc: values of learner.reduce.codec."),
    ] = "all",
    links: Annotated[
        str | None,
        typer.Option(
            help="Link rates to simulate, of 100mbit,1gbit,unlimited; by default all. Needs root."
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Approximate duration of each measurement, in seconds.")
    ] = 3.0,
    as_json: Json = False,
) -> None:
    """Measure bytes, time and error of the gradient reduction, for each codec and link rate."""
    from penstock.bench.checkout import benchmark

    reduce = benchmark("reduce", "penstock bench reduce")
    plan = reduce.make_plan(
        learners, parameters=parameters, codecs=codecs, links=links, seconds=seconds
    )
    reduce.main(plan, as_json)

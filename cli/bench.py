"""The commands that measure this machine: bench, and its parts."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.options import MEASURE, Json

bench_app = typer.Typer(rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Add them to the program."""
    app.add_typer(bench_app, name="bench", rich_help_panel=MEASURE)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="As of `train`.")] = "pong",
    seconds: Annotated[float, typer.Option(help="Of each stage.")] = 2.0,
    only: Annotated[
        str | None, typer.Option(help="Some of the stages: environment,learner,whole.")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="FILE", help="What --json printed at another time.")
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure other systems too, in turns with this one.")
    ] = False,
    peers_in: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where `make peers` installed them.")
    ] = ".",
    as_json: Json = False,
) -> None:
    """Measure this machine: what each stage of a target does alone, and all of them together."""
    if context.invoked_subcommand is not None:
        return
    from penstock.bench import stages

    plan = stages.make_plan(target, seconds, only, compare, peers_in if peers else None)
    stages.main(plan, as_json)


@bench_app.command("reduce")
def bench_reduce(
    learners: Annotated[int, typer.Option(help="Learners, each on a host of its own.")] = 4,
    parameters: Annotated[str, typer.Option(help="Values of a gradient, about.")] = "1.7M",
    codecs: Annotated[str, typer.Option(help="Some of learner.reduce.codec: int8,dgc.")] = "all",
    links: Annotated[
        str | None,
        typer.Option(help="Some of 100mbit,1gbit,unlimited; all if left out. Needs root."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of each measurement of steps, about.")] = 3.0,
    as_json: Json = False,
) -> None:
    """Reduce gradients over links of some rates: bytes, times and errors of every codec."""
    from penstock.bench.checkout import benchmark

    reduce = benchmark("reduce", "penstock bench reduce")
    reduce.main(reduce.make_plan(learners, parameters, codecs, links, seconds), as_json)

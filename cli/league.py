"""The command league, which trains the lines of a league, or shows what they have become."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import Json, Overrides, ResumeOption, answer
from penstock.cli.runs import playing
from penstock.configs.errors import UserError


def league(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|FOLDER",
            help="A YAML file of a league, to train its lines: a config with the map `lines`. Or "
            "the folder of a league or of a run, to show its members.",
        ),
    ],
    overrides: Overrides = None,
    resume: ResumeOption = "no",
    rate: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="GAMES",
            help="Play so many games between each two members of a folder first; more make the "
            "ratings more precise.",
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Train several runs that play against each other, or show the ratings of their members."""
    options = overrides or []
    is_folder = os.path.isdir(source)
    if not is_folder or resume != "no":
        if rate:
            raise UserError("--rate plays games of the members in a folder; give it alone")
        from penstock.launch.league import train_league

        sys.exit(train_league(source, options, resume, as_json=as_json))

    if options:
        raise UserError(
            f"{options[0]} is an option of training, and without --resume auto the members of a "
            "folder are shown; add that, or leave it out"
        )

    from penstock.evaluation import league_report
    from penstock.launch.run_group import say_line

    say = partial(say_line, stream=sys.stderr if as_json else sys.stdout)
    with playing():
        report = league_report.report(Path(source), rate, say)
    answer(league_report.describe(report), report, as_json)

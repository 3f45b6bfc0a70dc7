"""The command that looks at an environment: check-env."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.options import MEASURE, Json, Overrides, Target, answer


def register(app: typer.Typer) -> None:
    """Add it to the program."""
    app.command("check-env", rich_help_panel=MEASURE)(check_env)


def check_env(
    target: Target,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=10, help="Steps to play.")] = 2000,
    envs: Annotated[int, typer.Option(min=1, help="Environments whose rate is measured.")] = 16,
    hang_s: Annotated[
        float, typer.Option(min=1, help="Seconds after which a call counts as hung.")
    ] = 30.0,
    as_json: Json = False,
) -> None:
    """Say what is wrong with an environment, and how fast it is. Exit code 2 if anything is."""
    from penstock.cli.check_env import check, describe, hung
    from penstock.envs.checking.hung import end_all, told_where_hung

    def tell(clause: str) -> None:
        report = hung(target, clause)
        answer(describe(report), report, as_json)
        end_all(2)

    with told_where_hung(hang_s, tell):
        report = check(target, overrides or [], steps, envs)
    answer(describe(report), report, as_json)
    sys.exit(2 if report["problems"] else 0)

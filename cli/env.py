"""The command check-env, which tests an environment."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.options import MEASURE, Json, Overrides, Target, answer


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("check-env", rich_help_panel=MEASURE)(check_env)


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

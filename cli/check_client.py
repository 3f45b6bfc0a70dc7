"""`penstock check-client`: plays the service by a script, and says what a client does otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Json, answer

if TYPE_CHECKING:
    from penstock.serving.client_check import PartResult


def check_client(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND...]",
            help="Starts an echo game; HOST and PORT are appended. Without it the check waits for "
            "one that you start.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port that the game connects to. By default any, or without COMMAND the first "
            "free one from 8900 on.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check the bytes of a game's client, by its echo game. Exit code 1 if it departs."""
    from penstock.serving.client_check import check_client as check

    def tell(text: str) -> None:
        """Print progress apart from the result."""
        print(text, file=sys.stderr, flush=True)

    results = check(command or [], port, tell)
    departures = sum(bool(result.departure) for result in results)
    report = {"departures": departures, "parts": [result._asdict() for result in results]}
    answer(_describe(results), report, as_json)
    sys.exit(1 if departures else 0)


def _describe(results: Sequence[PartResult]) -> str:
    """Returns the results as text, a line for each part and one for each departure."""
    lines: list[str] = []
    departures = 0
    for result in results:
        if result.departure:
            departures += 1
            lines.append(f"{result.part:18} departs after {result.rows} rows: {result.departure}")
        else:
            lines.append(f"{result.part:18} {result.rows} rows as expected, {result.took_s:.1f} s")

    if departures:
        lines.append(f"{departures} of {len(results)} parts have a departure")
    else:
        lines.append("no departures")
    return "\n".join(lines)

"""What seats and opponents cost an actor: agent steps/s of one that plays without a learner.

A synthetic game with one seat, the same with two seats that the policy plays alone (mirror), and
with members of the pool as opponents for half of the rows; connect four likewise, and against its
scripted player `random`. Opponents' rows are no agent steps. Unrolls of all take turns, and the
median of the rounds counts.

    python benchmarks/seats.py [--envs 512] [--seconds 10] [--json] [--save]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from common import finish, parser
from penstock.algos.samples import slot_spec
from penstock.configs.load import resolve
from penstock.launch.measuring import playing

GAMES = ("synthetic", "env.id=penstock/SyntheticGames-v0", "stop.return=null")
RIVALS = (*GAMES, "env.kwargs.rivals=true")
BOARD = ("connect_four",)
HALF = "league.mirror=0.5"


class Case(NamedTuple):
    """What is played."""

    name: str
    target: tuple[str, ...]
    """A preset, and options."""
    compared_with: str = ""
    """Name of another case, to whose rate this one's is compared."""
    must: float | None = None
    """The least ratio."""


CASES = (
    Case("one seat", (*GAMES, "env.kwargs.seats=1")),
    Case("two seats, mirror", RIVALS, "one seat", must=0.9),
    Case("two seats, half against the pool", (*RIVALS, HALF), "two seats, mirror", must=0.6),
    Case("connect four, mirror", BOARD),
    Case("connect four, half against the pool", (*BOARD, HALF), "connect four, mirror"),
    Case(
        "connect four, half against `random`",
        (*BOARD, "league.bots={random: 0.5}"),
        "connect four, mirror",
    ),
)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--envs", type=int, default=512)
    args.add_argument("--seconds", type=float, default=10.0, help="of all rounds")
    options = args.parse_args()
    with ExitStack() as stack:
        plays = {case.name: unroll_of(case, options.envs, stack) for case in CASES}
        rates = in_turns(plays, options.seconds)

    heading = ["what", "agent steps/s", "compared with", "ratio", "must"]
    rows: list[list[Any]] = [heading]
    result: dict[str, Any] = {"envs": options.envs, "cases": {}}
    for case in CASES:
        of = rates.get(case.compared_with)
        ratio = None if of is None else rates[case.name] / of
        rows.append([case.name, rates[case.name], case.compared_with, ratio, case.must])
        result["cases"][case.name] = dict(zip(heading[1:], rows[-1][1:], strict=True))
    finish("seats", result, rows, options)


def unroll_of(case: Case, envs: int, stack: ExitStack) -> Callable[[], int]:
    """Returns what plays an unroll, and returns its agent steps."""
    target, *options = case.target
    config = resolve(target, [*options, f"actors.envs={envs}"])
    env, rollout = stack.enter_context(playing(config))
    columns = slot_spec(config, env.info).views(slot_spec(config, env.info).zeros())
    return lambda: rollout.fill(columns, 0)


def in_turns(plays: dict[str, Callable[[], int]], seconds: float) -> dict[str, float]:
    """Returns agent steps/s by name: medians over rounds, after one to get warm."""
    rates: dict[str, list[float]] = {name: [] for name in plays}
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s or not all(rates.values()):
        for name, play in plays.items():
            began_s = time.perf_counter()
            steps = play()
            rates[name].append(steps / (time.perf_counter() - began_s))
    return {name: statistics.median(found[1:] or found) for name, found in rates.items()}


if __name__ == "__main__":
    main()

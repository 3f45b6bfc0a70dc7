"""CartPole with the page of `penstock watch` open against without, in turns on this machine.

    alone      `penstock train cartpole`
    served     and a server of the page, asked each second for what the page asks for
    open       and the page itself, in headless Chromium on the same cores

Rates are trained agent steps per second after a quarter of the run.

    python benchmarks/watch_open.py [--seconds 15] [--rounds 5] [--json] [--save]

Needs penstock[watch,browser] and Chromium.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import compile_package, finish, parser
from penstock.bench.whole import FOREVER, WARM_UP, train, trained_rate
from watch_page import Server, chromium

METRICS = ("episode_return_mean", "policy_loss", "entropy")


def main() -> None:
    args = parser(__doc__.partition("\n\n")[0] if __doc__ else None)
    args.add_argument("--seconds", type=float, default=15.0)
    args.add_argument("--rounds", type=int, default=5)
    options = args.parse_args()
    compile_package()
    ways: dict[str, Callable[[float], float]] = {"alone": alone, "served": served, "open": opened}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        for name in order:
            rates[name].append(ways[name](options.seconds))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    result = {
        name: {"steps_per_s": medians[name], "of_alone": medians[name] / medians["alone"],
               "rounds": rates[name]}
        for name in rates
    }  # fmt: skip
    rows: list[list[Any]] = [["page", "steps/s", "of alone", "slowest", "fastest"]]
    rows += [
        [name, r["steps_per_s"], r["of_alone"], min(rates[name]), max(rates[name])]
        for name, r in result.items()
    ]
    finish("watch_open", {"ways": result, "asked": {"of_alone": 0.99}}, rows, options)


def alone(seconds: float, folder: Path | None = None) -> float:
    options = (*FOREVER, f"stop.minutes={seconds / 60}", "run.interval_s=0.5")
    return trained_rate(train("cartpole", *options, folder=folder), seconds * WARM_UP)


def served(seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder)) as server:
        over = threading.Event()

        def ask() -> None:
            while not over.wait(1.0):
                if any(run["name"] == "run" for run in server.get("runs")["runs"]):
                    server.get("now", run="run")
                    server.get("curves", run="run", metric=METRICS, x="env_steps", smooth=1)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            return alone(seconds, Path(folder) / "run")
        finally:
            over.set()
            asking.join()


def opened(seconds: float) -> float:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(Server(folder))
        page = stack.enter_context(chromium()).new_page()
        page.goto(f"{server.address}#run=run&view=learning")
        rate = alone(seconds, folder / "run")
        if not page.locator(".js-plotly-plot .scatterlayer path.js-line").count():
            raise SystemExit("the page did not draw the run, so nothing was measured")
        return rate


if __name__ == "__main__":
    main()

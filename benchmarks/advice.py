"""Whether the advice of `penstock profile` helps: it is obeyed, and the rate is measured again.

Environments whose steps are slow in different ways (`slow_games.py`), with one actor at first:

    sleeping         2 ms, as one that waits for a simulator elsewhere
    computing        about 0.3 ms in Python
    asks, computes   a program of its own, over a pipe, which computes as long
    asks, sleeps     such a program that sleeps 2 ms
    mixed            one step in eight sleeps 20 ms
    vector, sleeping 2 ms for a step of all environments, in a vector form of its own

Each is profiled. Of the next step of the verdict, the first clause is obeyed: the options that it
sets. Then runs without and with them take turns, and the medians of their rates are compared. A
first clause without an option says that nothing on this host helps. A verdict on other programs
that crowd the host is skipped, as it is not on the run.

    python benchmarks/advice.py [--seconds 10] [--rounds 3] [--only NAME,...] [--json] [--save]
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import finish, parser, saved_tasks
from penstock.bench.whole import run, train, trained_rate
from penstock.core.processes import python

GAMES = {
    "sleeping": "sleeping",
    "computing": "computing",
    "asks, computes": "asking_one_that_computes",
    "asks, sleeps": "asking_one_that_sleeps",
    "mixed": "mixed",
    "vector, sleeping": "sleeping_vector",
}
OPTIONS = (
    *("algo.name=impala", "actors.count=1", "actors.envs=16", "actors.unroll=8"),
    *("eval.every_steps=null", "run.interval_s=0.5"),
)
HERE = Path(__file__).parent
WARM_UP_S = 3.0  # of training, that a rate leaves out
ASKED = 1.5
OPTION = re.compile(r"\b\w+\.\w+=[^\s,;:)]+")
HEADING = ["environment", "verdict", "advice", "steps/s", "then", "times"]


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--seconds", type=float, default=10.0, help="of each window and run")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--only", default=",".join(GAMES.values()), help="names in slow_games.py")
    options = args.parse_args()
    rows: list[list[Any]] = [HEADING]
    tasks = saved_tasks("advice") if options.save else {}
    for name, maker in GAMES.items():
        if maker in options.only.split(","):
            found = tasks[name] = judge(maker, options.seconds, options.rounds)
            advice = " ".join(found["advice"]) or "nothing helps here"
            rates = [found[key] for key in ("steps_per_s", "then_steps_per_s", "times")]
            rows.append([name, found["verdict"]["kind"], advice, *rates])
    finish("advice", {"asked": ASKED, "options": OPTIONS, "tasks": tasks}, rows, options)


def judge(maker: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Profile, obey, measure again."""
    profile = profiled(maker, seconds)
    verdict = next(v for v in (profile["verdict"], *profile["also"]) if not by_others(v))
    clause, _, _ = verdict["next_step"].partition(";")
    advice = OPTION.findall(clause)
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for obeyed in (False, True) if advice else (False,):
            rates[obeyed].append(rate(maker, advice if obeyed else [], seconds))
    before = statistics.median(rates[False])
    then = statistics.median(rates[True]) if advice else None
    return {
        "verdict": verdict,
        "advice": advice,
        "steps_per_s": before,
        "then_steps_per_s": then,
        "times": None if then is None else then / before,
        "runs": {"before": rates[False], "then": rates[True]},
        "cores": profile["cores"],
        "idle_cores": profile["idle_cores"],
        "actors": profile["actors"],
        "env_threads": profile["env_threads"],
    }


def by_others(verdict: dict[str, Any]) -> bool:
    return verdict["kind"] == "crowded" and "what else runs" in verdict["next_step"]


def rate(maker: str, advice: list[str], seconds: float) -> float:
    """Trained agent steps per second of a run, after its start."""
    minutes = f"stop.minutes={(WARM_UP_S + seconds) / 60}"
    summary = train(f"slow_games:{maker}", *OPTIONS, *advice, minutes, cwd=HERE)
    return trained_rate(summary, WARM_UP_S)


def profiled(maker: str, seconds: float) -> dict[str, Any]:
    """What `penstock profile --json` prints."""
    target = f"slow_games:{maker}"
    with tempfile.TemporaryDirectory() as folder:
        place = f"run.dir={folder}/run"
        arguments = ("--json", "--seconds", seconds, *OPTIONS, place)
        done = run(python("penstock", "profile", target, *arguments), cwd=HERE)
    if done.returncode:
        sys.exit(f"penstock profile {target} failed with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()

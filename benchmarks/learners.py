"""Four learners, every codec: what is learnt, and over slow links how soon and for how many bytes.

Each codec trains with the optimizer that it belongs to, four learners and four actors:

    cartpole   CartPole-v1 to a mean return of 475 over 100 episodes
    catch      examples/catch.py from pixels, the same number of agent steps for every codec; then
               the last weights play, actions drawn as in training, against those of fp32

With --link, each learner is on a host of its own (network namespaces; needs root), and the curve of
return, seconds and bytes is kept. Settings that differ from the presets are below, in TASKS.

    python benchmarks/learners.py [--task cartpole] [--codecs none,int8] [--seeds 3] [--seconds 180]
        [--link 100mbit] [--json] [--save]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import finish, machine, parser, point, saved_tasks
from linked import train_on_hosts
from penstock.bench.whole import train

LEARNERS = 4
EPISODES = 500
ADAM = ("none", "fp16", "bf16", "int8", "powersgd", "onebit_adam", "zeroone_adam")
SGD = ("onebit", "terngrad", "dropping", "dgc")
RUNS = (*(f"{codec}/adam" for codec in ADAM), "none/sgd", *(f"{codec}/sgd" for codec in SGD))
GROUP = (f"learner.count={LEARNERS}", f"actors.count={LEARNERS}", "learner.lr_scaling=sqrt")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class Task(NamedTuple):
    """What is trained, and how."""

    target: str
    common: tuple[str, ...]
    adam: tuple[str, ...]
    sgd: tuple[str, ...]
    codecs: dict[str, tuple[str, ...]]
    goal: float
    """A mean return, which is looked for in the curve."""
    plays: bool
    """Whether runs end after a number of steps, and the last weights are played."""


# Warm-ups are made for long runs: these here take few hundred updates in all.
SHORT = ("learner.reduce.warmup_updates=10",)
CATCH_STEPS = 120_000
TASKS = {
    "cartpole": Task(
        "cartpole",
        (
            *("stop.return=475", "stop.confirm_episodes=0", "stop.env_steps=6000000"),
            "algo.reward_scale=0.1",  # with which the learning rates were chosen
        ),
        (),
        ("learner.lr=0.03",),
        {
            "powersgd": SHORT,
            "onebit": (*SHORT, "learner.reduce.onebit_block=64"),
            "onebit_adam": (
                "learner.reduce.warmup_updates=50",
                "learner.reduce.onebit_block=64",
                "learner.lr=5e-4",
            ),
            "zeroone_adam": ("learner.reduce.onebit_block=64", "learner.lr=5e-4"),
            "dgc": SHORT,
        },
        475.0,
        plays=False,
    ),
    "catch": Task(
        "catch.yaml",
        (
            "stop.return=null",
            f"stop.env_steps={CATCH_STEPS}",
            "learner.lr_end_fraction=0.05",
            f"learner.lr_decay_steps={CATCH_STEPS}",
        ),
        ("learner.lr=1e-4",),
        ("learner.lr=0.02",),
        {
            "powersgd": SHORT,
            "onebit": (*SHORT, "learner.reduce.onebit_block=512"),
            "onebit_adam": ("learner.reduce.onebit_block=512",),
            "zeroone_adam": (
                "learner.reduce.onebit_block=512",
                "learner.reduce.variance_doubling=4",
            ),
            # Late gradients and momentum add up: at 0.02 one of three runs fell back to 0.77.
            "dropping": ("learner.lr=0.01",),
            # What dgc sends loses its momentum, so its steps are shorter than sgd's.
            "dgc": ("learner.reduce.warmup_updates=5", "learner.lr=0.03"),
        },
        0.9,
        plays=True,
    ),
}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--task", choices=[*TASKS, "all"], default="all")
    args.add_argument("--codecs", default="all", help="some of learner.reduce.codec: none,int8")
    args.add_argument("--seeds", type=int, default=3, help="runs of each")
    args.add_argument("--first-seed", type=int, default=0)
    args.add_argument("--seconds", type=float, default=180.0, help="of training, at most")
    args.add_argument("--link", choices=["100mbit", "1gbit", "unlimited"], help="needs root")
    options = args.parse_args()
    tasks = list(TASKS) if options.task == "all" else [options.task]
    wanted = None if options.codecs == "all" else options.codecs.split(",")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    results, rows = saved_tasks("learners"), [HEADING]
    for task in tasks:
        title = f"{task} at {options.link}" if options.link else task
        before = results.get(title, {"runs": {}})["runs"]
        picked = [run for run in RUNS if wanted is None or run.partition("/")[0] in wanted]
        runs = {
            run: [one(task, run, seed, options.seconds, options.link) for seed in seeds]
            for run in picked
        }
        results[title] = {"machine": machine(), "learners": LEARNERS, "runs": before | runs}
        rows += [row(task, title, name, done, before | runs) for name, done in runs.items()]
    finish("learners", {"tasks": results}, rows, options)


HEADING: list[Any] = [
    "task", "codec", "optimizer", "solved", "steps", "updates", "seconds", "MB sent",
    "return", "of fp32's",
]  # fmt: skip


def row(
    task: str, title: str, name: str, done: list[dict[str, Any]], others: dict[str, Any]
) -> list[Any]:
    """Medians over the seeds; where a goal is reached, those up to there."""
    codec, _, optimizer = name.partition("/")
    solved = [run for run in done if run["solved"]]
    middle = {
        key: statistics.median(run[key] for run in solved)
        for key in ("steps", "updates", "seconds", "megabytes")
        if solved and all(run[key] is not None for run in solved)
    }
    mean = statistics.fmean(run["return"] for run in done)
    relative: Any = ""
    if TASKS[task].plays and f"none/{optimizer}" in others:
        relative = mean / statistics.fmean(r["return"] for r in others[f"none/{optimizer}"])
    reached = (middle.get(key, "") for key in ("steps", "updates", "seconds", "megabytes"))
    return [title, codec, optimizer, f"{len(solved)}/{len(done)}", *reached, mean, relative]


def one(task: str, name: str, seed: int, seconds: float, link: str | None) -> dict[str, Any]:
    """One run: where it reached the goal, and what its return was in the end."""
    codec, _, optimizer = name.partition("/")
    plan = TASKS[task]
    overrides = [
        *plan.common, *(plan.sgd if optimizer == "sgd" else plan.adam), *plan.codecs.get(codec, ()),
        f"learner.optimizer={optimizer}", f"learner.reduce.codec={codec}",
        f"run.seed={seed}", f"stop.minutes={seconds / 60}", "run.interval_s=0.5",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        if link is None:
            summary = train(plan.target, *GROUP, *overrides, folder=folder, cwd=EXAMPLES)
            curve = [point(line) for line in summary["intervals"]]
        else:
            folder.mkdir()
            options = [GROUP[-1], *overrides]
            summary = train_on_hosts(plan.target, options, cwd=EXAMPLES, folder=folder, link=link,
                                     learners=LEARNERS, seconds=seconds + 60)  # fmt: skip
            curve = summary["curve"]
        played = play(folder, seed) if plan.plays else summary["episode_return_mean"]
    reached = first_at(curve, plan.goal) if plan.plays else solved_at(summary, curve)
    found = {
        "seed": seed,
        "solved": reached is not None,
        **{key: reached and reached[key] for key in ("steps", "updates", "seconds", "megabytes")},
        "return": played,
        "exit_reason": summary["exit_reason"],
        "command": " ".join(["penstock train", plan.target, *GROUP, *overrides]),
    }
    print(task, name, found, file=sys.stderr, flush=True)
    return found | ({"curve": thin(curve)} if link else {})


def first_at(curve: list[dict[str, Any]], goal: float) -> dict[str, Any] | None:
    """The first point from which a mean return has reached ``goal``."""
    return next((p for p in curve if p["return"] is not None and p["return"] >= goal), None)


def solved_at(summary: dict[str, Any], curve: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The end of a run that stopped at its goal."""
    if summary["solved_at_s"] is None:
        return None
    sent = curve[-1]["megabytes"] if curve else None
    return point(summary | {"time_s": summary["solved_at_s"]}, sent)


def play(folder: Path, seed: int) -> float:
    """Mean return of the last weights, actions drawn as in training."""
    command = [
        sys.executable, "-m", "penstock", "eval", str(folder), "--checkpoint", "last", "--sample",
        "--episodes", str(EPISODES), "--seed", str(1000 + seed), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=EXAMPLES, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["return"]["mean"])


def thin(curve: list[dict[str, Any]], most: int = 40) -> list[dict[str, Any]]:
    """About ``most`` points of a curve, figures to four digits."""
    kept = [*curve[: -1 : max(1, -(-len(curve) // most))], *curve[-1:]]
    return [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in p.items()} for p in kept
    ]


if __name__ == "__main__":
    main()

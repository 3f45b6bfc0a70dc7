"""Return against seconds of each pace: four learners on slow links, one of which stalls.

Each learner is on a host of its own (network namespaces of this machine, so root is needed) with an
actor, and with a shard of the parameter server where the pace has one. The process of the last
learner is stopped for `STALL_S` of every `EVERY_S` seconds. Checkpoints are kept at equal times,
and their greedy policies are evaluated after the run, on the same episodes for all paces.

    cartpole   CartPole-v1, 9,155 parameters
    catch      examples/catch.py from pixels, 205,476 parameters
    minatar    MinAtar Breakout by PPO

    python benchmarks/paces.py [--task cartpole] [--links 1gbit,100mbit] [--paces bsp,ssp]
        [--seeds 1] [--svg OUT.svg] [--json] [--save]
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple

import psutil

from common import finish, machine, parser, saved_tasks
from linked import train_on_hosts
from penstock.envs.make import make
from penstock.evaluation.evaluate import play
from penstock.evaluation.policy_source import find_policy, of_checkpoint
from penstock.learner.checkpoints import checkpoint_format

LEARNERS = 4
EPISODES = 20
STALL_S, EVERY_S = 0.5, 1.0
STALLED = LEARNERS - 1  # not rank 0, which writes the checkpoints
LINKS = ("1gbit", "100mbit")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# One step with all gradients is of four times the batch; other steps are of one learner's.
TOGETHER = ("learner.lr_scaling=sqrt",)
SHARDS = (f"learner.server_shards={LEARNERS}",)
PACES: dict[str, tuple[str, ...]] = {
    "bsp": TOGETHER,
    "local_sgd": (),
    "ssp": SHARDS,
    "asp": SHARDS,
    "tap": SHARDS,
    "backup": TOGETHER,
}


class PacedTask(NamedTuple):
    """What is trained, for how long, and when its return is good."""

    target: str
    options: tuple[str, ...]
    seconds: float
    """Of training."""
    goal: float


TASKS = {
    "cartpole": PacedTask("cartpole", ("algo.reward_scale=0.1",), 15.0, 475.0),
    "catch": PacedTask("catch.yaml", ("learner.lr=1e-4",), 24.0, 0.9),
    "minatar": PacedTask(
        "minatar_breakout",
        # Statistics of observations are shared under bsp alone.
        ("model.normalize_observations=false", "learner.lr=5e-4"),
        25.0,
        5.0,
    ),
}
POINTS = 15  # of a curve
HEADING: list[Any] = [
    "task", "link", "pace", "goal reached, after (s)", "mean return", "least", "greatest",
    "last return", "updates", "steps", "lag mean", "cores",
]  # fmt: skip


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--task", choices=[*TASKS, "all"], default="all")
    args.add_argument("--links", default=",".join(LINKS))
    args.add_argument("--paces", default=",".join(PACES))
    args.add_argument("--seeds", type=int, default=1, help="runs of each")
    args.add_argument("--svg", type=Path, help="at the end, draw the new and the saved curves")
    options = args.parse_args()
    results, paces = saved_tasks("paces"), options.paces.split(",")
    rows = [HEADING]
    for task in TASKS if options.task == "all" else [options.task]:
        for link in options.links.split(","):
            runs: dict[str, list[dict[str, Any]]] = {pace: [] for pace in paces}
            for seed in range(options.seeds):
                for pace in paces:  # in turns, as the machine's speed changes
                    runs[pace].append(one(task, link, pace, seed))
                saved = results.setdefault(f"{task} at {link}", {"runs": {}})
                saved["runs"] |= runs
                saved["machine"] = machine()
                new = [[task, link, pace, *row(runs[pace])] for pace in paces]
                result = SETTINGS | {"tasks": results}
                finish("paces", result, [*rows, *new], options)  # a round takes long
            rows += new
    if options.svg:
        draw(results, options.svg)


SETTINGS = {
    "learners": LEARNERS,
    "stall_s": STALL_S,
    "every_s": EVERY_S,
    "episodes": EPISODES,
    "goals": {name: task.goal for name, task in TASKS.items()},
}


def row(runs: Sequence[dict[str, Any]]) -> list[Any]:
    """Medians over the seeds, None where no run has the figure, and the least and greatest mean
    return; how many runs reached the goal, and after how long, at the median of these."""
    reached = [run["goal_s"] for run in runs if run["goal_s"] is not None]
    goal = f"{len(reached)} of {len(runs)}"
    if reached:
        goal += f", {statistics.median(reached):.1f}"
    means = [run["mean_return"] for run in runs]
    keys = ("last_return", "updates", "steps", "lag_mean", "cores")
    known = [[run[key] for run in runs if run[key] is not None] for key in keys]
    middle = [statistics.median(each) if each else None for each in known]
    return [goal, statistics.median(means), min(means), max(means), *middle]


def overrides(task: str, pace: str, seed: int) -> list[str]:
    """The options of a run, without those of its hosts."""
    plan = TASKS[task]
    return [
        *plan.options,
        *PACES[pace],
        f"learner.pace={pace}",
        f"run.seed={seed}",
        f"stop.minutes={plan.seconds / 60}",
        *("stop.return=null", "stop.env_steps=null", "eval.every_steps=null"),
        f"checkpoint.every_s={plan.seconds / POINTS}",
        "checkpoint.keep=1000",
        "run.interval_s=0.5",
        "transport.insecure=true",  # as gradients between learners, which have no encryption
    ]


def one(task: str, link: str, pace: str, seed: int) -> dict[str, Any]:
    """One run: its curve, and where it reached the goal."""
    plan, options, stalled = TASKS[task], overrides(task, pace, seed), list[int]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        folder.mkdir()
        began_s, spent_s = time.monotonic(), processor_s()
        summary = train_on_hosts(
            plan.target,
            options,
            cwd=EXAMPLES,
            folder=folder,
            link=link,
            learners=LEARNERS,
            seconds=plan.seconds + 60,
            during=partial(stalls, folder, stalled),
        )
        if not summary["trained_steps"]:
            raise SystemExit(f"{task} at {link}, {pace}: the run ended without a trained step")
        cores = (processor_s() - spent_s) / (time.monotonic() - began_s)
        curve = evaluated(folder)
        lags = [m["policy_lag_mean"] for m in metrics(folder) if m["policy_lag_mean"] is not None]
    found = {
        "seed": seed,
        "goal_s": goal_s(curve, plan.goal),
        "mean_return": mean_over_time(curve),
        "last_return": curve[-1]["return"],
        "updates": summary["learner_steps"],
        "steps": summary["trained_steps"],
        "lag_mean": statistics.fmean(lags) if lags else None,
        "cores": cores,
        "stalls": sum(stalled),
        "megabytes": summary["curve"][-1]["megabytes"] if summary["curve"] else None,
        "exit_reason": summary["exit_reason"],
        "options": options,
        "curve": curve,
    }
    shown = {key: value for key, value in found.items() if key not in ("curve", "options")}
    print(task, link, pace, shown, file=sys.stderr, flush=True)
    return found


def processor_s() -> float:
    """Processor time of all processes that this one has started and that have ended: how much of
    the machine a run has had, beside other work on it."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The intervals of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def evaluated(folder: Path) -> list[dict[str, Any]]:
    """The greedy returns of all checkpoints of a run, in order of time."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # of catch
    config = find_policy(folder, "last").config
    most = config.eval.max_episode_steps
    game = make(config.env, EPISODES, 1)
    points: list[dict[str, Any]] = []
    try:
        for checkpoint in [*(folder / "checkpoints").glob("step-*"), folder / "checkpoints/last"]:
            progress = checkpoint_format.read_meta(checkpoint)["progress"]
            policy = of_checkpoint(config, checkpoint).policy(game, 0)
            played = play(game, policy.greedy, EPISODES, 1000, most, policy.reset)
            points.append(
                {
                    "seconds": progress["time_s"],
                    "steps": progress["trained_steps"],
                    "return": statistics.fmean(episode.episode_return for episode in played),
                }
            )
    finally:
        game.close()
    return sorted(points, key=lambda point: float(point["seconds"]))


def goal_s(curve: Sequence[dict[str, Any]], goal: float) -> float | None:
    """Seconds to the first point of the curve that has reached the goal."""
    return next((point["seconds"] for point in curve if point["return"] >= goal), None)


def mean_over_time(curve: Sequence[dict[str, Any]]) -> float:
    """The mean return over the time of training: each point counts for the time since the one
    before."""
    before_s, total = 0.0, 0.0
    for point in curve:
        total += (point["seconds"] - before_s) * point["return"]
        before_s = point["seconds"]
    return total / before_s


@contextmanager
def stalls(folder: Path, counts: list[int], group: Sequence[Popen[bytes]]) -> Iterator[None]:
    """Stop the process of one learner again and again, once the run has metrics. Appends to
    ``counts`` how often, at the end."""
    end = threading.Event()
    stopped = 0

    def run() -> None:
        nonlocal stopped
        while not end.wait(EVERY_S - STALL_S):
            if not (folder / "metrics.jsonl").exists():
                continue
            # Found anew each time: a restarted learner has another pid, and that of an ended one
            # may be another process's.
            with suppress(psutil.Error):
                if (process := learner(group[STALLED].pid)) is not None:
                    process.suspend()
                    stopped += 1
                    end.wait(STALL_S)
                    process.resume()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        counts.append(stopped)


def learner(command: int) -> psutil.Process | None:
    """The process of the stalled learner, below that of its command; None while there is none.
    Raises psutil.Error where the command has ended."""
    for process in psutil.Process(command).children(recursive=True):
        with suppress(psutil.Error):
            words = process.cmdline()
            if "penstock.launch.role" in words and "-c" not in words and NAME in words:
                return process
    return None


NAME = f"learner-{STALLED}"


def draw(results: dict[str, Any], out: Path) -> None:
    """Return against seconds: a row for each task, a column for each link."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same curves give the same file
    tasks = [task for task in TASKS if any(title.startswith(f"{task} at") for title in results)]
    figure = Figure(figsize=(9, 3.2 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), len(LINKS), sharey="row", squeeze=False)
    for task, line in zip(tasks, grid, strict=True):
        for link, axes in zip(LINKS, line, strict=True):
            runs = results.get(f"{task} at {link}", {"runs": {}})["runs"]
            for i, pace in enumerate(PACES):
                for seed, run in enumerate(runs.get(pace, [])):
                    points = run["curve"]
                    x, y = [p["seconds"] for p in points], [p["return"] for p in points]
                    axes.plot(x, y, color=f"C{i}", label=None if seed else pace)
            axes.set(title=f"{task} at {link}", xlabel="seconds")
            axes.grid(alpha=0.3)
        line[0].set(ylabel=f"greedy return, {EPISODES} episodes")
        line[0].legend(fontsize="small")
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


if __name__ == "__main__":
    main()

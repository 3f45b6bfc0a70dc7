"""The learning bars: what each algorithm must reach, on how many agent steps, and how far it is.

`bar_table.BARS` is the table. Each seed of a bar is a run as a user would start it, without
evaluations on the way. Its checkpoints are kept, and those nearest to fixed numbers of agent steps
play episodes of their own afterwards, greedily:

    the return of a seed      the mean over the episodes of its last checkpoint
    its steps to a return     those of the first checkpoint whose mean is that return: found by
                              halves, so that the evaluated checkpoint before it is below. A run
                              with such a goal ends when its return in training has reached it, or
                              goes on until a checkpoint confirms that, one for each stretch.

Everything is kept below `--into`, and a later call continues what was interrupted: runs from their
last checkpoint, and evaluations that are missing. One run trains at a time, at a niceness.

    python benchmarks/bars.py                                    # what is done, and what is missing
    python benchmarks/bars.py --only pendulum_sac --seed 1 --into FOLDER [--save]
    python benchmarks/bars.py --only pong_ppo --minutes 90 --into FOLDER    # then stops

`--save` writes benchmarks/results/bars.json, where the runs of this machine replace their own only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bar_table import BARS, INTO, Claim, LearningBar
from common import finish, parser, print_table, saved_tasks
from learning import has_ended
from penstock.bench.whole import run
from penstock.configs.errors import UserError
from penstock.core.files import write_atomic
from penstock.core.machine import processor
from penstock.core.processes import python
from penstock.envs.make import make
from penstock.evaluation.evaluate import ENVS, play_policy
from penstock.evaluation.policy_source import find_policy, of_checkpoint
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_history import older, remove
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import METRICS, SUMMARY

EVALUATION_SEED = 1000
RESULT = "bars"
# Of the intervals between two points of a curve the means of these are kept, for comparing seeds.
DIAGNOSTICS = (
    "episode_return_mean",
    "entropy",
    "kl",
    "kl_lag",
    "ratio_clipped",
    "explained_variance",
    "policy_lag_mean",
    "steps_per_s",
)


class BarFolder:
    """The run of one seed and its record, below the folder of all bars.

    The record is a file beside the run: how the run was made, on which processors, and what its
    checkpoints scored, by their agent steps.
    """

    def __init__(self, into: Path, name: str, seed: int) -> None:
        self.run = into / name / f"seed-{seed}"
        self._file = self.run.with_suffix(".json")
        self.record: dict[str, Any] = {"processors": [], "evaluations": {}}
        if self._file.is_file():
            self.record = json.loads(self._file.read_text())

    @property
    def is_complete(self) -> bool:
        """Whether the run has ended and its checkpoints are evaluated."""
        return "return" in self.record

    def progress(self) -> dict[str, Any] | None:
        """Returns "trained_steps" and "episode_return_mean" of the run so far; None before it."""
        intervals = lines(self.run / METRICS)
        if not intervals:
            return None
        return {key: intervals[-1].get(key) for key in ("trained_steps", "episode_return_mean")}

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Note the settings and this processor, before the run begins or continues.

        Raises:
            UserError: the run was begun with other settings.
        """
        known = self.record.setdefault("settings", dict(settings))
        if known != settings:
            raise UserError(
                f"{self.run} was begun with {known}, and the table says {dict(settings)} now; "
                "remove that folder and its .json, or give another --into"
            )
        if (model := processor().model) not in self.record["processors"]:
            self.record["processors"].append(model)
        self.write()

    def write(self) -> None:
        """Write the record."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._file, json.dumps(self.record, indent=2) + "\n")

    def checkpoints(self) -> dict[int, Path]:
        """Returns the folders of the run's checkpoints by their trained steps, ascending."""
        last = self.run / "checkpoints" / "last"
        folders = [folder for folder in (last, *older(last)) if checkpoint_format.exists(folder)]
        by_steps = {
            int(checkpoint_format.read_meta(folder)["progress"]["trained_steps"]): folder
            for folder in folders
        }
        return dict(sorted(by_steps.items()))

    def remove_unevaluated(self) -> None:
        """Remove the older checkpoints that were not evaluated: many are of megabytes."""
        steps_of = {path: steps for steps, path in self.checkpoints().items()}
        for path in older(self.run / "checkpoints" / "last"):
            # Of several with as many trained steps, one was evaluated.
            if str(steps_of.get(path)) not in self.record["evaluations"]:
                remove(path)


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--only", nargs="+", metavar="BAR", help=f"of {', '.join(BARS)}")
    args.add_argument("--seed", type=int, nargs="+", help="of the seeds of each bar only these")
    args.add_argument("--into", type=Path, default=Path("runs/bars"), help="folder of all runs")
    args.add_argument("--minutes", type=float, help="begin no run after so long, and stop it then")
    args.add_argument("--nice", type=int, default=10, help="niceness of runs and evaluations")
    options = args.parse_args()
    if unknown := sorted(set(options.only or ()) - set(BARS)):
        args.error(f"{', '.join(unknown)}: the bars are {', '.join(BARS)}")
    options.into = options.into.resolve()
    sys.path.append("")  # environments in the current folder, as in the command
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))

    if not options.only:
        show(options)
        return

    os.nice(options.nice)
    deadline_s = time.monotonic() + 60 * (options.minutes or float("inf"))
    runs = [(name, seed) for name in options.only for seed in chosen_seeds(name, options.seed)]
    with locked(options.into):
        for name, seed in runs:
            if time.monotonic() < deadline_s:
                folder = BarFolder(options.into, name, seed)
                measure_seed(folder, BARS[name], seed, deadline_s)
                show(options)  # after each, as a session may be cut at any moment


def chosen_seeds(name: str, seeds: Sequence[int] | None) -> list[int]:
    """Returns the seeds of a bar, or those of them that ``seeds`` names.

    Raises:
        UserError: it names none of them.
    """
    chosen = [seed for seed in BARS[name].seeds if seeds is None or seed in seeds]
    if not chosen:
        raise UserError(f"{name} has the seeds {list(BARS[name].seeds)}; give --seed one of them")
    return chosen


@contextlib.contextmanager
def locked(into: Path) -> Iterator[None]:
    """Let no other call train below ``into`` during the block."""
    into.mkdir(parents=True, exist_ok=True)
    with (into / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another call trains below {into}, and one run trains at a time; wait for it, or "
                "give another --into"
            ) from None
        yield


def measure_seed(folder: BarFolder, bar: LearningBar, seed: int, deadline_s: float) -> None:
    """Train a seed as far as is missing, evaluate its checkpoints, and complete its record."""
    if folder.is_complete:
        return
    folder.begin({"target": bar.target, "options": list(bar.options), "steps": bar.steps})

    # With a goal the run ends by its return in training. Where its last checkpoint does not confirm
    # that, it goes on, a stretch at a time.
    goal, steps = bar.goal, bar.steps
    while True:
        if not has_ended(folder.run, steps, goal):
            train_on(folder.run, bar, seed, steps, goal, deadline_s)
        if not has_ended(folder.run, steps, goal):
            return
        points = evaluated_points(folder, bar)
        last = points[-1]
        if bar.goal is None or last["return"] >= bar.goal:
            break
        if last["steps"] >= bar.steps:
            # The whole curve shows where the run stood.
            points = evaluated_points(folder, bar, all_of_them=True)
            break
        goal, steps = None, min(last["steps"] + bar.distance, bar.steps)

    summary = json.loads((folder.run / SUMMARY).read_text())
    folder.record |= {
        "trained_steps": summary["trained_steps"],
        "seconds": summary["time_s"],
        "return": points[-1]["return"],
        "steps_to_goal": None if bar.goal is None else steps_to_goal(points, bar.goal),
        "training": training_course(lines(folder.run / METRICS), bar.distance),
    }
    folder.write()
    folder.remove_unevaluated()


def train_on(
    run_dir: Path, bar: LearningBar, seed: int, steps: int, goal: float | None, deadline_s: float
) -> None:
    """Begin or continue a run to its ``steps`` or ``goal``, and wait for its end or ``deadline_s``.

    Raises:
        UserError: the run has failed; it has then printed the reason.
    """
    command = python(
        "penstock",
        "train",
        bar.target,
        *(option.replace(INTO, str(run_dir.parents[1])) for option in bar.options),
        f"run.dir={run_dir}",
        f"run.seed={seed}",
        f"stop.return={'null' if goal is None else goal}",
        f"stop.env_steps={steps}",
        "stop.confirm_episodes=0",
        "eval.every_steps=null",
        # On a busy machine a nice process may not get a core for a minute. Writing the last replay
        # takes long, too.
        "run.grace_s=120",
        "run.start_timeout_s=600",
        "run.hang_timeout_s=600",
        f"checkpoint.every_s={bar.every_s}",
        "checkpoint.keep=100000",
        *("--resume", "auto", "--json"),
    )
    left_s = deadline_s - time.monotonic()
    try:
        process = run(command, timeout_s=None if left_s == float("inf") else left_s)
    except subprocess.TimeoutExpired:
        return
    if process.returncode:
        raise UserError(
            f"`{' '.join(command)}` failed with {process.returncode}; its output above has the "
            "reason"
        )


def evaluated_points(
    folder: BarFolder, bar: LearningBar, *, all_of_them: bool = False
) -> list[dict[str, Any]]:
    """Evaluate the checkpoints of a run that count for its bar, as far as that was not done.

    With a goal those are as few as find its steps, unless ``all_of_them`` are wanted.

    Returns:
        Their "steps", "seconds" of training, mean "return" and its standard error "se", ascending.
    """
    checkpoints = folder.checkpoints()
    chosen = at_multiples(list(checkpoints), bar.distance)
    if bar.goal is None or all_of_them:
        for steps in chosen:
            evaluate_once(folder, checkpoints[steps], steps, bar.episodes)
        return [folder.record["evaluations"][str(steps)] for steps in chosen]

    # The last one first; then halves of those that are between below the goal and at it.
    def reaches(steps: int) -> bool:
        point = evaluate_once(folder, checkpoints[steps], steps, bar.episodes)
        return bool(point["return"] >= bar.goal)

    first_reaching(chosen, reaches)
    known = folder.record["evaluations"]
    return [known[str(steps)] for steps in chosen if str(steps) in known]


def at_multiples(steps: Sequence[int], every: int) -> list[int]:
    """Returns of ascending steps the first at or after each multiple of ``every``, and the last."""
    chosen = []
    reached = 0
    for each in steps:
        if each // every > reached:
            reached = each // every
            chosen.append(each)
    return chosen if chosen[-1:] == list(steps[-1:]) else [*chosen, steps[-1]]


def first_reaching(steps: Sequence[int], reaches: Callable[[int], bool]) -> int | None:
    """Returns the first of ascending steps that reaches the goal; None if the last does not.

    The one before it does not reach the goal. Where the returns fall in between an earlier one may,
    so the result is at most too large.
    """
    if not reaches(steps[-1]):
        return None
    low, high = -1, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if reaches(steps[middle]):
            high = middle
        else:
            low = middle
    return steps[high]


def steps_to_goal(points: Sequence[Mapping[str, Any]], goal: float) -> int | None:
    """Returns the steps of the first evaluated point at the goal; None if there is none."""
    return next((int(point["steps"]) for point in points if point["return"] >= goal), None)


def evaluate_once(folder: BarFolder, checkpoint: Path, steps: int, episodes: int) -> dict[str, Any]:
    """Returns the point of a curve that a checkpoint is; it plays unless it has done so."""
    known: dict[str, dict[str, Any]] = folder.record["evaluations"]
    if str(steps) not in known:
        known[str(steps)] = {"steps": steps, **evaluate(folder.run, checkpoint, episodes)}
        folder.write()
    return known[str(steps)]


def evaluate(run_dir: Path, checkpoint: Path, episodes: int) -> dict[str, Any]:
    """Play ``episodes`` greedily with a checkpoint of a run, as `penstock eval` does."""
    config = find_policy(run_dir, "last").config
    envs = make(config.env, min(episodes, ENVS), config.actors.env_threads, whole_games=True)
    try:
        played = play_policy(
            envs,
            of_checkpoint(config, checkpoint),
            [],
            episodes,
            choose=lambda policy: policy.greedy,
            seed=EVALUATION_SEED,
            max_steps=config.eval.max_episode_steps,
        )
    finally:
        envs.close()

    returns = [episode.episode_return for episode in played]
    return {
        "seconds": checkpoint_format.read_meta(checkpoint)["progress"]["time_s"],
        "return": statistics.fmean(returns),
        "se": statistics.stdev(returns) / len(returns) ** 0.5 if len(returns) > 1 else None,
        "episodes": len(returns),
    }


def training_course(intervals: Sequence[Mapping[str, Any]], every: int) -> list[dict[str, Any]]:
    """Means of `DIAGNOSTICS` over each stretch of ``every`` agent steps of a run, with "steps" and
    "seconds" of training at its end."""
    stretches: dict[int, list[Mapping[str, Any]]] = {}
    for line in intervals:
        stretches.setdefault(int(line["trained_steps"]) // every, []).append(line)
    course = []
    for _, stretch in sorted(stretches.items()):
        last = stretch[-1]
        means: dict[str, Any] = {"steps": int(last["trained_steps"]), "seconds": last["time_s"]}
        for name in DIAGNOSTICS:
            values = [line[name] for line in stretch if line.get(name) is not None]
            if values:
                means[name] = statistics.fmean(values)
        course.append(means)
    return course


def show(options: Any) -> None:
    """Print the table of all bars, with what is known of them here and from earlier results."""
    earlier = saved_tasks(RESULT)
    results = {
        name: result_of(options.into, name, bar, earlier.get(name, {}))
        for name, bar in BARS.items()
    }
    rows: list[list[Any]] = [
        ["bar", "seeds", "steps", "return", "to the goal", "seconds", "must", "aim", "published"]
    ]
    for name, bar in BARS.items():
        rows.append([name, *cells(name, bar, results)])
    finish(RESULT, {"tasks": results}, rows, options)
    for name in options.only or ():
        if results[name]["seeds"]:
            print_seeds(name, results[name])


def print_seeds(name: str, result: Mapping[str, Any]) -> None:
    """Print a row for each seed of a bar: what may tell slow seeds from fast ones.

    The figures are means over the training until the return began to rise (`rise_steps`): a slow
    seed was late to begin, or slow afterwards.
    """
    rows: list[list[Any]] = [[name, "return", "to the goal", "rise", *DIAGNOSTICS[1:], "on"]]
    for seed, record in result["seeds"].items():
        course = record["training"]
        rise = rise_steps(course)
        early = [stretch for stretch in course if rise is None or stretch["steps"] <= rise]
        means = []
        for key in DIAGNOSTICS[1:]:
            values = [stretch[key] for stretch in early if key in stretch]
            means.append(statistics.fmean(values) if values else None)
        processors = ", ".join(record["processors"])
        rows.append([seed, record["return"], record["steps_to_goal"], rise, *means, processors])
    print_table(rows, sys.stderr)


def rise_steps(course: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns the agent steps after which the return in training had gained a twentieth of what it
    gained in the whole run; None for a run that gained nothing."""
    known = [stretch for stretch in course if "episode_return_mean" in stretch]
    returns = [stretch["episode_return_mean"] for stretch in known]
    if not returns or max(returns) <= returns[0]:
        return None
    line = returns[0] + (max(returns) - returns[0]) / 20
    return next(int(each["steps"]) for each in known if each["episode_return_mean"] > line)


def result_of(
    into: Path, name: str, bar: LearningBar, earlier: Mapping[str, Any]
) -> dict[str, Any]:
    """The records of a bar's seeds: those below ``into``, and where it has none those of an
    ``earlier`` result, if that is of the same settings."""
    settings = {"target": bar.target, "options": list(bar.options), "steps": bar.steps}
    is_same = all(earlier.get(key) == value for key, value in settings.items())
    seeds = dict(earlier["seeds"]) if is_same else {}
    unfinished: dict[str, Any] = {}
    for seed in bar.seeds:
        folder = BarFolder(into, name, seed)
        if folder.is_complete:
            seeds[str(seed)] = folder.record
        elif progress := folder.progress():
            unfinished[str(seed)] = progress
    return {
        **settings,
        "goal": bar.goal,
        "must": str(bar.must),
        "aim": str(bar.aim),
        "published": bar.published,
        "seeds": {seed: seeds[seed] for seed in sorted(seeds, key=int)},
        "unfinished": unfinished,
    }


def cells(name: str, bar: LearningBar, results: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The row of a bar without its name."""
    runs = list(results[name]["seeds"].values())
    returns = [run["return"] for run in runs]
    text, to_goal, seconds = "", "", None
    if runs:
        text = f"{statistics.fmean(returns):.4g} ({min(returns):.4g} to {max(returns):.4g})"
        seconds = statistics.median(run["seconds"] for run in runs)
    if runs and bar.goal is not None:
        reached = [run["steps_to_goal"] for run in runs if run["steps_to_goal"] is not None]
        to_goal = f"{len(reached)} of {len(runs)}"
        if reached:
            median, slowest = statistics.median(reached), max(reached)
            to_goal += f": median {median / 1e6:.2f} M, slowest {slowest / 1e6:.2f} M"
    steps = max((run["trained_steps"] for run in runs), default=None)
    claims = [
        f"{claim} {verdict(claim, bar, name, results)}".strip() for claim in (bar.must, bar.aim)
    ]
    done = f"{len(runs)} of {len(bar.seeds)}"
    for seed, progress in results[name]["unfinished"].items():
        done += f", {seed} at {progress['trained_steps'] / 1e6:.2f} M"
    return [done, steps, text, to_goal, seconds, *claims, bar.published]


def verdict(
    claim: Claim, bar: LearningBar, name: str, results: Mapping[str, Mapping[str, Any]]
) -> str:
    """Returns "met" or "not met"; nothing while seeds are missing or nothing is claimed."""
    if not str(claim) or len(results[name]["seeds"]) < len(bar.seeds):
        return ""
    parts = []
    mean = mean_return(results[name])
    if claim.at_least is not None:
        parts.append(mean >= claim.at_least)
    if claim.not_below:
        if not results[claim.not_below]["seeds"]:
            return ""
        parts.append(mean >= claim.share * mean_return(results[claim.not_below]))

    # A seed that did not reach the goal took longer than any number of steps.
    runs = results[name]["seeds"].values()
    steps = [run["steps_to_goal"] or float("inf") for run in runs]
    if claim.median_steps is not None:
        parts.append(statistics.median(steps) <= claim.median_steps)
    if claim.slowest_steps is not None:
        parts.append(max(steps) <= claim.slowest_steps)
    return "(met)" if all(parts) else "(not met)"


def mean_return(result: Mapping[str, Any]) -> float:
    """The mean return of the seeds of a bar."""
    return statistics.fmean(run["return"] for run in result["seeds"].values())


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)

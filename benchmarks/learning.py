"""Learning curves: a target trained for a number of agent steps from several seeds, and evaluated.

Every seed is a run as a user would start it, with the evaluations that a run has by default: their
returns at multiples of agent steps are the curve. When it has ended, its last weights play further
episodes, greedily and with sampled actions, and `return` is the mean of the better way (chosen by
the run's own evaluations). The runs stay in a folder, and a later call continues those that were
interrupted, from their checkpoints.

    python benchmarks/learning.py halfcheetah --steps 1000000 [--seeds 3] [--folder FOLDER] [--save]

With `--versus`, each seed is also trained with further options, in turns, and the difference of
the two means is given with its bootstrap interval, as a share of what the other gains over random
actions. So the cost of asynchrony is measured:

    python benchmarks/learning.py halfcheetah --steps 300000 --seeds 10 \\
        --versus transport.max_policy_lag=0

`--known RESULT.json` reuses the runs of an earlier result with the same settings, and trains only
the seeds that it lacks, also where the folder of its runs is gone.

With `--goal RETURN` a run ends when its closing evaluation confirms that return. The table shows
the steps and seconds after which it had the weights that were confirmed, and the seconds until they
were. With `--peers`, the peers that `make peers` has installed are trained beside it, one after
another. stable-baselines3 trains for as many steps, or `--peer-steps`, with the settings of RL
Baselines3 Zoo. It is evaluated every 100,000 steps by 20 episodes, and the time of evaluations is
not counted. Its goal is reached at the first evaluation with a mean at or above it. For Pong,
Sample Factory trains with its own settings for Atari until its mean training return reaches the
goal, or for three times our time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, MultiDiscrete

import penstock
from common import finish, parser
from penstock.bench.whole import train
from penstock.configs.load import load_run, resolve
from penstock.configs.schema import Config
from penstock.envs.make import make
from penstock.evaluation.evaluate import ENVS, play
from penstock.monitor.intervals import interval, iqm, mean
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import EVALUATIONS, SUMMARY

EPISODES = 100
RESAMPLES = 10_000
DIFFERENCES = {
    "difference_share": "means",
    "difference_share_iqm": "interquartile means",
    "difference_share_course": "means of all evaluations",
    "difference_share_greedy": "means, greedy",
    "difference_share_sampled": "means, sampled",
}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("target", help="as penstock train takes it")
    args.add_argument("--steps", type=int, required=True, help="agent steps of each run")
    args.add_argument("--seeds", type=int, default=3)
    args.add_argument("--first-seed", type=int, default=100)
    args.add_argument("--episodes", type=int, default=EPISODES, help="of the evaluation at the end")
    args.add_argument("--folder", type=Path, default=Path("runs/learning"))
    args.add_argument("--name", help="of the result; default: the target")
    args.add_argument("--versus", nargs="+", default=[], help="options of a second setting")
    args.add_argument("--known", type=Path, help="a result (JSON) with runs to reuse")
    args.add_argument("--goal", type=float, help="a return that ends a run when it is confirmed")
    args.add_argument(
        "--peers",
        type=Path,
        nargs="?",
        const=Path(),
        help="where `make peers` was run; default: here",
    )
    args.add_argument("--peer-seeds", type=int, default=1)
    args.add_argument("--peer-steps", type=int, help="of stable-baselines3; default: --steps")
    args.add_argument("override", nargs="*", help="options of both")
    options = args.parse_intermixed_args()
    sys.path.append("")  # environments in the current folder, as in the command
    settings = {"": options.override}
    if options.versus:
        settings["versus"] = [*options.override, *options.versus]
    measured = {
        "target": options.target,
        "steps": options.steps,
        "settings": {name or "first": value for name, value in settings.items()},
    }
    earlier = known(options.known, measured) if options.known else {}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, overrides in settings.items():  # in turns: the machine's load changes with time
            folder = options.folder / "-".join(filter(None, (options.target, name, str(seed))))
            run = earlier.get((name or "first", seed)) or one(options, folder, seed, overrides)
            runs[name].append(run)
    result: dict[str, Any] = {
        **measured,
        "runs": {name or "first": found for name, found in runs.items()},
    }
    rows: list[list[Any]] = [
        [
            "setting",
            "seed",
            "steps",
            "seconds",
            "greedy",
            "sampled",
            "play",
            "return",
            "lag",
            "goal",
        ]
    ]
    keys = ("seed", "steps", "seconds", "greedy", "sampled", "play", "return", "policy_lag")
    for name, found in runs.items():
        label = " ".join(settings[name][len(options.override) :]) or "first"
        rows += [[label, *(run[key] for key in keys), when(run["reached"])] for run in found]
        middle = interval([run["return"] for run in found])
        half = "" if middle.half is None else f"± {middle.half:.3g}"
        rows.append([label, f"mean {half}", "", "", "", "", "", middle.mean, "", ""])
    if options.versus:
        result |= against(options, runs[""], runs["versus"])
        rows.append(["random actions", "", "", "", "", "", "", result["random"], "", ""])
        for key, what in DIFFERENCES.items():
            low, high = result[key]
            words = f"{low:+.1%} ... {high:+.1%} of the second's gain over random"
            rows.append([f"difference, {what}", "95 %", "", "", "", "", "", words, "", ""])
    if options.peers is not None:
        result["peers"] = beside(options, runs[""])
        for peer in result["peers"]:
            end = peer["curve"][-1]
            returns = [end.get("greedy"), end.get("sampled"), "", end.get("return")]
            cells = [end["steps"], end["seconds"], *returns, "", when(peer["reached"])]
            rows.append([peer["peer"], peer["seed"], *cells])
    finish(options.name or f"learning_{options.target}", result, rows, options)


def known(path: Path, measured: Mapping[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs of an earlier result, by setting and seed. Exits if its settings differ."""
    try:
        earlier = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--known {path}: it must be a file that --save wrote ({error})") from None
    for key, value in measured.items():
        if earlier.get(key) != value:
            raise SystemExit(
                f"--known {path}: its {key} is {earlier.get(key)}, and this is {value}; measure it "
                "with the same, or leave --known out"
            )
    return {(name, run["seed"]): run for name, found in earlier["runs"].items() for run in found}


def one(options: Any, folder: Path, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Train a seed to its number of steps, or continue it, and evaluate it."""
    goal = "null" if options.goal is None else options.goal
    limits = (f"stop.return={goal}", f"stop.env_steps={options.steps}", f"run.seed={seed}")
    if not has_ended(folder, options.steps, options.goal):
        train(options.target, *overrides, *limits, "--resume", "auto", folder=folder)
    summary = json.loads((folder / SUMMARY).read_text())
    points = list(lines(folder / EVALUATIONS))
    confirmed = None
    if summary["exit_reason"] == "return":
        end = points[-1]
        confirmed = {
            "steps": end["trained_steps"],
            "seconds": end["time_s"],
            "confirmed_s": summary["time_s"],
            "estimate": end["closing"]["estimate"],
        }
    found = {
        way: penstock.evaluate(
            folder, options.episodes, checkpoint="last", sample=way == "sampled", seed=10_000
        ).return_mean
        for way in ("greedy", "sampled")
    }
    play = points[-1]["play"] if points else "greedy"
    curve = [
        {
            "steps": point["trained_steps"],
            "seconds": point["time_s"],
            **{way: point[way]["mean"] for way in ("greedy", "sampled")},
        }
        for point in points
    ]
    return {
        "seed": seed,
        "steps": summary["trained_steps"],
        "seconds": summary["time_s"],
        **found,
        "play": play,
        "return": found[play],
        "policy_lag": summary["policy_lag_mean"],
        "curve": curve,
        "reached": confirmed,
    }


def reached(curve: Sequence[Mapping[str, Any]], goal: float | None) -> dict[str, Any] | None:
    """Steps and seconds of the first point with a return of ``goal``, in any way of playing."""
    for point in curve if goal is not None else ():
        if max(point.get(way, -np.inf) for way in ("greedy", "sampled", "return")) >= goal:
            return {key: point[key] for key in ("steps", "seconds")}
    return None


def when(found: Mapping[str, Any] | None) -> str:
    """A cell of the table: when a goal was reached."""
    if not found:
        return ""
    later = f", confirmed at {found['confirmed_s']:.0f} s" if "confirmed_s" in found else ""
    return f"{found['steps']:,} steps, {found['seconds']:.0f} s{later}"


def beside(options: Any, ours: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The runs of the peers, each in a Python environment of its own. Finished ones are kept in
    ``options.folder``; one that fails says why on standard error, and is left out."""
    env = load_run(options.folder / f"{options.target}-{ours[0]['seed']}").env
    programs = Path(__file__).parent / "peers"
    steps = options.peer_steps or options.steps
    runs = []
    for seed in range(options.peer_seeds):
        settings = ["--kwargs", json.dumps(env.kwargs), "--steps", steps, "--seed", seed]
        commands: dict[str, list[Any]] = {
            f"sb3-{steps}": [".venv-peers", programs / "learn_sb3.py", env.id, *settings]
        }
        times = [run["reached"]["seconds"] for run in ours if run["reached"]]
        if env.id == "ALE/Pong-v5" and times:
            limits = ["--goal", options.goal, "--seconds", 3 * statistics.median(times)]
            program = programs / "run_sample_factory.py"
            commands[f"sample_factory-{options.goal:g}"] = [
                ".venv-sf",
                program,
                "pong-own",
                *limits,
            ]
        for name, (venv, *command) in commands.items():
            python = options.peers / venv / "bin/python"
            kept = options.folder / f"{options.target}-{name}-{seed}.json"
            if python.exists() and not kept.exists():
                done = subprocess.run([python, *map(str, command)], stdout=subprocess.PIPE)
                found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
                if not done.returncode and found.get("curve"):
                    kept.write_text(json.dumps(found))
            if kept.exists():
                run = json.loads(kept.read_text())
                known = {"peer": name, "seed": seed, "reached": reached(run["curve"], options.goal)}
                runs.append(known | run)
    return runs


def random_return(config: Config, episodes: int = 50) -> float:
    """Mean raw return of actions that are drawn uniformly."""
    rng = np.random.default_rng(0)
    env = make(config.env, ENVS)
    space = env.info.action_space
    shape = (ENVS, *(space.shape or ()))

    def choose(obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if isinstance(space, Box):  # policies choose from -1 to 1 whatever the bounds are
            return rng.uniform(-1, 1, shape).astype(np.float32)
        return rng.integers(0, space.nvec if isinstance(space, MultiDiscrete) else space.n, shape)

    try:
        played = play(env, choose, episodes, 0, config.eval.max_episode_steps)
    finally:
        env.close()
    return statistics.fmean(episode.episode_return for episode in played)


def has_ended(folder: Path, steps: int, goal: float | None) -> bool:
    """Whether a run has reached its number of agent steps, or this return."""
    if not (folder / SUMMARY).is_file():
        return False
    summary = json.loads((folder / SUMMARY).read_text())
    if summary["exit_reason"] == "return":
        return load_run(folder).stop.return_ == goal
    return bool(summary.get("trained_steps", 0) >= steps)  # absent if it was cut at its start


def against(
    options: Any, first: list[dict[str, Any]], second: list[dict[str, Any]]
) -> dict[str, Any]:
    """How far the first setting is above the second, by a bootstrap over the seeds of each.

    Returns the mean return of random actions, and 95 % intervals of differences as shares of the
    second's gain over random actions: of the means over seeds, of the interquartile means, which a
    few runs that collapsed do not decide, of the means of all of a run's evaluations, and of the
    means of each way of playing.
    """
    by_chance = random_return(resolve(options.target, options.override))
    final, greedy, sampled = (
        [np.array([run[key] for run in runs]) for runs in (first, second)]
        for key in ("return", "greedy", "sampled")
    )
    course = [np.array([course_mean(run) for run in runs]) for runs in (first, second)]
    return {
        "random": by_chance,
        "difference_share": difference_share(final, by_chance, mean),
        "difference_share_iqm": difference_share(final, by_chance, iqm),
        "difference_share_course": difference_share(course, by_chance, mean),
        "difference_share_greedy": difference_share(greedy, by_chance, mean),
        "difference_share_sampled": difference_share(sampled, by_chance, mean),
    }


def course_mean(run: Mapping[str, Any]) -> float:
    """The mean of all evaluations of a run, the one at its end among them."""
    return statistics.fmean([*(point[run["play"]] for point in run["curve"]), run["return"]])


def difference_share(
    values: Sequence[npt.NDArray[np.float64]],
    by_chance: float,
    statistic: Callable[[npt.NDArray[np.float64], int], npt.NDArray[np.float64]],
) -> list[float]:
    """95 % bootstrap interval of the difference between two settings.

    Args:
        values: a value for each seed, of the first setting and of the second.
        by_chance: the value of random actions.
        statistic: over the seeds; its gain in the second setting is the unit of the result.
    """
    rng = np.random.default_rng(0)
    first, second = (statistic(rng.choice(v, (RESAMPLES, len(v))), 1) for v in values)
    gain = float(statistic(values[1], 0)) - by_chance
    return [float(share) for share in np.quantile((first - second) / gain, (0.025, 0.975))]


if __name__ == "__main__":
    main()

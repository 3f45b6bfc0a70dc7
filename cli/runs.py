"""The commands that use runs: eval, record, play, export, plot, runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from penstock.cli.options import (
    LOOK,
    Checkpoint,
    GameSeed,
    Greedy,
    Json,
    MaxSteps,
    Run,
    Sample,
    answer,
    samples,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for name, command in COMMANDS.items():
        app.command(name, rich_help_panel=LOOK)(command)


def evaluate(
    run_dir: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or of `train --seeds`: all of its runs are then evaluated.",
        ),
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 20,
    checkpoint: Checkpoint = "best",
    sample: Sample = False,
    greedy: Greedy = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    as_json: Json = False,
) -> None:
    """Play episodes with the weights of a run and print their returns."""
    from penstock.evaluation import evaluate as evaluation

    how = (episodes, checkpoint, samples(sample, greedy), seed, max_episode_steps)
    if evaluation.seed_runs(run_dir):
        result = evaluation.evaluate_seeds(run_dir, *how)
        answer(evaluation.describe_seeds(result), result, as_json)
        return
    result = evaluation.evaluate(run_dir, *how)
    answer(evaluation.describe(result), result, as_json)


def record(
    run_dir: Run,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 1,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="The mp4 file; by default in the folder videos of the run."
        ),
    ] = None,
    sample: Sample = False,
    greedy: Greedy = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    as_json: Json = False,
) -> None:
    """Record a video of the agent of a run. Needs no display."""
    from penstock.evaluation import video

    way = samples(sample, greedy)
    result = video.record(run_dir, episodes, checkpoint, out, way, seed, max_episode_steps)
    answer(video.describe(result), result, as_json)


def play(
    run_dir: Run,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 5,
    checkpoint: Checkpoint = "best",
    sample: Sample = False,
    greedy: Greedy = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    as_json: Json = False,
) -> None:
    """Show the agent of a run playing, in a window."""
    from penstock.evaluation import video

    way = samples(sample, greedy)
    result = video.play(run_dir, episodes, checkpoint, way, seed, max_episode_steps)
    answer(video.describe(result), result, as_json)


def export(
    run_dir: Run,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to write.")],
    checkpoint: Checkpoint = "best",
    as_json: Json = False,
) -> None:
    """Write the policy of a run to one file, which penstock.load_policy reads."""
    from penstock.evaluation.loaded_policy import load_policy

    policy = load_policy(run_dir, checkpoint)
    nbytes = policy.save(file)
    way = "sampled" if policy.sample else "greedy"
    answer(
        f"{file}: {nbytes:,} bytes, {way} actions",
        {"file": file, "nbytes": nbytes, "sample": policy.sample},
        as_json,
    )


def plot(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs, or of `train --seeds`."),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The PNG file; by default plot.png, in the run's folder if there is only one.",
        ),
    ] = None,
    x: Annotated[
        Literal["steps", "time"] | None,
        typer.Option(help="Horizontal axis: agent steps or time; by default both."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plot return, speed, policy lag and learner wait of finished or live runs."""
    from penstock.monitor.plot import plot

    path = str(plot(runs, out, x))
    answer(path, {"file": path}, as_json)


def runs(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Folder that contains runs.")
    ] = "runs",
    as_json: Json = False,
) -> None:
    """List runs with their environment, algorithm, state, steps and returns."""
    from penstock.monitor import runs

    rows = runs.find(folder)
    if as_json:
        print(json.dumps({"runs": rows}))
    else:
        runs.show(rows)


COMMANDS: dict[str, Callable[..., None]] = {
    "runs": runs,
    "plot": plot,
    "eval": evaluate,
    "record": record,
    "play": play,
    "export": export,
}

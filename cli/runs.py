"""The commands that look at runs: eval, record, play, export, plot, runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from penstock.cli.options import (
    LOOK,
    Checkpoint,
    GameSeed,
    Json,
    MaxSteps,
    Run,
    Sample,
    answer,
)


def register(app: typer.Typer) -> None:
    """Add them to the program."""
    for name, command in COMMANDS.items():
        app.command(name, rich_help_panel=LOOK)(command)


def evaluate(
    run_dir: Run,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 20,
    checkpoint: Checkpoint = "best",
    sample: Sample = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    as_json: Json = False,
) -> None:
    """Play episodes with the weights of a run and print their returns."""
    from penstock.evaluation.evaluate import describe, evaluate

    result = evaluate(run_dir, episodes, checkpoint, sample, seed, max_episode_steps)
    answer(describe(result), result, as_json)


def record(
    run_dir: Run,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 1,
    checkpoint: Checkpoint = "best",
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="The mp4; else it lies in the run's videos.")
    ] = None,
    sample: Sample = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    as_json: Json = False,
) -> None:
    """Make a video of the agent of a run; needs no display."""
    from penstock.evaluation import video

    result = video.record(run_dir, episodes, checkpoint, out, sample, seed, max_episode_steps)
    answer(video.describe(result), result, as_json)


def play(
    run_dir: Run,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 5,
    checkpoint: Checkpoint = "best",
    sample: Sample = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    as_json: Json = False,
) -> None:
    """Watch the agent of a run play, in a window."""
    from penstock.evaluation import video

    result = video.play(run_dir, episodes, checkpoint, sample, seed, max_episode_steps)
    answer(video.describe(result), result, as_json)


def export(
    run_dir: Run,
    file: Annotated[str, typer.Argument(metavar="FILE", help="What to write.")],
    checkpoint: Checkpoint = "best",
    as_json: Json = False,
) -> None:
    """Write the policy of a run to one file, for penstock.load_policy."""
    from penstock.evaluation.loaded_policy import load_policy

    nbytes = load_policy(run_dir, checkpoint).save(file)
    answer(f"{file}: {nbytes:,} bytes", {"file": file, "nbytes": nbytes}, as_json)


def plot(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or of --seeds.")
    ],
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="The PNG; else plot.png, in an only run.")
    ] = None,
    x: Annotated[
        Literal["steps", "time"] | None, typer.Option(help="Only against these; else both.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw return, rate, lag and wait of runs, also of living ones."""
    from penstock.monitor.plot import plot

    path = str(plot(runs, out, x))
    answer(path, {"file": path}, as_json)


def runs(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where to look.")] = "runs",
    as_json: Json = False,
) -> None:
    """List runs: what they are, how they stand, how far they came."""
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

"""The commands that use runs: eval, record, play, export, plot, compare, report, runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.options import (
    Against,
    Agent,
    Allow,
    Checkpoint,
    GameSeed,
    Greedy,
    Json,
    MaxSteps,
    Run,
    Sample,
    answer,
    escaped,
    samples,
)

Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN...",
        help="Folders of runs, of `train --seeds`, or of such folders for several environments. "
        "Runs that differ only in their seed are shown as one.",
    ),
]
Ranges = Annotated[
    list[str] | None,
    typer.Option(
        "--range",
        metavar="ENV=LOW,HIGH",
        help="Returns of an environment that are scaled to 0 and 1 before several environments are "
        "combined; by default the lowest and the highest of these runs. Forms of one environment "
        "are named by their options: 'penstock/MinAtar-v0 game=asterix=0,30'. May be repeated.",
    ),
]


@contextmanager
def playing() -> Iterator[None]:
    """Allow code in the ``with`` block to make environments.

    Notes about them go to standard error. Programs that they start end with the block.
    """
    from penstock.core.notes import notes_to
    from penstock.core.processes import ending_programs

    with ending_programs(), notes_to(lambda text: print(escaped(text), file=sys.stderr)):
        yield


def evaluate(
    run_dir: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or a file that `penstock export` wrote; or the folder of `train "
            "--seeds`: all of its runs are then evaluated.",
        ),
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 20,
    checkpoint: Checkpoint = "best",
    sample: Sample = False,
    greedy: Greedy = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPPONENT",
            help="Opponent in a game of several sides, each side of which is played in turn: "
            "bot:NAME, a scripted player of the environment; initial, the policy before training; "
            "the folder of a run; or an exported file. May be repeated: the episodes are divided "
            "evenly, and rounded up. Against a policy actions are sampled, unless --greedy is "
            "given. By default the agent plays all seats.",
        ),
    ] = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Play episodes with the weights of a run and print their returns."""
    from penstock.evaluation import evaluate as evaluation

    samples_actions = samples(sample, greedy)

    # A folder of `train --seeds`, with a run for each seed.
    if evaluation.seed_runs(run_dir):
        with playing():
            result = evaluation.evaluate_seeds(
                run_dir,
                episodes=episodes,
                which=checkpoint,
                sample=samples_actions,
                seed=seed,
                max_steps=max_episode_steps,
                allow=allow or (),
                against=against or (),
            )
        answer(evaluation.describe_seeds(result), result, as_json)
        return

    # A single run, or an exported file.
    with playing():
        result = evaluation.evaluate(
            run_dir,
            episodes=episodes,
            which=checkpoint,
            sample=samples_actions,
            seed=seed,
            max_steps=max_episode_steps,
            allow=allow or (),
            against=against or (),
        )
    answer(evaluation.describe(result), result, as_json)


def record(
    run_dir: Agent,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 1,
    checkpoint: Checkpoint = "best",
    against: Against = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The mp4 file; by default in the folder videos of the run, or beside the "
            "exported file. The decisions of the policy are written to FILE.json.",
        ),
    ] = None,
    sample: Sample = False,
    greedy: Greedy = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Record a video of the agent of a run. Needs no display."""
    from penstock.evaluation import video

    samples_actions = samples(sample, greedy)
    with playing():
        result = video.record(
            run_dir,
            episodes=episodes,
            which=checkpoint,
            out=out,
            sample=samples_actions,
            seed=seed,
            max_steps=max_episode_steps,
            allow=allow or (),
            against=against,
        )
    answer(video.describe(result), result, as_json)


def play(
    run_dir: Agent,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 5,
    checkpoint: Checkpoint = "best",
    seat: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Play this seat yourself, by keys; the agent plays the others. The title of the "
            "window says the keys.",
        ),
    ] = None,
    against: Against = None,
    sample: Sample = False,
    greedy: Greedy = False,
    seed: GameSeed = 0,
    max_episode_steps: MaxSteps = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Show the agent of a run playing, in a window. With --seat, play against it."""
    from penstock.evaluation import video

    samples_actions = samples(sample, greedy)
    with playing():
        result = video.play(
            run_dir,
            episodes=episodes,
            which=checkpoint,
            sample=samples_actions,
            seed=seed,
            max_steps=max_episode_steps,
            allow=allow or (),
            against=against,
            seat=seat,
        )
    answer(video.describe(result), result, as_json)


def export(
    run_dir: Run,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="File to write; its name ends in .safetensors, for penstock.load_policy, or in "
            ".onnx, for other programs.",
        ),
    ],
    checkpoint: Checkpoint = "best",
    half: Annotated[
        bool,
        typer.Option(
            "--half", help="Store parameters as 16-bit floats: half the size. Only .safetensors."
        ),
    ] = False,
    sampled: Annotated[
        bool,
        typer.Option(
            "--sampled",
            help="Add a sampled action, whose random numbers are the input `noise`. Only .onnx.",
        ),
    ] = False,
    program: Annotated[
        bool,
        typer.Option(
            "--program",
            help="Leave the parameters out: they are the input `weights`, the flat vector that "
            "learners publish. Only .onnx.",
        ),
    ] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Write the policy of a run to one file."""
    from penstock.evaluation import onnx_export
    from penstock.evaluation.estimates import way_of
    from penstock.evaluation.loaded_policy import stored_policy
    from penstock.learner.checkpoints import exported

    path = Path(file)
    is_onnx = path.suffix.lower() == exported.ONNX_SUFFIX
    exported.check_path(path, exported.ONNX_SUFFIX if is_onnx else exported.SUFFIX)
    _check_format_options(path, is_onnx, half=half, sampled=sampled, program=program)
    with playing():
        policy = stored_policy(run_dir, checkpoint, allow or ())

    way = way_of(policy.play)
    result: dict[str, object] = {"file": file, "sample": way == "sampled"}
    if is_onnx:
        written = onnx_export.write(path, policy, sampled=sampled, program=program)
        inputs = ", ".join(map(str, written.inputs))
        outputs = ", ".join(map(str, written.outputs))
        result["nbytes"] = written.nbytes
        result["inputs"] = [onnx_export.described(array) for array in written.inputs]
        result["outputs"] = [onnx_export.described(array) for array in written.outputs]
        arrays = f"\n  {inputs}\n  -> {outputs}"
    else:
        result["nbytes"] = exported.write(
            path,
            policy.config,
            policy.spaces,
            policy.info,
            policy.weights,
            play=policy.play,
            half=half,
        )
        arrays = ""

    play = "by its most probable actions" if way == "greedy" else "by sampled actions"
    if is_onnx and way == "sampled" and not sampled:
        play += ", which --sampled adds"  # a graph has no random numbers of its own
    text = f"{file}: {result['nbytes']:,} bytes; the agent plays best {play}{arrays}"
    answer(text, result, as_json)


def _check_format_options(
    path: Path, is_onnx: bool, *, half: bool, sampled: bool, program: bool
) -> None:
    """Raise UserError for options of `export` that the format of its file does not have."""
    from penstock.configs.errors import UserError

    if is_onnx and half:
        raise UserError(
            f"--half is for .safetensors, and {path.name} holds 32-bit floats, in which every "
            "runtime computes; leave out --half"
        )
    for option, is_set in (("--sampled", sampled), ("--program", program)):
        if is_set and not is_onnx:
            raise UserError(
                f"{option} is for .onnx; name the file {path.with_suffix('.onnx').name}, or leave "
                f"out {option}"
            )


def plot(
    runs: Runs,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Metric to plot: a name in metrics.jsonl, or a path such as ledger/compute. May "
            "be repeated. By default return, rate, policy lag and learner wait.",
        ),
    ] = None,
    by: Annotated[
        Literal["steps", "time"] | None,
        typer.Option(
            help="Horizontal axis: agent steps or time. By default steps, or both if no metric is "
            "named."
        ),
    ] = None,
    x: Annotated[
        Literal["steps", "time"] | None,
        typer.Option(hidden=True, help="The same as --by, which is its name after 0.1.0."),
    ] = None,
    smooth: Annotated[
        int,
        typer.Option(
            min=1, help="Number of measurements of a run over which each point is averaged."
        ),
    ] = 1,
    statistic: Annotated[
        Literal["mean", "iqm"] | None,
        typer.Option(
            help="What the line of several runs shows: their mean or interquartile mean. By "
            "default the mean, or over several environments the interquartile mean."
        ),
    ] = None,
    ranges: Ranges = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The picture, a PNG, SVG, PDF or HTML page by its suffix; by default plot.png, in "
            "the run's folder if there is only one.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plot metrics of finished or live runs; seeds become one line with an interval."""
    from penstock.monitor.plot import plot

    picture = plot(
        runs,
        out=out,
        by=by or x,
        metrics=metric or (),
        smooth=smooth,
        statistic=statistic,
        ranges=ranges or (),
    )
    answer(str(picture), {"file": str(picture)}, as_json)


def compare(
    runs: Runs,
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="Metric to compare: a name in metrics.jsonl.")
    ] = "episode_return_mean",
    at: Annotated[
        float | None,
        typer.Option(
            metavar="STEPS",
            help="Agent steps at which runs are compared; by default those of the shortest run.",
        ),
    ] = None,
    reach: Annotated[
        float | None,
        typer.Option(
            metavar="VALUE",
            help="Value of the metric: steps and time are measured to the first measurement at or "
            "above it, scaled if returns are. By default stop.return, if all runs have the same.",
        ),
    ] = None,
    ranges: Ranges = None,
    as_json: Json = False,
) -> None:
    """Compare runs at equal steps, with intervals, speed and the options that differ."""
    from penstock.monitor import compare as comparison

    result = comparison.compare(runs, metric, at=at, reach=reach, ranges=ranges or ())
    answer(comparison.describe(result), result, as_json)


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Folders of runs, or of several runs such as those of `train --seeds`.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The HTML file; by default report.html, in the folder if only one is named.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page on a run, or on several to compare: that of `penstock watch`, without a
    server."""
    from penstock.watch.freeze import write_report

    page = write_report(*runs, out=out)
    answer(str(page), {"file": str(page)}, as_json)


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
    "compare": compare,
    "report": report,
    "eval": evaluate,
    "record": record,
    "play": play,
    "export": export,
}

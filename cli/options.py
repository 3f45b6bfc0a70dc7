"""What the commands of `penstock` have in common: their options, their answers, their help."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

TRAIN = "Train"
LOOK = "Look at runs"
WATCH = "Watch a run that goes on"
MEASURE = "Check and measure"
PREPARE = "Prepare"
PANELS = (TRAIN, LOOK, WATCH, MEASURE, PREPARE)

Resume = Literal["no", "auto", "must"]

Target = Annotated[
    str,
    typer.Argument(
        help="A preset, a YAML file, a gymnasium id, module:EnvId-v0 or module:function."
    ),
]
TargetOrRun = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A preset, a YAML file, a gymnasium id, module:EnvId-v0 or module:function; or, to "
        "resume it, the folder of a run.",
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the config.")
]
ResumeOption = Annotated[
    Resume,
    typer.Option(
        help="Whether to resume from the run's newest checkpoint that is whole: no starts fresh, "
        "auto resumes if there is one, must fails if there is none."
    ),
]
ResumeFrom = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Begin from this checkpoint, a folder or file, or from the newest of this run; with "
        "--resume auto only if the run has none of its own.",
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.")]
LivingRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run that has not ended.")
]
Checkpoint = Annotated[Literal["best", "last"], typer.Option(help="Which weights.")]
Sample = Annotated[
    bool, typer.Option("--sample", help="Draw actions as in training, not the likeliest.")
]
GameSeed = Annotated[int, typer.Option(min=0, help="Seed of the games.")]
MaxSteps = Annotated[
    int | None,
    typer.Option(min=1, help="Cut longer episodes; else at the run's eval.max_episode_steps."),
]
Json = Annotated[bool, typer.Option("--json", help="End standard output with one JSON object.")]


class Grouped(TyperGroup):
    """Lists the commands by what they are for, without rich, which takes long to load."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":  # typer's own, or click's: as installed
                _explain(error)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            panels[panel if panel in panels else PREPARE].append(
                (name, command.get_short_help_str(limit=90))
            )
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def _explain(error: Any) -> None:
    """Say how an option of the config is written that was given as one of a command."""
    from penstock.configs.algorithms import DEFAULT
    from penstock.configs.keys import algorithms, options
    from penstock.configs.option_aliases import meant

    parameters = error.ctx.command.params if error.ctx is not None else []
    if all(parameter.name != "overrides" for parameter in parameters):
        return
    key = error.option_name.lstrip("-").replace("-", "_")
    here = meant(key, DEFAULT)
    known = dict.fromkeys(option for algo in algorithms() for option in options(algo))
    own = [option for option in known if option in (key, here) or option.partition(".")[2] == key]
    if own or not error.possibilities:
        error.possibilities = None
        example = f"{own[0]}=VALUE" if own else "learner.lr=1e-3"
        error.message += f"; options of the config are written key=value: {example}"


def answer(text: str, data: Any, as_json: bool) -> None:
    """Print a command's answer for a person, or as JSON."""
    print(json.dumps(data) if as_json else text)

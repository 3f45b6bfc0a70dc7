"""Options, help and output that the commands of `penstock` share."""

from __future__ import annotations

import json
import os
import re
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from penstock.cli import completion
from penstock.configs import samplers
from penstock.configs.errors import UserError

TRAIN = "Train"
LOOK = "Evaluate and inspect runs"
WATCH = "Monitor a live run"
MEASURE = "Check and measure"
PREPARE = "Prepare"
PANELS = (TRAIN, LOOK, WATCH, MEASURE, PREPARE)
# Control characters, all but tab and newline, and surrogates.
CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

Resume = Literal["no", "auto", "must"]

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A preset, a YAML file, a gymnasium id, module:EnvId-v0 or module:function.",
        autocompletion=completion.targets,
    ),
]
TargetOrRun = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A preset, a YAML file, a gymnasium id, module:EnvId-v0 or module:function; or the "
        "folder of a run, to resume it.",
        autocompletion=completion.targets,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Options of the config, such as learner.lr=3e-4.",
        autocompletion=completion.overrides,
    ),
]
ResumeOption = Annotated[
    Resume,
    typer.Option(
        help="Whether to resume from the run's last complete checkpoint: `no` starts fresh, `auto` "
        "resumes if one exists, `must` fails if none exists."
    ),
]
ResumeFrom = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Start from this checkpoint (a folder or file), or from the last complete checkpoint "
        "of this run. With --resume auto it is used only if the new run has no checkpoint.",
    ),
]
EngineName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What places the processes: `local` (this host) or `ray` (the hosts of a Ray cluster; "
        "pip install 'penstock[ray]').",
    ),
]
ClusterAddress = Annotated[
    str | None,
    typer.Option(
        help="Ray cluster to join with --engine ray: `auto` for the one that this host is a node "
        "of. By default a cluster of this host alone is started, and ended with the run."
    ),
]
WorkingDir = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder that Ray copies to the other hosts, where it is the current folder: for "
        "environments and networks of your own, such as my_game:make_env.",
    ),
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.")]
Agent = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Folder of a run, or a file that `penstock export` wrote."),
]
LivingRun = Annotated[
    str, typer.Argument(metavar="RUN", help="Folder of a run that has not ended.")
]
Checkpoint = Annotated[
    Literal["best", "last"],
    typer.Option(
        help="Checkpoint to use: `best` by evaluation, or by training return if none was "
        "evaluated; or `last`. Without a best one, `last` is used."
    ),
]
Sample = Annotated[
    bool,
    typer.Option(
        "--sample",
        help="Sample actions from the policy, as in training. By default the run's evaluation "
        "decides between this and --greedy; without an evaluation it is --greedy.",
    ),
]
Greedy = Annotated[bool, typer.Option("--greedy", help="Take the most probable actions.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Environment, wrapper, network, algorithm or file that an exported file, or a run "
        "that was not trained on this host, may name, such as my_game:Net or 'my_game:*'; others "
        "are refused. May be repeated.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        metavar="OPPONENT",
        help="Opponent in a game of several sides: bot:NAME, a scripted player of the environment; "
        "initial, the policy before training; the folder of a run; or an exported file. By default "
        "the agent plays all seats.",
    ),
]
GameSeed = Annotated[
    int,
    typer.Option(min=0, help="Seed of the environments. The same seed gives the same episodes."),
]
MaxSteps = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cut episodes after so many agent steps; by default the run's eval.max_episode_steps.",
    ),
]
ServedHost = Annotated[
    str,
    typer.Option(
        "--host",
        help="Address to serve at. Any but 127.0.0.1, localhost and ::1 is reachable from "
        "other hosts, and needs --token, and TLS files or --insecure.",
    ),
]
ServedToken = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Secret of at least 16 characters that whoever connects must have; env:NAME reads it "
        "from the environment variable NAME. By default, on loopback, only processes of this user "
        "are served.",
    ),
]
TlsCert = Annotated[
    str | None,
    typer.Option("--tls-cert", metavar="FILE", help="Certificate, as PEM: serve by HTTPS."),
]
TlsKey = Annotated[
    str | None, typer.Option("--tls-key", metavar="FILE", help="Key of the certificate, as PEM.")
]
ServedInsecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Serve other hosts without TLS: the network reads the token and all that is served.",
    ),
]
Origins = Annotated[
    list[str] | None,
    typer.Option(
        "--origin",
        metavar="URL",
        help="Origin of a page that may connect, such as http://localhost:8000, the web server "
        "of a game. May be repeated. By default only pages of this server may.",
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print the result as one JSON object, the last line of stdout."),
]


class Grouped(TyperGroup):
    """Lists the commands in groups, without rich, which takes long to import."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            # Compared by name, as the class is that of typer or of click, by typer's version.
            if type(error).__name__ == "NoSuchOption":
                _explain(error)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section for each panel, with the name and the help of its commands."""
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", PREPARE)
            if panel not in panels:
                panel = PREPARE
            panels[panel].append((name, command.get_short_help_str(limit=90)))

        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


class ListsTransports(TyperCommand):
    """A command whose option --transport lists the registered transports.

    The list is completed when the command runs or shows its help. So no other command has to import
    the configs.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Complete --transport, and return the parameters of the command."""
        from penstock.configs.transports import TRANSPORTS

        # The names include "auto", which is no transport and has no spec.
        names = TRANSPORTS.joined_by_hand
        specs = TRANSPORTS.specs
        listed = ", ".join(f"{name} ({specs[name].means})" for name in names if name in specs)

        parameters: list[Any] = [*self.params]
        for parameter in parameters:
            if parameter.name == "transport":
                parameter.metavar = "|".join(names)
                parameter.help = (
                    f"Transport of samples and weights: {listed}; auto chooses by whether the "
                    "learner is on this host."
                )
        return super().get_params(ctx)


def _explain(error: Any) -> None:
    """Extend a `NoSuchOption` error: options of the config are written key=value, not --key.

    Nothing is added for a command without options of the config. The suggestions of typer, which
    are options with dashes, stay only if no option of the config has that name.
    """
    from penstock.configs.algorithms import DEFAULT
    from penstock.configs.keys import algorithms, options
    from penstock.configs.option_aliases import meant

    parameters = error.ctx.command.params if error.ctx is not None else []
    if all(parameter.name != "overrides" for parameter in parameters):
        return

    # Options of the config with this name: in full (`learner.lr`), by an alias, or without the
    # section (`lr`). The dictionary drops repetitions and keeps the order.
    key = error.option_name.lstrip("-").replace("-", "_")
    full_names = (key, meant(key, DEFAULT))
    all_options = dict.fromkeys(option for algo in algorithms() for option in options(algo))
    matches = [
        option for option in all_options if option in full_names or option.partition(".")[2] == key
    ]

    if matches or not error.possibilities:
        error.possibilities = None
        example = f"{matches[0]}=VALUE" if matches else "learner.lr=1e-3"
        error.message += f"; options of the config are written key=value: {example}"


def samples(sample: bool, greedy: bool) -> bool | None:
    """Returns True for --sample, False for --greedy and None without either.

    Raises:
        UserError: both are given.
    """
    if sample and greedy:
        raise UserError("--sample and --greedy are two ways to play; give one of them")
    if sample:
        return True
    if greedy:
        return False
    return None


def read_token(token: str | None) -> str | None:
    """Returns the value of --token, or of the environment variable that `env:NAME` names.

    Other users of the host can read the arguments of a command, but not its environment.

    Raises:
        UserError: the variable is not set.
    """
    if token is None or not token.startswith("env:"):
        return token
    secret = os.environ.get(token.removeprefix("env:"))
    if secret is None:
        raise UserError(f"--token {token}: that environment variable is not set; export it first")
    return secret


def sampler_name(name: str) -> str:
    """Returns the value of --sampler. Raises UserError if no sampler has this name."""
    try:
        return samplers.validated_sampler(name)
    except ValueError as error:
        raise UserError(f"--sampler {name}: {error}") from error


def escaped(text: str) -> str:
    """Returns ``text`` with escapes, such as ``\\x1b``, for characters that harm a terminal.

    These are control characters, by which a text from a file could change the terminal, and
    surrogates, which cannot be encoded.
    """
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def answer(text: str, data: Any, as_json: bool) -> None:
    """Print the result of a command: ``text``, or ``data`` as one line of JSON."""
    print(json.dumps(data) if as_json else escaped(text))

"""`penstock serve-env`: games that drive their own loop play, and a learner trains on that."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from penstock.cli import completion
from penstock.cli.options import (
    ClusterAddress,
    EngineName,
    Json,
    Origins,
    ResumeFrom,
    ResumeOption,
    ServedInsecure,
    ServedToken,
    TlsCert,
    TlsKey,
    WorkingDir,
    read_token,
)
from penstock.configs.errors import UserError

PORT = 8900
BIND = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s/:\[\]]+):(\d{1,5}|\*)")


def serve_env(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="What the games are: a preset, a YAML file, a gymnasium id, module:EnvId-v0 or "
            "module:function, which gives their spaces and the options; or the folder of a run, "
            "to resume it. By default the first game that connects says its spaces.",
            autocompletion=completion.targets,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Options of the config, such as learner.lr=3e-4.",
            autocompletion=completion.overrides,
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option(
            help="Address at which games connect. Any but a loopback one is reachable from other "
            "hosts, and needs --token, and TLS files or --insecure. Several learners listen at "
            "successive ports.",
        ),
    ] = f"tcp://127.0.0.1:{PORT}",
    token: ServedToken = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: ServedInsecure = False,
    origin: Origins = None,
    resume: ResumeOption = "no",
    resume_from: ResumeFrom = None,
    engine: EngineName = "local",
    address: ClusterAddress = None,
    working_dir: WorkingDir = None,
    as_json: Json = False,
) -> None:
    """Train on what games play that drive their own loop, over TCP and WebSocket."""
    options = list(overrides or [])
    if target is not None and re.match(r"[\w.]+=", target):
        options.insert(0, target)
        target = None
    match = BIND.fullmatch(bind)
    if match is None or (match[2] != "*" and int(match[2]) > 65535):
        raise UserError(
            f"--bind {bind} is no address of a port; give one such as tcp://127.0.0.1:{PORT}"
        )

    from penstock.launch import run
    from penstock.launch.serve_env import serve_env

    conditions = {
        "token": read_token(token),
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "insecure": insecure,
        "origins": origin or [],
    }
    stream = sys.stderr if as_json else sys.stdout
    exit_code = serve_env(
        target,
        options,
        bind,
        conditions,
        resume,
        as_json,
        source=resume_from,
        place=run.choose_engine(engine, address, working_dir),
        show=lambda text: print(text, file=stream, flush=True),
    )
    sys.exit(exit_code)

"""`penstock serve`: a trained policy decides for games."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.options import (
    Agent,
    Allow,
    Checkpoint,
    Greedy,
    Json,
    Origins,
    Sample,
    ServedHost,
    ServedInsecure,
    ServedToken,
    TlsCert,
    TlsKey,
    answer,
    read_token,
    samples,
)
from penstock.core.processes import THREAD_VARIABLES


def serve(
    source: Agent,
    host: ServedHost = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port; 0 for any free one. By default the first free one from 8800 on.",
        ),
    ] = None,
    token: ServedToken = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: ServedInsecure = False,
    origin: Origins = None,
    checkpoint: Checkpoint = "best",
    sample: Sample = False,
    greedy: Greedy = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Serve the policy of a run or a file to games, over TCP, WebSocket and HTTP, until Ctrl-C."""
    # Several threads of numpy's BLAS, which is imported below, only wait for each other: CartPole's
    # MLP is then served at a fifth of the rate. torch has the threads of `actors.threads`.
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, "1")

    from penstock.core.web.listen import Listen
    from penstock.evaluation.loaded_policy import load_policy
    from penstock.serving.server import FIRST_PORT
    from penstock.serving.server import serve as serve_policy

    listen = Listen(
        host=host,
        port=port,
        first_port=FIRST_PORT,
        token=read_token(token),
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
        origins=tuple(origin or ()),
    )
    listen.check()
    policy = load_policy(
        source, checkpoint, sample=samples(sample, greedy), allow=tuple(allow or ())
    )
    play = "sampled" if policy.sample else "greedy"

    def print_address(address: str) -> None:
        if as_json:
            print(json.dumps({"address": address}), flush=True)
            return
        query = "?token=TOKEN" if token else ""
        print(f"{source} plays, {play}, at {address}{query}; Ctrl-C ends this", flush=True)

    def print_figures(figures: dict[str, Any]) -> None:
        text = f"served {figures['decisions']:,} decisions"
        if figures["decisions"]:
            p50_ms = 1e3 * figures["latency_p50_s"]
            p99_ms = 1e3 * figures["latency_p99_s"]
            text += f", p50 {p50_ms:.2f} ms, p99 {p99_ms:.2f} ms"
        answer(text, figures, as_json)

    serve_policy(policy, Path(source).name, listen, print_address, print_figures)
    sys.exit(0)

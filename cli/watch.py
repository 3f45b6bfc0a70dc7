"""`penstock watch`: serve the page that shows runs."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from penstock.cli.options import (
    Json,
    ServedHost,
    ServedInsecure,
    ServedToken,
    TlsCert,
    TlsKey,
    read_token,
)


def watch(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or a folder that contains runs, living or ended.",
        ),
    ] = "runs",
    host: ServedHost = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port; 0 for any free one. By default the first free one from 8700 on.",
        ),
    ] = None,
    token: ServedToken = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    insecure: ServedInsecure = False,
    as_json: Json = False,
) -> None:
    """Serve a web page that shows runs, living and ended, until Ctrl-C."""
    from penstock.core.web.listen import Listen
    from penstock.watch.server import serve

    def print_address(address: str) -> None:
        if as_json:
            print(json.dumps({"address": address}), flush=True)
            return
        query = "?token=TOKEN" if token else ""
        print(f"{target} is shown at {address}{query}; Ctrl-C ends this", flush=True)

    listen = Listen(
        host=host,
        port=port,
        token=read_token(token),
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
    )
    serve(target, listen, print_address)
    sys.exit(0)


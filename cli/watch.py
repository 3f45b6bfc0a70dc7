"""`penstock watch`: serve the page that shows runs."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from penstock.cli.options import Json
from penstock.configs.errors import UserError


def watch(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or a folder that contains runs, living or ended.",
        ),
    ] = "runs",
    host: Annotated[
        str,
        typer.Option(
            help="Address to serve at. Any but 127.0.0.1, localhost and ::1 is reachable from "
            "other hosts, and needs --token, and TLS files or --insecure."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port; 0 for any free one. By default the first free one from 8700 on.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="Secret of at least 16 characters that viewers must have; env:NAME reads it from "
            "the environment variable NAME. By default, on loopback, only processes of this user "
            "are served.",
        ),
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate, as PEM: serve by HTTPS.")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(metavar="FILE", help="Key of the certificate, as PEM.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Serve other hosts without TLS: the network reads the token and the runs.",
        ),
    ] = False,
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
        token=_read_token(token),
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
    )
    serve(target, listen, print_address)
    sys.exit(0)


def _read_token(token: str | None) -> str | None:
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

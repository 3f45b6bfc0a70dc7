"""Serves the page until Ctrl-C."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.watch.catalog import RunCatalog
from penstock.watch.guard import LOOPBACK_NAMES, TOKEN_LENGTH, Guard
from penstock.watch.views import Views

# If no port is given, the first free one of so many from `PORT` on is taken.
PORT = 8700
PORTS = 20
NICE = 10  # a run beside the page has priority
CONNECTIONS = 64  # open at the same time
END_S = 2  # seconds that requests in progress get when the server ends
REQUEST_NBYTES = 1 << 14  # line and headers
TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{TOKEN_LENGTH},}}")
# The packages of the extra that serves the page.
PACKAGES = ("starlette", "uvicorn", "plotly")


@dataclass(frozen=True)
class Listen:
    """The address of the page, and the conditions for viewers."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None for the first free one from `PORT` on, 0 for any."""
    token: str | None = None
    """What viewers must show."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """PEM files of the certificate and its key; None for a page without TLS."""
    insecure: bool = False
    """Whether a token may be sent in plain text."""

    def check(self) -> None:
        """Raise UserError for options that do not go together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("--tls-cert and --tls-key belong together; give both, or neither")
        if self.token is not None and not TOKEN.fullmatch(self.token):
            raise UserError(
                f"--token has {len(self.token)} characters; it must have {TOKEN_LENGTH} or more "
                "letters, digits, - and _, such as the output of: openssl rand -hex 16"
            )

        # An address that other hosts can reach needs a token, which must not be sent in plain text.
        if self.is_loopback:
            return
        if self.token is None:
            raise UserError(
                f"--host {self.host} is reachable from other hosts; add --token, or serve on "
                "127.0.0.1 and forward the port: ssh -L 8700:127.0.0.1:8700 HOST"
            )
        if self.tls_cert is None and not self.insecure:
            raise UserError(
                f"--host {self.host} is reachable from other hosts, and the token would be sent in "
                "plain text; add --tls-cert and --tls-key, or --insecure"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the address."""
        return self.host in LOOPBACK_NAMES

    def guard(self) -> Guard:
        """Returns the rules for requests."""
        names: tuple[str, ...] = LOOPBACK_NAMES
        if not self.is_loopback:
            host_names = {self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
            names = (*names, *sorted(host_names))
        return Guard(
            hosts=names,
            literal_hosts=not self.is_loopback,
            token=self.token,
            secure=self.tls_cert is not None,
        )


def serve(target: str, listen: Listen, ready: Callable[[str], None]) -> None:
    """Serve the run or the runs in a folder, until Ctrl-C or SIGTERM.

    Args:
        target: the folder.
        listen: where the page is served, and to whom.
        ready: gets the address of the page before the first request is answered.

    Raises UserError, also if an extra package or a free port is missing.
    """
    listen.check()
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"penstock watch needs {', '.join(missing)}, not installed here: "
            "pip install 'penstock[watch]'"
        )
    import uvicorn

    from penstock.watch.app import make_app
    from penstock.watch.connections import IDLE_S, limited
    from penstock.watch.orders import Orders

    # A recording that is in progress would delay the end by its length.
    orders = Orders(cancels=lambda: server.should_exit)
    guard = listen.guard()
    app = make_app(Views(RunCatalog(Path(target))), guard, orders)
    _check_tls(listen)
    with suppress(OSError):
        os.nice(NICE)

    with closing(_bound_socket(listen)) as listener:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            limit_concurrency=CONNECTIONS,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=END_S,
            h11_max_incomplete_event_size=REQUEST_NBYTES,
            http=limited(guard.admits),  # type: ignore[arg-type, unused-ignore]
            ws="none",
            loop="asyncio",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            ssl_certfile=listen.tls_cert,
            ssl_keyfile=listen.tls_key,
        )
        server = uvicorn.Server(config)
        ready(_address(listen, listener.getsockname()[1]))
        with suppress(KeyboardInterrupt):
            server.run([listener])


def _address(listen: Listen, port: int) -> str:
    """Returns the address of the page as a URL."""
    scheme = "http" if listen.tls_cert is None else "https"
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{scheme}://{host}:{port}/"


def _bound_socket(listen: Listen) -> socket.socket:
    """Returns a listening socket. Raises UserError if no port is free."""
    ports = range(PORT, PORT + PORTS) if listen.port is None else [listen.port]
    reason = ""
    for port in ports:
        try:
            return _listening_socket(listen.host, port)
        except OSError as error:
            reason = error.strerror or str(error)

    tried = f"{listen.host}:{ports[0]}"
    if len(ports) > 1:
        tried += f" to {ports[-1]}"
    raise UserError(
        f"the page cannot be served at {tried} ({reason}); give another --port or --host"
    )


def _listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address. Raises OSError if that is not possible."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def _check_tls(listen: Listen) -> None:
    """Raise UserError if the certificate and the key cannot be used."""
    if listen.tls_cert is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(listen.tls_cert, listen.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"--tls-cert {listen.tls_cert} and --tls-key {listen.tls_key} cannot be used "
            f"({error}); give a certificate and its key as PEM files"
        ) from error

"""Serves a policy until Ctrl-C: one port for games over TCP and WebSocket, and for HTTP."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.configs.errors import UserError
from penstock.core.descriptors import raise_limit
from penstock.core.web.listen import BACKLOG, Listen
from penstock.transport.addresses import own_host

if TYPE_CHECKING:
    # The command imports this file also where the extra that serves is not installed.
    import uvicorn

    from penstock.core.web.guard import Guard
    from penstock.evaluation.loaded_policy import LoadedPolicy
    from penstock.serving.port import Games, Port

FIRST_PORT = 8800
END_S = 2  # seconds that requests in progress get when the server ends
REQUEST_NBYTES = 1 << 14  # line and headers
# Connections that are not games: of a browser, or not yet known; and those of them that may have
# no request in progress, since many games connect at the same time.
HTTP_CONNECTIONS = 2048
MOST_SILENT = 1024
WILDCARDS = ("0.0.0.0", "::")
# The packages of the extra that serves.
PACKAGES = ("starlette", "uvicorn", "websockets")


class ConnectionLimits(NamedTuple):
    """The most connections at a time."""

    games: int
    silent: int
    """Those that are no games, and may have no request in progress."""


def serve(
    policy: LoadedPolicy,
    name: str,
    listen: Listen,
    ready: Callable[[str], None],
    ended: Callable[[dict[str, Any]], None],
) -> None:
    """Serve a policy, until Ctrl-C or SIGTERM.

    Args:
        policy: decides.
        name: of the run or the file that it comes from.
        listen: where it is served, and to whom.
        ready: gets the address of the page as soon as it is served.
        ended: gets the figures when no further request is answered.

    Raises UserError, also if an extra package or a free port is missing.
    """
    listen.check()
    check_packages("penstock serve")
    listen.check_tls()
    from penstock.serving.port import Port
    from penstock.serving.service import Service

    limits = connection_limits()
    port = Port(Service(policy, name), listen.token, limits.games)
    with closing(open_listener(listen)) as listener:
        # A collection that leaves out what is loaded by now delays no answer by milliseconds.
        gc.freeze()
        address = listen.url(listener.getsockname()[1])
        server = make_server(
            port,
            listen,
            most_silent=limits.silent,
            started=partial(ready, address),
            ended=ended,
        )
        with suppress(KeyboardInterrupt):
            server.run([listener])


def check_packages(command: str) -> None:
    """Raise UserError if a package that ``command`` serves by is not installed."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise UserError(
            f"{command} needs {', '.join(missing)}, not installed here: "
            "pip install 'penstock[serve]'"
        )


def connection_limits() -> ConnectionLimits:
    """Raise the limit of open files, and returns how many connections it allows."""
    from penstock.serving.port import MOST_GAMES

    descriptors = raise_limit()
    return ConnectionLimits(
        games=min(MOST_GAMES, max(descriptors - 2 * HTTP_CONNECTIONS, descriptors // 2)),
        silent=min(MOST_SILENT, descriptors // 4),
    )


def open_listener(listen: Listen) -> socket.socket:
    """Returns the listening socket of a server. Raises UserError if no port is free."""
    listener = listen.bind()
    # Connections inherit it: a host that has vanished gives up its seats within two minutes.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return listener


def connection_note(listen: Listen, port: int) -> str:
    """Returns how games connect, in a sentence."""
    # The address of every interface is none that others connect to.
    if listen.host in WILDCARDS:
        listen = replace(listen, host=own_host())
    page = listen.url(port)
    scheme = "wss" if page.startswith("https") else "ws"
    address = page.partition("//")[2].rstrip("/")
    needs = " with the token" if listen.token else ""
    tls = " inside TLS" if scheme == "wss" else ""
    return f"games connect{needs} to {address}{tls}, or {scheme}://{address}/play; figures: {page}"


def make_server(
    port: Port,
    listen: Listen,
    *,
    most_silent: int = MOST_SILENT,
    handles_signals: bool = True,
    started: Callable[[], object],
    ended: Callable[[dict[str, Any]], object],
) -> uvicorn.Server:
    """Returns the server of games and of HTTP.

    Args:
        port: the games.
        listen: to whom they are served.
        most_silent: connections that may have no request in progress.
        handles_signals: whether Ctrl-C and SIGTERM end the server; else only its `should_exit`.
        started: called as soon as requests are answered, and signals end the server.
        ended: gets the figures when no further request is answered.
    """
    import uvicorn

    from penstock.serving.app import make_app, most_act_nbytes

    class ServerOfGames(uvicorn.Server):
        """uvicorn, which does not know the games."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Handle the signals that end the server while the context is open."""
            with super().capture_signals() if handles_signals else nullcontext():
                yield

        async def startup(self, sockets: Any = None) -> None:
            """Start, and tell it."""
            await super().startup(sockets)
            started()

        async def shutdown(self, sockets: Any = None) -> None:
            """End the games, then all else."""
            port.end("the service ends")
            await super().shutdown(sockets)
            ended(port.service.figures.to_json(perf_counter()))

    guard = replace(
        listen.guard(),
        open_posts={"/act": most_act_nbytes(port.service)},
        cookie_name="penstock_serve",
    )
    app = make_app(port, guard)
    return ServerOfGames(server_config(port, app, guard, listen, most_silent=most_silent))


def server_config(
    games: Games,
    app: Callable[..., Any],
    guard: Guard,
    listen: Listen,
    *,
    most_silent: int = MOST_SILENT,
) -> uvicorn.Config:
    """Returns the config of a server whose port is that of games and of HTTP.

    Args:
        games: get what connects and is no HTTP.
        app: answers requests of HTTP.
        guard: decides which connections and requests are answered.
        listen: has the files of TLS.
        most_silent: connections that may have no request in progress.
    """
    import uvicorn

    from penstock.serving.frames import sniffing
    from penstock.serving.port import HELLO_S
    from penstock.serving.web_socket import WebSocketProtocol

    return uvicorn.Config(
        app,
        log_level="error",  # requests of any kind are refused
        access_log=False,
        lifespan="off",
        backlog=BACKLOG,
        limit_concurrency=HTTP_CONNECTIONS,
        timeout_keep_alive=HELLO_S,
        timeout_graceful_shutdown=END_S,
        h11_max_incomplete_event_size=REQUEST_NBYTES,
        http=sniffing(games, guard.admits, most_silent),  # type: ignore[arg-type, unused-ignore]
        ws=partial(WebSocketProtocol, games, guard),  # type: ignore[arg-type, unused-ignore]
        loop="asyncio",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ssl_certfile=listen.tls_cert,
        ssl_keyfile=listen.tls_key,
    )

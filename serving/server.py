"""Serves a policy until Ctrl-C: one port for games over TCP and WebSocket, and for HTTP."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.descriptors import raise_limit
from penstock.core.web.listen import BACKLOG, Listen
from penstock.evaluation.loaded_policy import LoadedPolicy

FIRST_PORT = 8800
END_S = 2  # seconds that requests in progress get when the server ends
REQUEST_NBYTES = 1 << 14  # line and headers
RESERVED_DESCRIPTORS = 64  # that are not connections of games
# The packages of the extra that serves.
PACKAGES = ("starlette", "uvicorn", "websockets")


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
        ready: gets the address of the page before the first request is answered.
        ended: gets the figures when no further request is answered.

    Raises UserError, also if an extra package or a free port is missing.
    """
    listen.check()
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise UserError(
            f"penstock serve needs {', '.join(missing)}, not installed here: "
            "pip install 'penstock[serve]'"
        )
    listen.check_tls()
    import uvicorn

    from penstock.serving.app import make_app, most_act_nbytes
    from penstock.serving.frames import sniffing
    from penstock.serving.port import HELLO_S, MOST_GAMES, Port
    from penstock.serving.service import Service
    from penstock.serving.web_socket import WebSocketProtocol

    service = Service(policy, name)
    most_games = min(MOST_GAMES, raise_limit() - RESERVED_DESCRIPTORS)
    guard = listen.guard()
    guard.open_posts = {"/act": most_act_nbytes(service)}
    port = Port(service, listen.token, most_games)

    class ServerOfGames(uvicorn.Server):
        """uvicorn, which does not know the games."""

        async def shutdown(self, sockets: Any = None) -> None:
            """End the games, then all else."""
            port.end("the service ends")
            await super().shutdown(sockets)
            ended(service.figures.to_json(perf_counter()))

    with closing(listen.bind()) as listener:
        config = uvicorn.Config(
            make_app(port, guard),
            log_level="error",  # requests of any kind are refused
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_keep_alive=HELLO_S,
            timeout_graceful_shutdown=END_S,
            h11_max_incomplete_event_size=REQUEST_NBYTES,
            http=sniffing(port, guard.admits),  # type: ignore[arg-type, unused-ignore]
            ws=partial(WebSocketProtocol, port, guard),  # type: ignore[arg-type, unused-ignore]
            loop="asyncio",
            server_header=False,
            date_header=False,
            proxy_headers=False,
            ssl_certfile=listen.tls_cert,
            ssl_keyfile=listen.tls_key,
        )
        ready(listen.url(listener.getsockname()[1]))
        with suppress(KeyboardInterrupt):
            ServerOfGames(config).run([listener])

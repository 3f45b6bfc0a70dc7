"""Serves the page until Ctrl-C."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path

from penstock.configs.errors import UserError
from penstock.core.web.listen import Listen
from penstock.watch.catalog import RunCatalog
from penstock.watch.views import Views

NICE = 10  # a run beside the page has priority
CONNECTIONS = 64  # open at the same time
END_S = 2  # seconds that requests in progress get when the server ends
REQUEST_NBYTES = 1 << 14  # line and headers
# The packages of the extra that serves the page.
PACKAGES = ("starlette", "uvicorn", "plotly")


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

    from penstock.core.web.connections import IDLE_S, limited
    from penstock.watch.app import make_app
    from penstock.watch.orders import Orders

    # A recording that is in progress would delay the end by its length.
    orders = Orders(cancels=lambda: server.should_exit)
    guard = listen.guard()
    app = make_app(Views(RunCatalog(Path(target))), guard, orders)
    listen.check_tls()
    with suppress(OSError):
        os.nice(NICE)

    with closing(listen.bind()) as listener:
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
        ready(listen.url(listener.getsockname()[1]))
        with suppress(KeyboardInterrupt):
            server.run([listener])

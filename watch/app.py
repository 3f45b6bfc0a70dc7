"""The HTTP application: the page, its scripts, and the JSON of its views. Needs penstock[watch]."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import penstock
from penstock.configs.errors import UserError
from penstock.core.formatting import finite
from penstock.monitor.run_folder.files import FORM_ERRORS
from penstock.watch.guard import BODY_NBYTES, ORDER_HEADER, Guard, GuardedApp
from penstock.watch.orders import Orders
from penstock.watch.page_files import KINDS, STATIC, plotly_script
from penstock.watch.views import MOST_COMPARED, MOST_METRICS, RUN_VIEWS, Views

NAME_LENGTH = 1000
BODY_S = 10
logger = logging.getLogger(__name__)


def make_app(views: Views, guard: Guard, orders: Orders | None = None) -> GuardedApp:
    """Returns the application that serves ``views`` behind ``guard``, and gives ``orders``."""
    give = (orders or Orders()).give
    read = _readers(views, guard)

    async def api(request: Request) -> Response:
        made = read.get(request.path_params["view"])
        if made is None:
            return PlainTextResponse("penstock: no such view\n", 404)
        return await _answer(lambda: made(request.query_params))

    async def order(request: Request) -> Response:
        name = await _ordered_run(request)
        if isinstance(name, Response):
            return name
        kind = request.path_params["order"]
        return await _answer(lambda: give(kind, views.catalog.run(name).folder))

    async def video(request: Request) -> Response:
        query = request.query_params
        try:
            path, kind = await run_in_threadpool(
                lambda: views.video(_text(query, "run"), _text(query, "file"))
            )
        except UserError as error:
            return PlainTextResponse(f"penstock: {error}\n", 404)
        return FileResponse(path, media_type=kind)

    files = {"/": STATIC / "index.html", **{f"/{p.name}": p for p in STATIC.iterdir()}}

    async def static(request: Request) -> Response:
        path = files.get(request.url.path)
        if path is None or path.suffix not in KINDS:
            return PlainTextResponse("penstock: no such page\n", 404)
        headers = {"cache-control": "no-cache"}
        return FileResponse(path, media_type=KINDS[path.suffix], headers=headers)

    plotly = plotly_script()

    async def charts(request: Request) -> Response:
        headers = {"cache-control": "private, max-age=3600"}
        return FileResponse(plotly, media_type=KINDS[".js"], headers=headers)

    app = Starlette(
        routes=[
            Route("/api/{view}", api, methods=["GET"]),
            Route("/order/{order}", order, methods=["POST"]),
            Route("/video", video, methods=["GET"]),
            Route("/vendor/plotly.min.js", charts, methods=["GET"]),
            Route("/{path:path}", static, methods=["GET"]),
        ]
    )
    return GuardedApp(app, guard)


def _readers(views: Views, guard: Guard) -> dict[str, Callable[[QueryParams], Any]]:
    """What GET /api/NAME returns, by name."""

    def of_run(view: Callable[[Views, str], Any]) -> Callable[[QueryParams], Any]:
        return lambda q: view(views, _text(q, "run"))

    return {
        **{name: of_run(view) for name, view in RUN_VIEWS.items()},
        "session": lambda q: {
            "version": penstock.__version__,
            "header": ORDER_HEADER,
            "token": guard.order_token,
        },
        "runs": lambda q: views.runs(),
        "curves": lambda q: views.curves(
            _texts(q, "run", MOST_COMPARED + 1),
            _texts(q, "metric", MOST_METRICS + 1),
            _text(q, "x", "env_steps"),
            _whole(q, "smooth", 1),
            _whole(q, "points", 600),
            _number(q, "low"),
            _number(q, "high"),
            _text(q, "known", ""),
            by_seed=_text(q, "seeds", "apart") != "together",
        ),
        "metrics": lambda q: views.metrics(_texts(q, "run", MOST_COMPARED)),
        "events": lambda q: views.events(
            _text(q, "run"), *(_text(q, name, "") for name in ("kind", "role", "text"))
        ),
        "log": lambda q: views.log(_text(q, "run"), _text(q, "role")),
        "decisions": lambda q: views.decisions(_text(q, "run"), _text(q, "file")),
    }


async def _ordered_run(request: Request) -> str | Response:
    """Returns the name of the run in an order, or the refusal of the request."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > BODY_NBYTES:
                    return JSONResponse({"error": "the order is too long"}, 413)
    except TimeoutError:
        return JSONResponse({"error": f"the order did not arrive within {BODY_S} s"}, 408)

    try:
        name = json.loads(body)["run"]
    except (ValueError, LookupError, TypeError, RecursionError):
        name = None
    if not isinstance(name, str):
        return JSONResponse({"error": 'an order is {"run": NAME}'}, 400)
    return name


async def _answer(made: Callable[[], Any]) -> Response:
    """Returns the result as JSON; an error of HTTP with a sentence if it cannot be made.

    ``make_result`` is called in a thread, as it reads files.
    """
    try:
        return JSONResponse(await run_in_threadpool(made))
    except UserError as error:
        return JSONResponse({"error": str(error)}, 400)
    except TimeoutError:
        return JSONResponse({"error": "the run did not reply in time"}, 504)
    except (OSError, *FORM_ERRORS) as error:
        logger.warning("a request failed", exc_info=True)  # files of any kind are read
        return JSONResponse({"error": f"the files of the run could not be read ({error})"}, 500)


def _texts(query: QueryParams, name: str, most: int) -> list[str]:
    found = query.getlist(name)
    if not found or len(found) > most or any(len(text) > NAME_LENGTH for text in found):
        raise UserError(f"give {name} 1 to {most} times, each below {NAME_LENGTH} characters")
    return found


def _text(query: QueryParams, name: str, default: str | None = None) -> str:
    if default is not None and name not in query:
        return default
    return _texts(query, name, 1)[0]


def _number(query: QueryParams, name: str) -> float | None:
    if name not in query:
        return None
    text, value = _text(query, name), None
    with suppress(ValueError):
        value = finite(float(text))
    if value is None:
        raise UserError(f"{name} is {text[:40]!r}; it must be a number")
    return value


def _whole(query: QueryParams, name: str, default: int) -> int:
    text = _text(query, name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UserError(f"{name} is {text[:40]!r}; it must be a whole number")
    return int(text)

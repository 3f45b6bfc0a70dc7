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
from penstock.core.web.guard import BODY_NBYTES, ORDER_HEADER, Guard, GuardedApp
from penstock.core.web.static_files import KINDS, static_route
from penstock.monitor.run_folder.files import FORM_ERRORS
from penstock.watch.orders import Orders
from penstock.watch.page_files import STATIC, plotly_script
from penstock.watch.views import MOST_COMPARED, MOST_METRICS, RUN_VIEWS, Views

NAME_LENGTH = 1000  # characters of a field of a query
BODY_S = 10  # the time in which an order has to arrive
DIGITS = 9  # digits of a whole number
logger = logging.getLogger(__name__)


def make_app(views: Views, guard: Guard, orders: Orders | None = None) -> GuardedApp:
    """Returns the application that serves ``views`` behind ``guard``, and gives ``orders``."""
    run_orders = Orders() if orders is None else orders
    view_functions = _view_functions(views, guard)
    plotly = plotly_script()

    async def api(request: Request) -> Response:
        """Answer with a view as JSON."""
        view = view_functions.get(request.path_params["view"])
        if view is None:
            return PlainTextResponse("penstock: no such view\n", 404)
        return await _answer(lambda: view(request.query_params))

    async def order(request: Request) -> Response:
        """Carry out an order, and answer with its result."""
        name = await _ordered_run(request)
        if isinstance(name, Response):
            return name
        kind = request.path_params["order"]
        return await _answer(lambda: run_orders.give(kind, views.catalog.run(name).folder))

    async def video(request: Request) -> Response:
        """Answer with the file of a video."""
        query = request.query_params
        try:
            path, media_type = await run_in_threadpool(
                lambda: views.video(_text(query, "run"), _text(query, "file"))
            )
        except UserError as error:
            return PlainTextResponse(f"penstock: {error}\n", 404)
        return FileResponse(path, media_type=media_type)

    async def charts(request: Request) -> Response:
        """Answer with plotly.js."""
        headers = {"cache-control": "private, max-age=3600"}
        return FileResponse(plotly, media_type=KINDS[".js"], headers=headers)

    app = Starlette(
        routes=[
            Route("/api/{view}", api, methods=["GET"]),
            Route("/order/{order}", order, methods=["POST"]),
            Route("/video", video, methods=["GET"]),
            Route("/vendor/plotly.min.js", charts, methods=["GET"]),
            static_route(STATIC),
        ]
    )
    return GuardedApp(app, guard)


def _view_functions(views: Views, guard: Guard) -> dict[str, Callable[[QueryParams], Any]]:
    """Returns what makes the answer to GET /api/NAME of the query, by NAME."""

    def of_run(view: Callable[[Views, str], Any]) -> Callable[[QueryParams], Any]:
        """Returns the function for a view of one run, which the query names."""
        return lambda query: view(views, _text(query, "run"))

    return {
        **{name: of_run(view) for name, view in RUN_VIEWS.items()},
        "session": lambda query: {
            "version": penstock.__version__,
            "header": ORDER_HEADER,
            "token": guard.order_token,
        },
        "runs": lambda query: views.runs(),
        "curves": lambda query: views.curves(
            _texts(query, "run", MOST_COMPARED + 1),
            _texts(query, "metric", MOST_METRICS + 1),
            x=_text(query, "x", "env_steps"),
            count=_whole_number(query, "smooth", 1),
            points=_whole_number(query, "points", 600),
            low=_number(query, "low"),
            high=_number(query, "high"),
            known_version=_text(query, "known", ""),
            by_seed=_text(query, "seeds", "apart") != "together",
        ),
        "metrics": lambda query: views.metrics(_texts(query, "run", MOST_COMPARED)),
        "events": lambda query: views.events(
            _text(query, "run"),
            kind=_text(query, "kind", ""),
            role=_text(query, "role", ""),
            text=_text(query, "text", ""),
        ),
        "log": lambda query: views.log(_text(query, "run"), _text(query, "role")),
        "decisions": lambda query: views.decisions(_text(query, "run"), _text(query, "file")),
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


async def _answer(make_result: Callable[[], Any]) -> Response:
    """Returns the result as JSON; an error of HTTP with a sentence if it cannot be made.

    ``make_result`` is called in a thread, as it reads files.
    """
    try:
        return JSONResponse(await run_in_threadpool(make_result))
    except UserError as error:
        return JSONResponse({"error": str(error)}, 400)
    except TimeoutError:
        return JSONResponse({"error": "the run did not reply in time"}, 504)
    except (OSError, *FORM_ERRORS) as error:
        logger.warning("a request failed", exc_info=True)  # files of any kind are read
        return JSONResponse({"error": f"the files of the run could not be read ({error})"}, 500)


def _texts(query: QueryParams, name: str, most: int) -> list[str]:
    """Returns all values of a field. Raises UserError without one, or for too many or too long."""
    values = query.getlist(name)
    if not values or len(values) > most or any(len(value) > NAME_LENGTH for value in values):
        raise UserError(f"give {name} 1 to {most} times, each below {NAME_LENGTH} characters")
    return values


def _text(query: QueryParams, name: str, default: str | None = None) -> str:
    """Returns the value of a field, or the default. Raises UserError without either."""
    if default is not None and name not in query:
        return default
    return _texts(query, name, 1)[0]


def _number(query: QueryParams, name: str) -> float | None:
    """Returns the number in a field; None without the field. Raises UserError for another text."""
    if name not in query:
        return None
    text = _text(query, name)
    value = None
    with suppress(ValueError):
        value = finite(float(text))
    if value is None:
        raise UserError(f"{name} is {text[:40]!r}; it must be a number")
    return value


def _whole_number(query: QueryParams, name: str, default: int) -> int:
    """Returns the whole number in a field, or the default. Raises UserError for another text."""
    text = _text(query, name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS:
        raise UserError(f"{name} is {text[:40]!r}; it must be a whole number")
    return int(text)

"""HTTP beside the games: the page, its figures, and `POST /act`. Needs penstock[serve]."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from gymnasium import spaces
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import penstock
from penstock.configs.errors import UserError
from penstock.core.files import DAMAGE
from penstock.core.web.guard import Guard, GuardedApp
from penstock.serving.port import Port
from penstock.serving.service import Service

STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
BODY_S = 10  # the time in which a request has to arrive
# A number in JSON has at most so many characters, with what separates it from the next.
NUMBER_NBYTES = 32


def most_act_nbytes(service: Service) -> int:
    """Returns the most bytes of a body of `POST /act`: its numbers, and some for their names."""
    values = sum(np.prod(column.shape, dtype=int) for column in service.observations.layout.columns)
    state = service.policy.batch_policy.state_size
    return (64 << 10) + NUMBER_NBYTES * int(values + state)


def make_app(port: Port, guard: Guard) -> GuardedApp:
    """Returns the application that serves what is not a game, behind ``guard``."""
    service = port.service
    static_files = {"/": STATIC / "index.html"}
    static_files |= {f"/{path.name}": path for path in STATIC.iterdir()}

    async def act(request: Request) -> Response:
        """Decide for one observation."""
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.body()
        except TimeoutError:
            return JSONResponse({"error": f"the request did not arrive within {BODY_S} s"}, 408)
        try:
            return JSONResponse(_act(service, body))
        except UserError as error:
            service.figures.faults["act"] += 1
            return JSONResponse({"error": str(error)}, 400)

    async def figures(request: Request) -> Response:
        """Answer with what the page shows."""
        return JSONResponse(
            {
                "version": penstock.__version__,
                **service.describe(),
                "games": len(port.games),
                "seats": service.seats.taken,
                "most_seats": service.seats.capacity,
                **service.figures.to_json(perf_counter()),
            }
        )

    async def static(request: Request) -> Response:
        """Answer with a file of the page."""
        path = static_files.get(request.url.path)
        if path is None or path.suffix not in KINDS:
            return PlainTextResponse("penstock: no such page\n", 404)
        headers = {"cache-control": "no-cache"}
        return FileResponse(path, media_type=KINDS[path.suffix], headers=headers)

    app = Starlette(
        routes=[
            Route("/act", act, methods=["POST"]),
            Route("/figures", figures, methods=["GET"]),
            Route("/{path:path}", static, methods=["GET"]),
        ]
    )
    return GuardedApp(app, guard)


def _act(service: Service, body: bytes) -> dict[str, Any]:
    """Returns the answer to `POST /act`. Raises UserError for what is no observation."""
    try:
        content = json.loads(body)
        encoded = content["observation"]
        state = content.get("state")
    except (*DAMAGE, RecursionError) as error:
        raise UserError(
            'the body is no {"observation": ..., "state": [...] or null}; send that as JSON'
        ) from error

    policy = service.policy
    try:
        observation = _observation(policy.observation_space, encoded)
        if state is not None:
            state = np.array(state, np.float32)
    except DAMAGE as error:
        raise UserError(
            f"the observation or the state does not fit its space ({str(error)[:120]}); send "
            "nested lists, and an object for a Dict"
        ) from error
    if state is not None and not np.isfinite(state).all():
        raise UserError("the state has numbers that are not finite; send back the last one")

    began_s = perf_counter()
    action, next_state = policy(observation, state)
    service.figures.count_batch(1)
    service.figures.count_answers([began_s], np.ones(1, np.int64), perf_counter())
    return {
        "action": np.asarray(action).tolist(),
        "state": None if next_state is None else next_state.tolist(),
    }


def _observation(space: spaces.Space[Any], encoded: Any) -> Any:
    """Returns one observation of ``space`` from JSON. Raises what numpy raises for another one."""
    if isinstance(space, spaces.Dict):
        return {key: _observation(part, encoded[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map(_observation, space.spaces, encoded, strict=True))
    array = np.array(encoded, space.dtype)
    if array.shape != space.shape:
        raise ValueError(f"shape {[*array.shape]} where {[*(space.shape or ())]} belongs")
    return array

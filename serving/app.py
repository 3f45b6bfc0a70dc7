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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import penstock
from penstock.configs.errors import UserError
from penstock.core.files import DAMAGE
from penstock.core.web.guard import Guard, GuardedApp
from penstock.core.web.static_files import static_route
from penstock.serving.port import Port
from penstock.serving.service import Service

STATIC = Path(__file__).parent / "static"
BODY_S = 10  # the time in which a request has to arrive
# The most characters of a number in JSON, with what separates it from the next.
NUMBER_NBYTES = 32


def most_act_nbytes(service: Service) -> int:
    """Returns the most bytes of a body of `POST /act`: its numbers, and some for their names."""
    values = sum(np.prod(column.shape, dtype=int) for column in service.observations.layout.columns)
    state = service.policy.batch_policy.state_size
    return (64 << 10) + NUMBER_NBYTES * int(values + state)


def make_app(port: Port, guard: Guard) -> GuardedApp:
    """Returns the application that serves what is not a game, behind ``guard``."""
    service = port.service
    recorder = service.recorder

    async def act(request: Request) -> Response:
        """Decide for one observation."""
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
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
                "learns": None if recorder is None else recorder.figures(),
                **service.figures.to_json(perf_counter()),
            }
        )

    app = Starlette(
        routes=[
            Route("/act", act, methods=["POST"]),
            Route("/figures", figures, methods=["GET"]),
            static_route(STATIC),
        ]
    )
    return GuardedApp(app, guard)


def _act(service: Service, body: bytes) -> dict[str, Any]:
    """Returns the answer to `POST /act`. Raises UserError for what is no observation."""
    try:
        content = json.loads(body)
        encoded = content["observation"]
        state = content.get("state")
        reward = content.get("reward")
    except (*DAMAGE, RecursionError) as error:
        raise UserError(
            'the body is no {"observation": ..., "state": [...] or null, "reward": number or '
            "null}; send that as JSON"
        ) from error

    policy = service.policy
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # found as infinite below
            observation = _observation(policy.observation_space, encoded)
            if state is not None:
                state = np.array(state, np.float32)
            if reward is not None:
                reward = np.array(reward, np.float64)
    except DAMAGE as error:
        raise UserError(
            f"the observation, the state or the reward does not fit ({str(error)[:120]}); send "
            "nested lists, an object for a Dict, and a number as reward"
        ) from error
    if state is not None and not np.isfinite(state).all():
        raise UserError("the state has numbers that are not finite; send back the last one")

    began_s = perf_counter()
    action, next_state = policy(observation, state, reward)
    results = [np.asarray(action)] if next_state is None else [np.asarray(action), next_state]
    if not all(np.isfinite(result).all() for result in results):
        raise UserError("the action or the state is not finite; send the state of the last answer")
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
        pairs = zip(space.spaces, encoded, strict=True)
        return tuple(_observation(part, inner) for part, inner in pairs)
    array = np.array(encoded, space.dtype)
    if array.shape != space.shape:
        raise ValueError(f"shape {[*array.shape]} where {[*(space.shape or ())]} belongs")
    return array

"""`penstock replay serve`: a replay buffer as a process of its own.

The spec file says what the buffer holds; see `SpecFile`:

    columns:
      obs: [float32, [4]]
      action: [int64, []]
    envs: 16
    n_step: 3
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pydantic

from penstock.configs.errors import UserError
from penstock.configs.text import parse
from penstock.core.memory import keep_freed_memory
from penstock.replay.buffer import Replay
from penstock.replay.samplers import Prioritized, Sampler, Uniform
from penstock.replay.steps import Autoreset
from penstock.serving.server import ReplayServer


class SpecFile(pydantic.BaseModel):
    """What `Replay` takes; a column is ``[dtype, shape]``, or a map of such."""

    model_config = pydantic.ConfigDict(extra="forbid")

    columns: dict[str, Any]
    envs: int = 1
    unroll: int | None = None
    frame_stack: int = 1
    n_step: int = 1
    discount: float = 0.99
    autoreset: Autoreset = "none"


def serve(
    bind: str,
    spec: Path,
    capacity: int,
    sampler: str,
    alpha: float,
    beta: float,
    curve: Path | None,
    insecure: bool,
    as_json: bool,
) -> None:
    """Serve until SIGINT or SIGTERM, then print the counts. Raises UserError."""
    keep_freed_memory()
    chosen: Sampler = Prioritized(alpha, beta) if sampler == "prioritized" else Uniform()
    options = read_spec(spec).model_dump()
    columns = options.pop("columns")
    replay = Replay(columns, capacity, sampler=chosen, shared=True, **options)
    try:
        with ReplayServer(replay, bind, curve=curve, insecure=insecure) as server:
            with _told_to_stop() as stop:
                print(f"serving {capacity} rows at {server.address}", file=sys.stderr, flush=True)
                server.run(stop.is_set)
            stats = replay.stats() | {"server": server.figures()}
    finally:
        replay.close()
    if as_json:
        print(json.dumps(stats | {"address": server.address}))
    else:
        print(f"{stats['inserted']} rows came, {stats['stored']} were stored at the end")


def read_spec(path: Path) -> SpecFile:
    """Raises UserError naming the file and what is wrong with it."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the spec {path} cannot be read ({error}); name a YAML file") from error
    value, _ = parse(text, str(path))
    try:
        return SpecFile.model_validate(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise UserError(
            f"{path}: {place}: {first['msg']}; a spec has {', '.join(SpecFile.model_fields)}"
        ) from error


@contextmanager
def _told_to_stop() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second one ends the process at once."""
    stop = threading.Event()
    before: dict[signal.Signals, Any] = {}

    def handler(number: int, frame: object) -> None:
        stop.set()
        for signum in before:
            signal.signal(signum, signal.SIG_DFL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        before[signum] = signal.signal(signum, handler)
    try:
        yield stop
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)

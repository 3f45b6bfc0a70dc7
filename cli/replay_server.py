"""`penstock replay serve`: a replay buffer in a separate process.

The spec file describes the rows of the buffer; see `SpecFile`:

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pydantic

from penstock.configs.errors import UserError
from penstock.configs.sections import ReplayConfig
from penstock.configs.yaml_text import parse
from penstock.core import descriptors
from penstock.core.memory import keep_freed_memory
from penstock.replay.buffer import Replay
from penstock.replay.errors import DamagedSnapshotError
from penstock.replay.factory import sampler_for
from penstock.replay.remote.peers import ServiceLimits
from penstock.replay.remote.server import ReplayServer, Snapshots
from penstock.replay.snapshot import MANIFEST
from penstock.replay.steps import Autoreset

MakeReplay = Callable[[], Replay]


class SpecFile(pydantic.BaseModel):
    """Arguments of `Replay`; a column is ``[dtype, shape]``, or a map of columns."""

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
    *,
    capacity: int,
    sampling: ReplayConfig,
    curve: Path | None,
    insecure: bool,
    snapshot: Path | None,
    snapshot_every_s: float,
    limits: ServiceLimits,
    as_json: bool,
) -> None:
    """Serve a replay until SIGINT or SIGTERM, then print its counts.

    Args:
        bind: the address for clients.
        spec: a YAML file with the fields of `SpecFile`.
        capacity: the number of rows that the replay keeps at least.
        sampling: settings of a replay, of which only those of the sampler are used.
        curve: a folder with CURVE keys; None without encryption.
        insecure: whether clients need no authentication.
        snapshot: a folder for snapshots. A complete one in it is restored first, and a last one is
            written at the end. None: no snapshots.
        snapshot_every_s: seconds between two snapshots.
        limits: limits for the clients.
        as_json: whether the counts are printed as one JSON object.

    Raises:
        UserError: a file, an address or an option is wrong.
    """
    keep_freed_memory()
    descriptors.raise_limit()  # each client takes a descriptor

    options = read_spec(spec).model_dump()
    columns = options.pop("columns")

    def make_replay() -> Replay:
        """Make an empty replay with a sampler of its own."""
        sampler = sampler_for(sampling, lambda: 0)
        return Replay(columns, capacity, sampler=sampler, shared=True, **options)

    with ExitStack() as resources:
        snapshots = None
        if snapshot is None:
            replay = make_replay()
        else:
            replay, snapshots = _restore(make_replay, snapshot, snapshot_every_s)
        resources.callback(replay.close)
        server = resources.enter_context(
            ReplayServer(
                replay,
                bind,
                curve=curve,
                insecure=insecure,
                limits=limits,
                snapshots=snapshots,
                log=_say,
            )
        )

        with _stop_signals() as stop:
            _say(f"serving {capacity} rows at {server.address}")
            server.run(stop.is_set)
            server.save()
        stats = replay.stats() | {"server": server.figures()}

    if as_json:
        print(json.dumps(stats | {"address": server.address}))
    else:
        print(f"{stats['inserted']} rows inserted, {stats['stored']} stored at the end")
        for reason, count in sorted(server.rejected.items()):
            print(f"rejected ({reason}): {count}")


def _restore(make_replay: MakeReplay, folder: Path, every_s: float) -> tuple[Replay, Snapshots]:
    """Restore a replay from the snapshot in ``folder``, if that is complete.

    Returns:
        The replay, which is empty without a complete snapshot; and what saves it to ``folder``
        every ``every_s`` seconds.
    """
    replay = make_replay()
    snapshots = Snapshots(replay, folder, every_s=every_s, log=_say)
    if not (folder / MANIFEST).exists():
        _say(f"{folder} contains no snapshot; the replay starts empty")
        return replay, snapshots

    try:
        snapshots.restore()
    except DamagedSnapshotError as error:
        # The replay may hold a part of the snapshot, so it is replaced.
        _say(f"warning: {error}; the replay starts empty, and the next snapshot replaces this one")
        replay.close()
        replay = make_replay()
        return replay, Snapshots(replay, folder, every_s=every_s, log=_say)
    except BaseException:
        replay.close()
        raise

    _say(f"restored {len(replay)} rows from the snapshot {folder}")
    return replay, snapshots


def _say(text: str) -> None:
    """Print a line on stderr; a closed stderr is ignored."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def read_spec(path: Path) -> SpecFile:
    """Returns the spec in a YAML file.

    Raises:
        UserError: the file cannot be read, is no YAML, or has a wrong key or value.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--spec {path} cannot be read ({error}); give a YAML file") from error

    value, _ = parse(text, str(path))
    try:
        return SpecFile.model_validate(value)
    except pydantic.ValidationError as error:
        first_error = error.errors()[0]
        place = ".".join(map(str, first_error["loc"])) or "the file"
        keys = ", ".join(SpecFile.model_fields)
        raise UserError(f"{path}: {place}: {first_error['msg']}; the keys are {keys}") from error


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set; a second signal ends the process at once.

    The handlers from before are restored at the end of the ``with`` block.
    """
    stop = threading.Event()
    previous_handlers: dict[signal.Signals, Any] = {}

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        for signum in previous_handlers:
            signal.signal(signum, signal.SIG_DFL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        previous_handlers[signum] = signal.signal(signum, on_signal)
    try:
        yield stop
    finally:
        for signum, handler in previous_handlers.items():
            signal.signal(signum, handler)

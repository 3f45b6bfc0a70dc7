"""A client of a replay buffer on another host: add, sample, update priorities.

    client = ReplayClient("tcp://replay-host:7800")
    client.add(obs=o, action=a, reward=r, terminated=te, truncated=tr, next_obs=o2)
    batch = client.sample(256)
    client.update_priorities(batch.keys, td_error)

Steps are sent in whole slots, and are kept here until the server has stored them (`Outbox`).
Batches are requested ahead (`BatchRequests`): ``prefetch`` of them are on their way while one is
used, so a batch is that much older.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from penstock.configs.errors import printable
from penstock.configs.value_types import is_local
from penstock.replay.batch import Batch
from penstock.replay.errors import ReplayError
from penstock.replay.remote.batch_codec import read_shape, unpack
from penstock.replay.remote.outbox import Outbox, read_spec
from penstock.replay.remote.service import REPLAY_VERSION
from penstock.replay.samplers import check_priorities
from penstock.replay.steps import StepArguments
from penstock.replay.writer import TIMEOUT_S, StepAdder
from penstock.transport import wire
from penstock.transport.wire import Buffer, Header, MessageKind
from penstock.transport.zmq.keys import load_actor
from penstock.transport.zmq.sockets import Socket, dealer, handle_messages, send_now

REPEAT_S = 1.0
UPDATE_ROWS = 1 << 16  # of one message
AHEAD_NBYTES = 64 << 20  # of batches on their way
Want = tuple[int, bool]  # rows, stacked


class ReplayClient(StepAdder):
    """Adds to and samples from a `ReplayServer`; one thread at a time.

    The server sees the steps of a slot together, when the slot is full or at `flush`. ``spec`` is
    the layout of a slot. ``lost`` counts rows that the server had and lost, because it was
    restarted from an older snapshot, or from none. Set ``version`` to that of the acting policy
    where the buffer limits the policy lag: `add` stamps it on the slots that it begins.

    Args:
        address: of the server, ``tcp://HOST:PORT`` or ``ipc://PATH``.
        curve: folder with this host's keys.
        prefetch: batches requested ahead, fewer if they are big.
        patience_s: longest wait for the server's first answer, in seconds.

    Raises:
        ReplayError: no replay server answers in time.
        UserError: the keys or the address cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        curve: str | Path | None = None,
        prefetch: int = 32,
        patience_s: float = 30.0,
    ) -> None:
        if prefetch < 1:
            raise ReplayError(f"prefetch {prefetch} must be at least 1 batch")
        self._address, self._prefetch, self._patience_s = address, prefetch, patience_s
        self._run_id = 0
        self._row_nbytes = self._ahead = 1
        self._outbox: Outbox | None = None
        self._want: Want = (0, True)
        self._batches: deque[Batch] = deque()
        self._asked: dict[int, tuple[int, float]] = {}  # request -> batches, time
        self._number = 0
        self._token = ""  # identifies this client to a server that knew it before
        self._read = 0  # answers since the server last sent its count
        self._said_read = 0
        self.lost = self.version = 0
        self._reason = "it has not replied"
        self._refused: str | None = None
        self._stats: dict[str, Any] | None = None
        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            keys = load_actor(Path(curve)) if curve else None
            self._socket = dealer(self._context, address, keys)
        except BaseException:
            self._context.term()
            raise
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _add(self, step: StepArguments, timeout_s: float | None) -> None:
        outbox = self._joined()
        outbox.steps.table.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        outbox.steps.table.version = self.version
        outbox.steps.writer.add(*step)
        if outbox.has_news:
            self._pump(0)
            self._raise_refusal()

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the server has stored everything that was added. Raises TimeoutError."""
        outbox = self._joined()
        outbox.steps.writer.flush()
        ends_s = time.monotonic() + timeout_s
        self._pump(0)
        while len(outbox):
            self._raise_refusal()
            if time.monotonic() >= ends_s:
                raise TimeoutError(f"{len(outbox)} slots were not stored within {timeout_s:g} s")
            self._pump(0.1)
        self._raise_refusal()

    def sample(self, count: int, *, stacked: bool = True, timeout_s: float = 60.0) -> Batch:
        """Draw a batch as `Replay.sample`. Raises TimeoutError, with the server's reason."""
        if self._want != (count, stacked):
            self._want = (count, stacked)
            self._ahead = max(
                1, min(self._prefetch, AHEAD_NBYTES // (max(1, count) * self._row_nbytes))
            )
            self._batches.clear()
            self._asked.clear()
        ends_s = time.monotonic() + timeout_s
        self._ask()
        if not self._batches:
            self._pump(0)
        while not self._batches:
            self._raise_refusal()
            if time.monotonic() >= ends_s:
                raise TimeoutError(
                    f"no batch of {count} came within {timeout_s:g} s from {self._address}: "
                    f"{self._reason}"
                )
            self._pump(0.1)
            self._ask()
        return self._batches.popleft()

    def update_priorities(self, keys: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """Send new priorities as `Replay.update_priorities`.

        Not confirmed, lost if the connection breaks.
        """
        names, values = check_priorities(np.ascontiguousarray(keys), priorities)
        for start in range(0, len(names), UPDATE_ROWS):
            part = slice(start, start + UPDATE_ROWS)
            frames: wire.Parts = [names[part].data.cast("B"), values[part].data.cast("B")]
            self._say(MessageKind.UPDATE, None, 0, frames)

    def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Counts as of `Replay.stats`, the server's counters ("server") and this client's
        ("client").
        """
        self._stats = None
        ends_s = time.monotonic() + timeout_s
        ask_s = 0.0
        while self._stats is None:
            now_s = time.monotonic()
            if now_s >= ends_s:
                raise TimeoutError(f"{self._address} did not answer within {timeout_s:g} s")
            if now_s >= ask_s:
                self._say(MessageKind.ASK_STATS)
                ask_s = now_s + REPEAT_S
            self._pump(0.05)
        return self._stats | {"client": {"lost": self.lost}}

    def close(self) -> None:
        """Disconnect. Steps added since the last `flush` may be lost."""
        if self._socket.closed:
            return
        if self._outbox is not None:
            self._outbox.steps.writer.flush()
            self._outbox.ship()
            self._outbox.close()
        self._socket.close()
        self._context.term()

    def __enter__(self) -> ReplayClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------- messages

    def _joined(self) -> Outbox:
        assert self._outbox is not None, "a client that has not joined is not given out"
        return self._outbox

    def _join(self) -> None:
        ends_s = time.monotonic() + self._patience_s
        ask_s = 0.0
        while not self._run_id:
            now_s = time.monotonic()
            if now_s >= ends_s:
                raise ReplayError(
                    f"no replay server answers at {self._address} within {self._patience_s:g} s; "
                    "start one with `penstock replay serve`, and check the address and the keys"
                )
            if now_s >= ask_s:
                ask_s = now_s + (REPEAT_S if self._say_join() else 0.05)
            self._pump(0.05)
            self._raise_refusal()

    def _ask(self) -> None:
        """Keep batches on their way, requesting a quarter of them at a time."""
        now_s = time.monotonic()
        for number, (count, asked_s) in self._asked.items():
            if now_s - asked_s > REPEAT_S:
                self._asked[number] = (count, now_s)
                self._say_sample(number, count)
        coming = len(self._batches) + sum(count for count, _ in self._asked.values())
        missing = self._ahead - coming
        if missing >= max(1, self._ahead // 4):
            self._number += 1
            self._asked[self._number] = (missing, now_s)
            self._say_sample(self._number, missing)
        elif self._read != self._said_read:
            self._say_sample(self._number, 0)

    def _say_join(self) -> bool:
        return self._say(MessageKind.JOIN, {"version": REPLAY_VERSION, "token": self._token})

    def _say_sample(self, number: int, count: int) -> None:
        batch, stacked = self._want
        meta = {"batch": batch, "count": count, "stacked": stacked, "read": self._read}
        if self._say(MessageKind.SAMPLE, meta, number):
            self._said_read = self._read

    def _pump(self, timeout_s: float) -> None:
        """Send what is due and handle messages, waiting up to ``timeout_s`` seconds for one."""
        if self._outbox is not None:
            self._outbox.ship()
        if timeout_s > 0:
            self._socket.poll(max(1, round(timeout_s * 1000)))
        handle_messages(
            self._socket,
            self._handle,
            server=f"the server at {self._address}",
            client="this client",
            error=ReplayError,
        )

    def _handle(self, message: wire.Message) -> None:
        head = message.head
        meta = wire.verify(message)
        if head.kind == MessageKind.SPEC:
            self._welcomed(head, meta)
        elif head.kind == MessageKind.REFUSE:
            self._refused = printable(str(meta["error"]))
            if meta.get("kind") == MessageKind.SLOT:
                self._joined().refused(head.sequence)
            else:
                self._asked.clear()
        elif head.kind == MessageKind.WHO:
            self._say_join()
        elif head.run_id != self._run_id:
            return
        elif head.kind == MessageKind.BATCH:
            self._read += 1
            if self._asked.pop(head.sequence, None) is not None:
                shape = read_shape(meta)
                self._batches.extend(unpack(shape, frame) for frame in message.frames)
        elif head.kind == MessageKind.STORED:
            self._joined().stored(head.sequence)
        elif head.kind == MessageKind.WAIT:
            self._reason = printable(str(meta["reason"]))
        elif head.kind == MessageKind.STATS:
            self._stats = dict(meta)

    def _welcomed(self, head: Header, meta: dict[str, Any]) -> None:
        """Handle the server's answer to joining.

        It gives the spec, the position up to which it has this client's stream, and the number of
        answers that it has sent on this connection.
        """
        if meta["version"] != REPLAY_VERSION:
            version = printable(str(meta["version"]))
            raise ReplayError(
                f"the server at {self._address} speaks version {version} of the replay "
                f"protocol and this client {REPLAY_VERSION}; use the same release of Penstock"
            )
        spec, token = read_spec(meta["spec"]), str(meta["token"])
        following, kept, read = int(meta["next"]), int(meta["kept"]), int(meta["sent"])
        if self._outbox is None:
            codec = "none" if is_local(self._address) else "auto"
            send = partial(send_now, self._socket)
            self._outbox = Outbox(spec, meta, codec, send, self._pump)
            self.spec = spec
            self._row_nbytes = max(1, int(meta["row_nbytes"]))
        elif spec != self.spec:
            raise ReplayError(
                f"another buffer listens at {self._address} now "
                f"({printable(self.spec.difference(spec, 'before', 'now'))}); make a new client"
            )
        again = self._run_id not in (0, head.run_id)
        self._run_id, self._token, self._read = head.run_id, token, read
        self._asked.clear()
        had = self._outbox.resume(head.run_id, following, kept)
        if again:
            self.lost += max(0, had - kept)

    def _raise_refusal(self) -> None:
        text, self._refused = self._refused, None
        if text is not None:
            raise ReplayError(text)

    def _say(
        self, kind: MessageKind, meta: Any = None, number: int = 0, frames: Sequence[Buffer] = ()
    ) -> bool:
        spec_hash = self.spec.hash if self._run_id else 0
        head = Header(kind, spec_hash=spec_hash, run_id=self._run_id, sequence=number)
        return send_now(self._socket, wire.encode(head, meta, frames))

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

# A request that is not answered is sent again after so long.
REPEAT_S = 1.0

# Rows of one message with new priorities.
UPDATE_ROWS = 1 << 16

# Batches that are requested ahead have at most so many bytes; one is requested in any case.
AHEAD_NBYTES = 64 << 20


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
        self._patience_s = patience_s
        self.lost = 0
        self.version = 0

        self._outbox: Outbox | None = None
        """The slots of this client; made when the server tells their spec."""

        self._token = ""
        """Identifies this client to a server that knows it already."""

        self._refusal: str | None = None
        """The server's refusal that the next call raises."""

        self._stats: dict[str, Any] | None = None
        """The newest answer to `stats`; None while it is awaited."""

        self._link = ServerLink(address, curve)
        self._requests = BatchRequests(self._link, prefetch)
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _add(self, step: StepArguments, timeout_s: float | None) -> None:
        outbox = self._joined_outbox()
        outbox.steps.table.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        outbox.steps.table.version = self.version
        outbox.steps.writer.add(*step)
        if outbox.has_news:
            self._pump(0)
            self._raise_refusal()

    def flush(self, timeout_s: float = 60.0) -> None:
        """Wait until the server has stored everything that was added.

        Raises:
            TimeoutError: it has not within ``timeout_s`` seconds.
            ReplayError: the server refuses a slot.
        """
        outbox = self._joined_outbox()
        outbox.steps.writer.flush()

        deadline_s = time.monotonic() + timeout_s
        self._pump(0)
        while len(outbox):
            self._raise_refusal()
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"{len(outbox)} slots were not stored within {timeout_s:g} s")
            self._pump(0.1)
        self._raise_refusal()

    def sample(self, count: int, *, stacked: bool = True, timeout_s: float = 60.0) -> Batch:
        """Draw a batch as `Replay.sample`.

        Args:
            count: rows of the batch.
            stacked: as in `Replay.sample`.
            timeout_s: longest wait for the batch, in seconds.

        Raises:
            TimeoutError: no batch came in time; the text has the server's reason.
            ReplayError: the server refuses the request.
        """
        requests = self._requests
        requests.choose(count, stacked=stacked)
        deadline_s = time.monotonic() + timeout_s
        requests.replenish()
        if not requests.batches:
            self._pump(0)

        while not requests.batches:
            self._raise_refusal()
            if time.monotonic() >= deadline_s:
                raise TimeoutError(
                    f"no batch of {count} came within {timeout_s:g} s from {self._link.address}: "
                    f"{requests.reason}"
                )
            self._pump(0.1)
            requests.replenish()
        return requests.batches.popleft()

    def update_priorities(self, keys: npt.ArrayLike, priorities: npt.ArrayLike) -> None:
        """Send new priorities as `Replay.update_priorities`.

        They are not confirmed, and lost if the connection breaks.
        """
        row_keys, values = check_priorities(np.ascontiguousarray(keys), priorities)
        for start in range(0, len(row_keys), UPDATE_ROWS):
            rows = slice(start, start + UPDATE_ROWS)
            frames = [row_keys[rows].data.cast("B"), values[rows].data.cast("B")]
            self._link.send(MessageKind.UPDATE, frames=frames)

    def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Ask the server for its counts.

        Returns:
            Counts as of `Replay.stats`, the server's counters ("server") and this client's
            ("client").

        Raises:
            TimeoutError: the server has not answered within ``timeout_s`` seconds.
        """
        self._stats = None
        deadline_s = time.monotonic() + timeout_s
        next_request_s = 0.0
        while self._stats is None:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise TimeoutError(f"{self._link.address} did not answer within {timeout_s:g} s")

            if now_s >= next_request_s:
                self._link.send(MessageKind.ASK_STATS)
                next_request_s = now_s + REPEAT_S
            self._pump(0.05)
        return self._stats | {"client": {"lost": self.lost}}

    def close(self) -> None:
        """Disconnect. Steps added since the last `flush` may be lost."""
        if self._link.closed:
            return
        if self._outbox is not None:
            self._outbox.steps.writer.flush()
            self._outbox.ship()
            self._outbox.close()
        self._link.close()

    def __enter__(self) -> ReplayClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ------------------------------------------------------------------------- messages

    def _joined_outbox(self) -> Outbox:
        assert self._outbox is not None, "a client that has not joined is not given out"
        return self._outbox

    def _join(self) -> None:
        """Wait for the server's answer to joining. Raises ReplayError without one in time."""
        deadline_s = time.monotonic() + self._patience_s
        next_request_s = 0.0
        while not self._link.run_id:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise ReplayError(
                    f"no replay server answers at {self._link.address} within "
                    f"{self._patience_s:g} s; start one with `penstock replay serve`, and check "
                    "the address and the keys"
                )

            if now_s >= next_request_s:
                is_sent = self._send_join()
                next_request_s = now_s + (REPEAT_S if is_sent else 0.05)
            self._pump(0.05)
            self._raise_refusal()

    def _send_join(self) -> bool:
        """Ask to join; returns False if no server takes messages now."""
        meta = {"version": REPLAY_VERSION, "token": self._token}
        return self._link.send(MessageKind.JOIN, meta)

    def _pump(self, timeout_s: float) -> None:
        """Send what is due and handle messages, waiting up to ``timeout_s`` seconds for one."""
        if self._outbox is not None:
            self._outbox.ship()
        self._link.receive(timeout_s, self._on_message)

    def _on_message(self, message: wire.Message) -> None:
        """Handle a message of the server; other runs of it are heard only about joining."""
        head = message.head
        meta = wire.verify(message)
        if head.kind == MessageKind.SPEC:
            self._on_spec(head, meta)
        elif head.kind == MessageKind.REFUSE:
            self._on_refuse(head, meta)
        elif head.kind == MessageKind.WHO:
            self._send_join()
        elif head.run_id == self._link.run_id:
            self._on_answer(message, meta)

    def _on_answer(self, message: wire.Message, meta: Any) -> None:
        """Handle the server's answer to a slot or a request of this client."""
        head = message.head
        if head.kind == MessageKind.BATCH:
            self._requests.on_batches(head.sequence, meta, message.frames)
        elif head.kind == MessageKind.STORED:
            self._joined_outbox().on_stored(head.sequence)
        elif head.kind == MessageKind.WAIT:
            self._requests.reason = printable(str(meta["reason"]))
        elif head.kind == MessageKind.STATS:
            self._stats = dict(meta)

    def _on_spec(self, head: Header, meta: dict[str, Any]) -> None:
        """Handle the server's answer to joining.

        It tells the spec, up to which slot the server has this client's stream, and how many
        answers with batches it has sent on this connection.

        Raises:
            ReplayError: the server is of another release, or has another buffer than before.
        """
        if meta["version"] != REPLAY_VERSION:
            version = printable(str(meta["version"]))
            raise ReplayError(
                f"the server at {self._link.address} speaks version {version} of the replay "
                f"protocol and this client {REPLAY_VERSION}; use the same release of Penstock"
            )
        spec = read_spec(meta["spec"])
        token = str(meta["token"])
        next_sequence = int(meta["next"])
        server_rows = int(meta["kept"])
        sent_answers = int(meta["sent"])

        if self._outbox is None:
            self._outbox = Outbox(
                spec,
                meta,
                codec="none" if is_local(self._link.address) else "auto",
                send=self._link.send_parts,
                pump=self._pump,
            )
            self.spec = spec
            self._requests.row_nbytes = max(1, int(meta["row_nbytes"]))
        elif spec != self.spec:
            raise ReplayError(
                f"another buffer listens at {self._link.address} now "
                f"({printable(self.spec.difference(spec, 'before', 'now'))}); make a new client"
            )

        previous_run_id = self._link.run_id
        self._link.on_joined(head.run_id, spec.hash)
        self._token = token
        self._requests.on_joined(sent_answers)

        # A server that was restarted may have fewer rows than were known to be stored.
        previous_rows = self._outbox.resume(head.run_id, next_sequence, server_rows)
        if previous_run_id not in (0, head.run_id):
            self.lost += max(0, previous_rows - server_rows)

    def _on_refuse(self, head: Header, meta: dict[str, Any]) -> None:
        """Handle the refusal of a slot, of a request for batches, or of joining."""
        self._refusal = printable(str(meta["error"]))
        if meta.get("kind") == MessageKind.SLOT:
            self._joined_outbox().on_refused(head.sequence)
        else:
            self._requests.forget_pending()

    def _raise_refusal(self) -> None:
        """Raise the server's refusal, if one has come since the last call."""
        text, self._refusal = self._refusal, None
        if text is not None:
            raise ReplayError(text)


class ServerLink:
    """The connection to a replay server, and what every message to it carries."""

    def __init__(self, address: str, curve: str | Path | None) -> None:
        self.address = address

        self.run_id = 0
        """Of the server's process; 0 until it has answered."""

        self._spec_hash = 0
        """Of the server's slots; 0 until it has answered."""

        self._context: zmq.Context[Socket] = zmq.Context()
        try:
            keys = load_actor(Path(curve)) if curve else None
            self._socket = dealer(self._context, address, keys)
        except BaseException:
            self._context.term()
            raise

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def on_joined(self, run_id: int, spec_hash: int) -> None:
        """Note which run of the server has accepted this client, and the hash of its spec."""
        self.run_id = run_id
        self._spec_hash = spec_hash

    def send(
        self,
        kind: MessageKind,
        meta: Any = None,
        number: int = 0,
        frames: Sequence[Buffer] = (),
    ) -> bool:
        """Send a message, without waiting; returns False if no server takes it now."""
        head = Header(kind, spec_hash=self._spec_hash, run_id=self.run_id, sequence=number)
        return self.send_parts(wire.encode(head, meta, frames))

    def send_parts(self, parts: wire.Parts) -> bool:
        """Send an encoded message, without waiting; returns False if no server takes it now."""
        return send_now(self._socket, parts)

    def receive(self, timeout_s: float, handle: Callable[[wire.Message], None]) -> None:
        """Handle the messages that have come, after waiting up to ``timeout_s`` seconds for one.

        Raises:
            ReplayError: the server speaks another version of the wire format.
        """
        if timeout_s > 0:
            self._socket.poll(max(1, round(timeout_s * 1000)))

        handle_messages(
            self._socket,
            handle,
            server=f"the server at {self.address}",
            client="this client",
            error=ReplayError,
        )

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class _SentRequest(NamedTuple):
    """A request for batches that is not answered yet."""

    batches: int
    """The number of batches that it asks for."""
    sent_s: float
    """When it was last sent."""


class BatchRequests:
    """Batches of one kind that are requested before they are needed, and those that have come."""

    def __init__(self, link: ServerLink, prefetch: int) -> None:
        self._link = link
        self._prefetch = prefetch

        self.row_nbytes = 1
        """Bytes of one row of a batch, as the server tells."""

        self.batches: deque[Batch] = deque()
        """Batches that have come, the oldest first."""

        self.reason = "it has not replied"
        """Why the server sends no batch."""

        self._rows = 0
        self._stacked = True
        """The kind of the batches: how many rows, and whether frames are stacked."""

        self._ahead = 1
        """Batches that are to be here or on their way."""

        self._pending: dict[int, _SentRequest] = {}
        """Requests by number."""

        self._last_number = 0

        self._read = 0
        """Answers that were read on this connection."""

        self._reported_read = 0
        """`_read` as the server knows it."""

    def choose(self, rows: int, *, stacked: bool) -> None:
        """Set the kind of batches from now on; those of another kind are dropped."""
        if (self._rows, self._stacked) == (rows, stacked):
            return
        self._rows = rows
        self._stacked = stacked
        batches_that_fit = AHEAD_NBYTES // (max(1, rows) * self.row_nbytes)
        self._ahead = max(1, min(self._prefetch, batches_that_fit))
        self.batches.clear()
        self._pending.clear()

    def replenish(self) -> None:
        """Keep batches on their way, requesting a quarter of them at a time."""
        now_s = time.monotonic()
        for number, request in self._pending.items():
            if now_s - request.sent_s > REPEAT_S:
                self._pending[number] = request._replace(sent_s=now_s)
                self.send(number, request.batches)

        coming = sum(request.batches for request in self._pending.values())
        missing = self._ahead - len(self.batches) - coming
        if missing >= max(1, self._ahead // 4):
            self._last_number += 1
            self._pending[self._last_number] = _SentRequest(missing, now_s)
            self.send(self._last_number, missing)
        elif self._read != self._reported_read:
            self.send(self._last_number, 0)

    def on_batches(self, number: int, meta: Any, frames: Sequence[Buffer]) -> None:
        """Take in the answer to a request; those of a request that was forgotten are dropped."""
        self._read += 1
        if self._pending.pop(number, None) is not None:
            shape = read_shape(meta)
            self.batches.extend(unpack(shape, frame) for frame in frames)

    def on_joined(self, sent_answers: int) -> None:
        """Begin anew on a connection on which the server has sent ``sent_answers`` answers."""
        self._read = sent_answers
        self._pending.clear()

    def forget_pending(self) -> None:
        """Forget the requests that are not answered, which the server has refused."""
        self._pending.clear()

    def send(self, number: int, count: int) -> None:
        """Request ``count`` batches and report what was read; 0 batches only report."""
        meta = {"batch": self._rows, "count": count, "stacked": self._stacked, "read": self._read}
        if self._link.send(MessageKind.SAMPLE, meta, number):
            self._reported_read = self._read

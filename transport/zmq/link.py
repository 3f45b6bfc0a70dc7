"""A `Link` over ZeroMQ: a slot of its own, encoded into one message when published.

Weights come from the relay of this host where there is one, else over the same connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock.configs.schema import Config
from penstock.core.interfaces import LearnerGoneError, LearnerInfo, Link
from penstock.core.params import POLICY_ID, Float32, Stamp
from penstock.core.role import RoleContext, relay_socket
from penstock.core.specs import SlotSpec
from penstock.profiling.ledger import Part
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import Geometry, Slot
from penstock.transport.wire import SlotEncoder, to_float32
from penstock.transport.zmq.client import Client
from penstock.transport.zmq.sockets import boot_id

LOOK_S = 0.001  # between two looks at the weights that a grant asks for


class ZmqLink:
    """A joined actor."""

    fills_store = False

    def __init__(
        self,
        ctx: RoleContext,
        address: str,
        spec: SlotSpec | None,
        want: int,
        *,
        actor: int,
        relay_path: Path | None = None,
        codec: str = "auto",
        patience_s: float = 60.0,
    ) -> None:
        """Join the learner, waiting for it.

        Args:
            ctx: of this role.
            address: of the connector.
            spec: of the slots; None takes the learner's.
            want: grants to hold at a time.
            actor: unique among all actors of the run.
            relay_path: the Unix socket of this host's relay; None pulls weights over ``address``.
            codec: compression of slots.
            patience_s: longest silence of the connector, in seconds; then calls raise
                LearnerGoneError.

        Raises:
            UserError: the learner refuses.
            LearnerGoneError: this role is asked to leave meanwhile.
        """
        self._ctx = ctx
        self._relay: ShmLink | None = None
        self._relay_path = relay_path
        self._read: Stamp | None = None  # the version of the weights read last
        self._client = Client(
            ctx, address, actor=actor, spec=spec, want=want, patience_s=patience_s
        )
        try:
            self._client.join()
            self.welcome = self._client.welcome
            self._encoder = SlotEncoder(self.welcome.spec, codec)
            geometry = Geometry(self.welcome.spec, slots=1, lanes=0)
            self._slot = geometry.slot(Arena.private(geometry.nbytes), 0)
        except BaseException:
            self._client.close()
            raise

    @contextmanager
    def slot(self, timeout_s: float) -> Iterator[Slot | None]:
        """Lend a slot to fill, or None when none was granted in time.

        Leaving the block sends it.
        """
        deadline_s = time.monotonic() + timeout_s
        if not self._client.wait_turn(timeout_s) or not self._wait_for_weights(deadline_s):
            yield None
            return
        yield self._slot
        self._send(self._slot)

    def _wait_for_weights(self, deadline_s: float) -> bool:
        """Whether `read_weights` returns weights that may fill the granted slot; waits for them."""
        client = self._client
        while client.oldest is not None and not self._has(client.oldest):
            if time.monotonic() >= deadline_s:
                return False
            client.beat()
            client.pump(LOOK_S)
        return client.next < client.limit  # else the grant was withdrawn meanwhile

    def _has(self, oldest: Stamp) -> bool:
        """Whether weights of at least this version were read, or can be read now."""
        if self._relay_path is not None:
            found = self._relay.board.stamp if self._relay is not None else None
        else:
            found = self._client.arrived() or self._read
            self._client.ask_weights(found)
        return found is not None and found >= oldest

    def beat(self) -> None:
        self._client.beat()

    def _send(self, slot: Slot) -> None:
        """Deliver a filled slot, also if the connector is replaced meanwhile."""
        ledger = self._ctx.ledger
        ledger.switch(Part.COMPRESS)
        parts = self._encoder.encode(slot.header, slot.payload, self.welcome.run_id)
        ledger.switch(Part.SEND)
        self._client.next = int(slot.header["sequence"])
        self._client.renew()
        produced_steps = int(slot.header["produced_steps"])
        while not (self._client.wait_turn(1.0) and self._client.send_slot(parts, produced_steps)):
            if self._ctx.leaving():
                raise LearnerGoneError("left before the last slot could be sent")

    def read_weights(
        self, out: Float32, newer_than: Stamp | None, policy_id: int = POLICY_ID
    ) -> Stamp | None:
        """Read weights as `Link.read_weights`; each call requests the next ones."""
        if self._relay_path is not None:
            return self._read_relay(self._relay_path, out, newer_than, policy_id)
        self._client.pump(0)
        fresh = self._client.take_weights(policy_id)
        if fresh is None or fresh[0] == newer_than:
            self._client.ask_weights(newer_than, policy_id)
            return None
        self._read = stamp = fresh[0]
        np.copyto(out, to_float32(fresh[1]))
        self._client.ask_weights(stamp, policy_id)
        return stamp

    def _read_relay(
        self, path: Path, out: Float32, newer_than: Stamp | None, policy_id: int
    ) -> Stamp | None:
        if self._relay is not None and self._relay.learner_gone():
            self._relay.close()
            self._relay = None
        if self._relay is None:
            try:
                self._relay = ShmLink(path, None, want=0)
            except (OSError, LearnerGoneError):
                return None  # it is being started or restarted
        if self._relay.welcome.run_id != self.welcome.run_id:
            return None  # it is about to follow the learner
        return self._relay.read_weights(out, newer_than, policy_id)

    def close(self) -> None:
        """Leave; sent slots are still delivered."""
        self._client.close()
        if self._relay is not None:
            self._relay.close()


class ZmqTransport:
    """Joins by a connector, at an address ``tcp://`` or ``ipc://``."""

    def ask(self, ctx: RoleContext, address: str) -> LearnerInfo:
        client = Client(ctx, address)
        try:
            client.join()
            here = client.boot_id == boot_id()
            path = str(client.unix_path) if here else ""
            return LearnerInfo(client.welcome.config, path, client.release)
        finally:
            client.close()

    def connect(
        self, ctx: RoleContext, address: str, config: Config, spec: SlotSpec, actor: int
    ) -> Link:
        return ZmqLink(
            ctx,
            address,
            spec,
            config.transport.slots,
            actor=actor,
            relay_path=relay_socket(ctx.runtime_dir, ctx.learner),
            codec=config.transport.codec,
            patience_s=config.run.hang_timeout_s,
        )

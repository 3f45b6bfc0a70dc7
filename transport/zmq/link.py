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

# The interval between two looks for the weights that a grant asks for.
POLL_S = 0.001


class ZmqLink:
    """A joined actor: implements `penstock.core.interfaces.Link`."""

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
        self._relay_path = relay_path
        self._relay: ShmLink | None = None  # attached while it serves this run
        self._last_read: Stamp | None = None  # the version of the run's weights read last
        self._client = Client(
            ctx, address, actor=actor, spec=spec, want=want, patience_s=patience_s
        )
        try:
            self._client.join()
            self.welcome = self._client.welcome

            # There is one slot, which is encoded before it is filled again.
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

    def beat(self) -> None:
        """Send a heartbeat, at most once a second. Raises LearnerGoneError."""
        self._client.beat()

    def read_weights(
        self, out: Float32, newer_than: Stamp | None, policy_id: int = POLICY_ID
    ) -> Stamp | None:
        """Read weights as `Link.read_weights`; each call requests the next ones."""
        if self._relay_path is not None:
            return self._read_relay(self._relay_path, out, newer_than, policy_id)

        client = self._client
        client.pump(0)
        weights = client.take_weights(policy_id)
        if weights is None or weights.stamp == newer_than:
            client.ask_weights(newer_than, policy_id)
            return None
        if policy_id == POLICY_ID:
            self._last_read = weights.stamp
        np.copyto(out, to_float32(weights.values))
        client.ask_weights(weights.stamp, policy_id)
        return weights.stamp

    def close(self) -> None:
        """Leave; sent slots are still delivered."""
        self._client.close()
        if self._relay is not None:
            self._relay.close()

    def _wait_for_weights(self, deadline_s: float) -> bool:
        """Wait for weights that may fill the granted slot.

        Returns:
            Whether `read_weights` returns them, and the slot is still granted.
        """
        client = self._client
        stream = client.stream
        while stream.oldest is not None and not self._has_weights(stream.oldest):
            if time.monotonic() >= deadline_s:
                return False
            client.beat()
            client.pump(POLL_S)
        return stream.granted

    def _has_weights(self, oldest: Stamp) -> bool:
        """Whether weights of at least the version ``oldest`` were read, or can be read now."""
        if self._relay_path is not None:
            stamp = self._relay.boards[POLICY_ID].stamp if self._relay is not None else None
        else:
            stamp = self._client.received_stamp() or self._last_read
            self._client.ask_weights(stamp)
        return stamp is not None and stamp >= oldest

    def _send(self, slot: Slot) -> None:
        """Deliver a filled slot, also if the connector is replaced meanwhile.

        Raises LearnerGoneError where this role is asked to leave before.
        """
        ledger = self._ctx.ledger
        ledger.switch(Part.COMPRESS)
        parts = self._encoder.encode(slot.header, slot.payload, self.welcome.run_id)

        ledger.switch(Part.SEND)
        client = self._client
        client.stream.next = int(slot.header["sequence"])
        client.renew()
        produced_steps = int(slot.header["produced_steps"])
        while not (client.wait_turn(1.0) and client.send_slot(parts, produced_steps)):
            if self._ctx.leaving():
                raise LearnerGoneError("left before the last slot could be sent")

    def _read_relay(
        self, path: Path, out: Float32, newer_than: Stamp | None, policy_id: int
    ) -> Stamp | None:
        """Read weights from the relay at ``path``, attaching to it again after its restart.

        Returns None without a relay of this run.
        """
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


class ZmqTransport:
    """Joins by a connector, at an address ``tcp://`` or ``ipc://``."""

    def ask(self, ctx: RoleContext, address: str) -> LearnerInfo:
        """Fetch the description of the learner at ``address``, as `Transport.ask`."""
        client = Client(ctx, address)
        try:
            client.join()
            learner = client.sighting
            same_host = learner.boot_id == boot_id()
            return LearnerInfo(
                client.welcome.config,
                unix_path=str(learner.unix_path) if same_host else "",
                release=learner.release,
            )
        finally:
            client.close()

    def connect(
        self, ctx: RoleContext, address: str, config: Config, spec: SlotSpec, actor: int
    ) -> Link:
        """Join the learner at ``address`` as ``actor``, as `Transport.connect`."""
        return ZmqLink(
            ctx,
            address,
            spec,
            want=config.transport.slots,
            actor=actor,
            relay_path=relay_socket(ctx.runtime_dir, ctx.learner),
            codec=config.transport.codec,
            patience_s=config.run.hang_timeout_s,
        )

"""A connector, a learner behind it and an honest actor, in one thread and without a connection."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from penstock.algos import samples
from penstock.algos.samples import network_shape, slot_spec
from penstock.algos.slots import UnrollSummary
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.configs.sections import StopConfig
from penstock.core.interfaces import Welcome
from penstock.core.params import Stamp
from penstock.envs import probe
from penstock.learner.progress import Progress
from penstock.learner.role import StreamTracker
from penstock.learner.sources.staging import StagingBatch
from penstock.profiling.ledger import TimeLedger
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting, SlotQueue
from penstock.transport import wire
from penstock.transport.grants import ActorStream
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import SlotStore, SlotWriter
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq import receiver as receiver_module
from penstock.transport.zmq.receiver import Receiver
from penstock.transport.zmq.relay_tree import RelayTree
from penstock.transport.zmq.sockets import SENT, IsReleased

RUN_ID = 0x1234_5678_9ABC_DEF0
SLOTS = 8
VERSION = 20  # of the learner
CHAIRS = 1  # of the learner
HONEST = 7  # the honest actor's id
PEER = b"honest"

CONFIG: Config = resolve("CartPole-v1", ["actors.envs=3", "actors.unroll=4"])


INFO = probe(CONFIG.env)
SPEC, LAYOUT = slot_spec(CONFIG, INFO), network_shape(CONFIG, INFO).layout
MAX_STEPS = SPEC.unroll * SPEC.envs


class Clock:
    """Stands for the module `time` in a module that reads it; `ahead_s` is added."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


class LocalLink(ShmLink):
    """A connector's link to a store and boards of the same process."""

    def __init__(self, welcome: Welcome, store: SlotStore, boards: list[WeightsBoard]) -> None:
        self.welcome, self.boards = welcome, boards
        lane = store.open_lane(0)
        self.writer: SlotWriter | None = SlotWriter(
            store.arena, store.geometry, lane, store.lane_event(lane), store.filled_event
        )

    def learner_gone(self) -> bool:
        return False

    def close(self) -> None:
        """Store and board are the caller's."""


class LocalReceiver(Receiver):
    """Writes down what it says instead of sending it."""

    said: list[tuple[bytes, wire.Message]]

    def _send(
        self, peer: bytes, parts: Sequence[wire.Buffer], *, tracked: bool = False
    ) -> tuple[int, IsReleased]:
        self.said.append((peer, wire.decode(parts)))
        return SENT, lambda: True

    def _connected(self, stream: ActorStream) -> bool:
        return True


def sound_payload(sequence: int) -> list[npt.NDArray[np.uint8]]:
    """A slot that a sound actor could have filled, and that tells its sequence."""
    payload = SPEC.zeros()
    columns = SPEC.views(payload)
    columns["obs"][...].reshape(-1).view(np.uint8)[...] = sequence % 40
    columns["alive"][...] = True
    columns["behaviour_logp"][...] = -0.7
    columns["episode_return"][...] = sequence
    columns["policy_version"][...] = VERSION
    return payload


def slot_parts(
    actor: int, sequence: int, produced_steps: int, *, steps: int = MAX_STEPS, **fields: Any
) -> tuple[Header, list[Any], list[bytes]]:
    """Head, meta and frames of a sound SLOT."""
    frames = [block.tobytes() for block in sound_payload(sequence)]
    head = Header(
        MessageKind.SLOT,
        spec_hash=SPEC.hash,
        run_id=RUN_ID,
        actor=actor,
        sequence=sequence,
        version=VERSION,
        steps=steps,
        produced_steps=produced_steps,
        raw_nbytes=SPEC.payload_nbytes,
        duration_s=0.5,
    )
    return head._replace(**fields), [["raw", len(frame)] for frame in frames], frames


HOST = "10.77.0.9"  # of all peers


class World:
    """Call `handle` with a peer's message, `turn` after it, and `check` whenever you like."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._patched = patch.object(receiver_module, "time", self.clock)
        self._patched.start()
        self.store = SlotStore(SPEC, SLOTS, lanes=4, shared=False)
        self.boards = [
            WeightsBoard.create(LAYOUT.size, shared=False, policy_id=policy_id)
            for policy_id in range(1 + CHAIRS)
        ]
        for policy_id, board in enumerate(self.boards):
            board.publish(np.zeros(LAYOUT.size, np.float32), Stamp(1, VERSION), policy_id)
        config = CONFIG.model_dump(mode="json")
        welcome = Welcome(RUN_ID, 1, SPEC, LAYOUT, config, chairs=CHAIRS)
        self.receiver = LocalReceiver(
            LocalLink(welcome, self.store, self.boards),
            "inproc://connector",
            Path("/nonexistent"),
            process=samples.make_receive(CONFIG.algo, INFO),
            silence_s=60.0,
            tree=RelayTree(LAYOUT.size, fanout=1, min_relays=2, min_nbytes=0),
        )
        self.receiver.said = []
        self.accounting = Accounting(MAX_STEPS)
        self.others = StreamTracker(self.accounting)
        self._queue = SlotQueue(self.store, self.accounting, max_policy_lag=1000)
        self._batch = StagingBatch(SPEC, 1, torch.device("cpu"), store=self.store)
        self._progress = Progress(StopConfig(), 1)
        self._ledger = TimeLedger()
        self.page, descriptor = StatusPage.create()
        os.close(descriptor)
        self.taken: list[tuple[int, int, int, dict[str, npt.NDArray[Any]]]] = []
        self.hostile_messages = 0
        self.sent_steps = 0  # by the honest actor
        self.next = self.limit = 0  # of the honest actor
        self.trained = 0

    def handle(self, peer: bytes, parts: list[bytes]) -> None:
        self.receiver.handle(peer, parts, host=HOST)
        self.hear()

    def hear(self) -> None:
        """The honest actor reads what it was sent."""
        for peer, message in self.receiver.said:
            if peer == PEER and message.head.kind in (MessageKind.GRANT, MessageKind.WELCOME):
                wire.verify(message)
                self.limit = max(self.limit, message.head.sequence)
        self.receiver.said.clear()

    def turn(self) -> None:
        """One turn of the connector, and one of the learner."""
        self.receiver.turn(0)
        self.hear()
        self.consume()
        self.store.lend()  # as `ShmHost.poll` does

    def consume(self) -> None:
        """As the learner's threads do with a slot: queue, batch, counters, metrics."""
        progress = self._progress
        while slots := self._queue.take(1, VERSION):
            header = slots[0].header
            self._batch.gather(slots)
            self._queue.release(slots)
            arrays = {name: array.copy() for name, array in self._batch.arrays.items()}
            self.taken.append(
                (int(header["actor"]), int(header["sequence"]), self._batch.steps, arrays)
            )
            progress.start(self._batch.started_s)
            progress.count_ages(self._batch.headers)
            progress.count_unrolls(UnrollSummary.of(arrays), self._batch.steps)
            progress.count_lag(UnrollSummary.of(arrays), 1)
            self.accounting.trained += self._batch.steps
        progress.count_env_steps(self.accounting)
        growth = progress.growth()
        progress.commit(growth, growth)
        self.page.produced_steps = self.accounting.produced
        self.page.trained_steps = self.accounting.trained

    def report(self) -> None:
        """What the connector tells the learner through the supervisor, as JSON."""
        ended = self.receiver.grants.ended
        streams = [stream.final_counters() for stream in ended]
        ended.clear()
        report = {"kind": "connector", "index": 0, "incarnation": 0, **self.receiver.figures()}
        said = json.loads(json.dumps(report | {"streams": streams}))
        self.consume()
        self.others.handle_messages([said])
        self.others.close_streams(everything_arrived=True)
        self.consume()

    def check(self) -> None:
        """What holds after every message."""
        grants = self.receiver.grants
        outstanding = [stream.outstanding for stream in grants.streams.values()]
        assert min(outstanding, default=0) >= 0
        assert sum(outstanding) == grants.outstanding <= SLOTS
        in_flight = self._queue.in_flight_steps()
        self._queue.collect()
        assert self.accounting.balance(in_flight) == 0, self.accounting.to_dict(in_flight)
        # A message uses at most all grants there are.
        most = (self.hostile_messages + 1) * SLOTS * MAX_STEPS
        assert 0 <= self.accounting.produced <= self.sent_steps + most
        metrics = self._progress.interval(self._ledger)
        json.dumps(metrics, allow_nan=False)
        assert metrics["time_s"] < 3600
        for actor, sequence, steps, arrays in self.taken:
            assert 0 <= steps <= MAX_STEPS
            assert np.count_nonzero(arrays["alive"]) == steps
            if actor == HONEST:
                columns = SPEC.views(sound_payload(sequence))
                for name, array in arrays.items():
                    np.testing.assert_array_equal(array, columns[name], name)
                assert steps == MAX_STEPS
        self.taken.clear()

    # ---------------------------------------------------------------------- the honest actor

    def hello(self) -> None:
        head = Header(
            MessageKind.HELLO,
            actor=HONEST,
            sequence=self.next,
            produced_steps=self.next * MAX_STEPS,
        )
        meta = {"spec": SPEC.to_dict(), "want": 2}
        self.handle(PEER, [bytes(p) for p in wire.encode(head, meta)])

    def beat(self) -> None:
        head = Header(
            MessageKind.BEAT, run_id=RUN_ID, actor=HONEST, sequence=self.next,
            produced_steps=self.next * MAX_STEPS,
        )  # fmt: skip
        self.handle(PEER, [bytes(p) for p in wire.encode(head)])

    def send(self) -> bool:
        """Send the next slot if it is granted; it must arrive."""
        if self.next >= self.limit:
            return False
        head, meta, frames = slot_parts(HONEST, self.next, (self.next + 1) * MAX_STEPS)
        before = self.receiver.rejected.copy()
        self.handle(PEER, [bytes(p) for p in wire.encode(head, meta, frames)])
        assert self.receiver.rejected == before
        self.next += 1
        self.sent_steps += MAX_STEPS
        self.consume()
        assert any(a == HONEST and s == self.next - 1 for a, s, _, _ in self.taken)
        return True

    def settle(self) -> None:
        """The attackers fall silent; the honest actor still gets a slot through; all adds up."""
        self.clock.ahead_s += 100.0
        self.turn()
        self.report()
        self.limit = self.next
        self.hello()
        for _ in range(10):
            self.turn()
            if self.send():
                break
        else:
            raise AssertionError("the honest actor is granted nothing any more")
        self.check()
        self.receiver.grants.end_all()
        self.report()
        self.check()
        assert self.page.produced_steps == self.accounting.produced

    def close(self) -> None:
        self._patched.stop()
        self.receiver.close()
        self.store.close()
        for board in self.boards:
            board.close()

    def begin(self) -> None:
        """The honest actor joins."""
        self.hello()
        for _ in range(2):  # slots are lent, and granted
            self.turn()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

"""What adding a transport takes: a file with link, connector and transport, and one registration.

`stream` sends slots over a Unix stream socket: an actor asks, the connector answers each question.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from contract.test_transports import CHAIRS, CONTRACT, World
from penstock.actors import role as actor
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.reference import reference
from penstock.configs.schema import Config
from penstock.configs.transports import TRANSPORTS, TransportSpec
from penstock.core.interfaces import (
    Connector,
    LearnerGoneError,
    LearnerInfo,
    Link,
    SlotProcessor,
    Transport,
    UnknownPolicyError,
    Welcome,
)
from penstock.core.params import Float32, ParamLayout, Stamp
from penstock.core.role import EXIT_REJOIN, RoleContext, learner_socket
from penstock.core.specs import HEADER, SlotSpec
from penstock.launch import connector, topology
from penstock.learner import role as learner_role
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.host import check_spec
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import Geometry, Slot
from transport_world import SPEC, context, in_thread, learner, reports
from waiting import wait_until

LENGTHS = struct.Struct("<II")  # of a message: its msgpack part, and the bytes after it
TICK_S = 0.005
MOST_NBYTES = 1 << 24
ANSWER_S = 10.0


def put(peer: socket.socket, said: Any, content: bytes = b"") -> None:
    packed = msgpack.packb(said)
    peer.sendall(LENGTHS.pack(len(packed), len(content)) + packed + content)


def get(peer: socket.socket) -> tuple[Any, bytes]:
    """Raises EOFError where the other side has left, ValueError for what is no message."""
    head, content = LENGTHS.unpack(exactly(peer, LENGTHS.size))
    if max(head, content) > MOST_NBYTES:
        raise ValueError(f"{head} and {content} bytes")
    return msgpack.unpackb(exactly(peer, head)), exactly(peer, content)


def exactly(peer: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        found += (more := peer.recv(nbytes - len(found)))
        if not more:
            raise EOFError
    return bytes(found)


class StreamLink:
    """An actor's connection; each question has one answer."""

    fills_store = False

    def __init__(self, path: str, spec: SlotSpec | None, want: int) -> None:
        """Raises OSError while nobody listens."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(ANSWER_S)
        try:
            self._socket.connect(path)
            said, _ = self._ask({"join": spec and spec.to_dict(), "want": want})
        except BaseException:
            self._socket.close()
            raise
        self.welcome = Welcome(
            said["run_id"],
            said["generation"],
            SlotSpec.from_dict(said["spec"]),
            ParamLayout.from_list(said["layout"]),
            said["config"],
            said["spaces"],
            said["chairs"],
        )
        geometry = Geometry(self.welcome.spec, slots=1, lanes=0)
        self._slot = geometry.slot(Arena.private(geometry.nbytes), 0)
        self._lent = False

    @contextmanager
    def slot(self, timeout_s: float) -> Iterator[Slot | None]:
        deadline_s = time.monotonic() + timeout_s
        while not self._lent and not self._ask({"lend": True})[0]:
            if time.monotonic() >= deadline_s:
                yield None
                return
            time.sleep(TICK_S)
        self._lent = True  # also after an exception within the block
        yield self._slot
        header = self._slot.header.tobytes()
        self._ask({"slot": header}, b"".join(raw.tobytes() for raw in self._slot.payload))
        self._lent = False

    def beat(self) -> None:
        """What was lent stays lent while the connection is open."""

    def read_weights(
        self, out: Float32, newer_than: Stamp | None, policy_id: int = 0
    ) -> Stamp | None:
        stamp, weights = self._ask({"weights": newer_than, "policy_id": policy_id})
        if stamp is None:
            return None
        out[:] = np.frombuffer(weights, np.float32)
        return Stamp(*stamp)

    def close(self) -> None:
        self._socket.close()

    def _ask(self, question: Any, content: bytes = b"") -> tuple[Any, bytes]:
        try:
            put(self._socket, question, content)
            said, answered = get(self._socket)
        except (EOFError, OSError) as error:
            raise LearnerGoneError("the connector has left") from error
        if "error" in said:
            raise UserError(said["error"])
        if "unknown_policy" in said:
            raise UnknownPolicyError(said["unknown_policy"])
        return said["answer"], answered


class StreamConnector:
    """The learner's side: one thread, one lane of the store, one slot lent to a peer at a time."""

    def __init__(self, path: str, link: ShmLink, process: SlotProcessor) -> None:
        assert link.writer is not None
        self._link, self._writer, self._process = link, link.writer, process
        self._lent: dict[socket.socket, bool] = {}
        self._want: dict[socket.socket, int] = {}
        self._weights = np.empty(link.welcome.layout.size, np.float32)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is self._listener:
                peer = self._listener.accept()[0]
                peer.settimeout(1.0)
                self._selector.register(peer, selectors.EVENT_READ)
                self._lent[peer] = False
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._serve(key.fileobj)

    def close(self) -> None:
        for each in (self._listener, *self._lent):
            each.close()
        self._selector.close()

    def _serve(self, peer: socket.socket) -> None:
        try:
            question, content = get(peer)
            put(peer, *self._answer(peer, question, content))
        except (EOFError, OSError, ValueError, TypeError, LookupError):
            self._selector.unregister(peer)  # it has left, or speaks another protocol
            peer.close()
            del self._lent[peer]
            self._want.pop(peer, None)
        if self._writer.want != (want := sum(self._want.values())):
            self._writer.want = want

    def _answer(self, peer: socket.socket, question: Any, content: bytes) -> tuple[Any, bytes]:
        if "join" in question:
            self._want[peer] = min(64, max(0, int(question["want"])))
            return self._join(question["join"]), b""
        if "weights" in question:
            have, policy_id = question["weights"], question["policy_id"]
            try:
                stamp = self._link.read_weights(
                    self._weights, None if have is None else Stamp(*have), policy_id
                )
            except UnknownPolicyError:
                return {"unknown_policy": policy_id}, b""
            return {"answer": stamp}, b"" if stamp is None else self._weights.tobytes()
        if "lend" in question:
            self._lent[peer] |= self._writer.available > sum(self._lent.values())
            return {"answer": self._lent[peer]}, b""
        self._store(question["slot"], content)
        self._lent[peer] = False
        return {"answer": True}, b""

    def _join(self, spec: Any) -> dict[str, Any]:
        try:
            check_spec(self._link.spec, spec)
        except UserError as error:
            return {"error": str(error)}
        welcome = self._link.welcome
        said: dict[str, Any] = {"run_id": welcome.run_id, "generation": welcome.generation}
        said |= {"spec": welcome.spec.to_dict(), "layout": welcome.layout.to_list()}
        said |= {"spaces": welcome.spaces, "chairs": welcome.chairs}
        return {"answer": said | {"config": welcome.config}}

    def _store(self, header: bytes, content: bytes) -> None:
        """A message that is not a slot of this spec raises, and nothing is published."""
        with self._writer.slot(0) as slot:
            if slot is None or len(content) != sum(raw.nbytes for raw in slot.payload):
                raise ValueError("no slot was lent, or another one is sent")
            slot.header[...] = np.frombuffer(header, HEADER)[0]
            start = 0
            for raw in slot.payload:
                raw[:] = np.frombuffer(content, np.uint8, raw.nbytes, start)
                start += raw.nbytes
            self._process(slot.columns)


def path_of(address: str) -> str:
    return address.removeprefix("ipc://")


def run(ctx: RoleContext, prepare: Callable[[Welcome], SlotProcessor]) -> None:
    """The connector's role."""
    assert ctx.address is not None
    link = ShmLink(learner_socket(ctx.runtime_dir, ctx.learner), None, want=0, lane=True)
    made = StreamConnector(path_of(ctx.address), link, prepare(link.welcome))
    ctx.report("ready")
    while not ctx.stopping() and not link.learner_gone():
        ctx.status.beat()
        made.turn()
    made.close()
    link.close()
    if not ctx.stopping():
        raise SystemExit(EXIT_REJOIN)


class StreamTransport:
    def ask(self, ctx: RoleContext, address: str) -> LearnerInfo:
        link = StreamLink(path_of(address), None, 0)
        link.close()
        return LearnerInfo(link.welcome.config)

    def connect(
        self, ctx: RoleContext, address: str, config: Config, spec: SlotSpec, actor: int
    ) -> Link:
        return StreamLink(path_of(address), spec, config.transport.slots)


STREAM = TransportSpec(
    "stream",
    "a Unix stream socket",
    f"{__name__}:StreamTransport",
    connector=f"{__name__}:run",
)
CONNECTOR: Connector = run  # held against the Protocols by mypy
TRANSPORT: Transport = StreamTransport()


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    TRANSPORTS.register(STREAM)
    yield
    TRANSPORTS.unregister(STREAM.name)


# ------------------------------------------------------------------------------------- the tests


def unprepared(welcome: Welcome) -> SlotProcessor:
    return lambda columns: None


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    path = f"{tmp_path}/stream"
    with ExitStack() as links, ExitStack() as far_side:
        side = far_side.enter_context(learner(tmp_path, chairs=CHAIRS))
        ctx = context(tmp_path, "connector", address=f"ipc://{path}")
        far_side.enter_context(in_thread(ctx, lambda ctx: run(ctx, unprepared)))
        wait_until(lambda: bool(reports(ctx, "ready")))

        def join(want: int = 2, *, actor: int = 7, spec: SlotSpec = SPEC) -> Link:
            link = StreamLink(path, spec, want)
            links.callback(link.close)
            return link

        yield World(side, join, far_side.close)


@pytest.mark.parametrize("case", CONTRACT.values(), ids=CONTRACT)
def test_new_transport_passes_the_transport_contract(
    world: World, case: Callable[[World], None]
) -> None:
    case(world)


def chosen(*more: str) -> Config:
    return resolve("cartpole", ["transport.kind=stream", "actors.count=1", *more])


def test_config_accepts_the_new_transport(tmp_path: Path) -> None:
    config = chosen()
    (tmp_path / "again.yaml").write_text(dump(config))
    assert resolve(str(tmp_path / "again.yaml")) == config
    assert "`zmq` connectors and ZeroMQ, `stream` a Unix stream socket; `auto`" in reference()


def test_misspelled_transport_is_refused_with_the_choices() -> None:
    with pytest.raises(UserError, match=r"'zmq' or 'stream'; the default is 'auto'"):
        chosen("transport.kind=steam")


def test_run_on_the_new_transport_has_its_connector_and_no_relay(tmp_path: Path) -> None:
    specs = topology.train_roles(chosen(), tmp_path)
    assert topology.describe_roles(specs) == "learner, actor, connector, evaluator"
    assert {spec.address for spec in specs if spec.address} == {f"ipc://{tmp_path}/wire"}
    by_hand = topology.actor_roles(2, "ipc:///tmp/x", "stream")
    assert topology.describe_roles(by_hand) == "2 actors"


def test_registering_a_transport_name_or_default_twice_is_refused() -> None:
    for spec, message in (
        (TransportSpec("stream", ""), "stream exists already"),
        (TransportSpec("auto", ""), "auto exists already"),
        (TransportSpec("new", "", auto="other hosts"), "auto takes another one for other hosts"),
    ):
        with pytest.raises(ValueError, match=message):
            TRANSPORTS.register(spec)


def test_cartpole_is_trained_over_the_new_transport(tmp_path: Path) -> None:
    sizes = ("actors.envs=4", "actors.unroll=8", "learner.updates_per_batch=1")
    config = chosen(*sizes, "stop.learner_steps=8", "stop.return=null", "run.interval_s=0.2")
    address = f"ipc://{tmp_path}/wire"
    main = context(tmp_path, "learner", config=config, address=address)
    carries = context(tmp_path, "connector", config=config, address=address)
    plays = context(tmp_path, "actor", config=config, address=address)
    with in_thread(main, learner_role.run):
        wait_until(lambda: bool(reports(main, "ready")), 60)
        with in_thread(carries, connector.run), in_thread(plays, actor.run):
            wait_until(lambda: bool(reports(main, "stop")), 60)
    [stop], [final] = reports(main, "stop"), reports(main, "final")
    assert stop["reason"] == "learner_steps"
    counts = final["accounting"]
    assert counts["trained"] > 8 * 4 * 8 / 2  # the rest are rows that only reset
    gone = sum(counts["dropped"].values()) + sum(counts["lost"].values())
    assert counts["produced"] == counts["trained"] + gone + counts["in_flight"]

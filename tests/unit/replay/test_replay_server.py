"""A replay buffer over the network returns what was sent, with any other clients."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from penstock.replay.batch import Batch
from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.remote import ReplayClient, ReplayServer, service
from penstock.replay.remote.peers import ServiceLimits
from penstock.replay.remote.server import Snapshots
from penstock.replay.samplers import Prioritized, Uniform
from penstock.replay.sequences import Sequences
from penstock.replay.snapshot import MANIFEST
from penstock.transport import wire
from penstock.transport.wire import Header, MessageKind
from penstock.transport.zmq import keys
from penstock.transport.zmq.sockets import dealer
from waiting import wait_until

COLUMNS: dict[str, Any] = {
    "obs": {"camera": (np.uint8, (9, 9)), "arm": (np.float32, (3,))},
    "action": (np.int64, ()),
    "writer": (np.int64, ()),
}
ENVS = 2


def step(count: int, writer: int = 0) -> dict[str, Any]:
    """What can be told from the action, which is the number of the row."""
    rows = np.arange(ENVS) + ENVS * count
    return {
        "obs": observation(rows),
        "next_obs": observation(rows + ENVS),
        "action": rows,
        "writer": np.full(ENVS, writer),
        "reward": rows.astype(np.float32),
        "terminated": rows % 10 == 9,
        "truncated": np.zeros(ENVS, bool),
    }


def observation(rows: Any) -> dict[str, Any]:
    rows = np.asarray(rows)
    camera = np.broadcast_to((rows % 251)[:, None, None], (len(rows), 9, 9)).astype(np.uint8)
    return {"camera": camera, "arm": np.stack([rows, -rows, rows / 2], 1).astype(np.float32)}


def check(batch: Batch) -> None:
    rows = batch["action"]
    for name, value in (("obs", rows), ("next_obs", rows + ENVS)):
        expected = observation(value)
        np.testing.assert_array_equal(batch[name]["camera"], expected["camera"])
        np.testing.assert_array_equal(batch[name]["arm"], expected["arm"])
    np.testing.assert_array_equal(batch["reward"], rows.astype(np.float32))
    np.testing.assert_array_equal(batch["terminated"], rows % 10 == 9)
    np.testing.assert_allclose(batch["discount"], np.where(rows % 10 == 9, 0, 0.99), rtol=1e-6)


class Rig:
    """A server in a thread."""

    def __init__(self, bind: str = "tcp://127.0.0.1:*", **options: Any) -> None:
        sampler = Prioritized(1.0, 1.0) if options.pop("prioritized", False) else Uniform()
        given = ("curve", "insecure", "limits")
        server = {key: options.pop(key) for key in given if key in options}
        folder, every_s = options.pop("snapshot", None), options.pop("every_s", 1000.0)
        lines = options.pop("lines", [])
        options = {"unroll": 8, "capacity": 4000} | options
        self.replay = Replay(
            COLUMNS, envs=ENVS, shared=True, seed=0, sampler=sampler, writers=2, **options
        )
        if folder is not None:
            server["snapshots"] = Snapshots(self.replay, folder, every_s, lines.append)
            if (folder / MANIFEST).is_file():
                server["snapshots"].restore()
        self.server = ReplayServer(self.replay, bind, **server)
        self._stop = False
        self._thread = threading.Thread(
            target=self.server.run, args=(lambda: self._stop,), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        if self._stop:
            return
        self._stop = True
        self._thread.join()
        self.server.close()
        self.replay.close()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


# ----------------------------------------------------------------------------- there and back


def test_remote_rows_are_sampled_as_added(rig: Callable[..., Rig]) -> None:
    with ReplayClient(rig().server.address) as client:
        for count in range(100):
            client.add(**step(count))
        client.flush()
        assert client.stats()["stored"] == 100 * ENVS
        seen: set[int] = set()
        for _ in range(30):
            batch = client.sample(64)
            check(batch)
            seen |= set(batch.action.tolist())
        assert len(seen) > 150
        assert seen <= set(range(200))


def test_remote_batch_has_the_columns_of_a_local_one(rig: Callable[..., Rig]) -> None:
    r = rig()
    with ReplayClient(r.server.address, prefetch=1) as client:
        for count in range(20):
            client.add(**step(count))
        client.flush()
        far, near = client.sample(16), r.replay.sample(16)
    assert list(far) == list(near)
    for (name, a), (_, b) in zip(_leaves(far), _leaves(near), strict=True):
        assert (name, a.dtype, a.shape) == (name, b.dtype, b.shape)


def _leaves(batch: Any, name: str = "") -> list[tuple[str, Any]]:
    if not isinstance(batch, dict):
        return [(name, batch)]
    return [leaf for key, value in batch.items() for leaf in _leaves(value, f"{name}.{key}")]


def test_several_writers_and_readers_work_at_once(rig: Callable[..., Rig]) -> None:
    r = rig()
    errors: list[BaseException] = []

    def write(writer: int) -> None:
        with ReplayClient(r.server.address) as client:
            for count in range(200):
                client.add(**step(count, writer))
            client.flush()

    def read() -> None:
        with ReplayClient(r.server.address) as client:
            for _ in range(100):
                check(client.sample(32))

    def guarded(target: Callable[..., None], *arguments: int) -> None:
        try:
            target(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(write, k), daemon=True) for k in range(3)]
    threads += [threading.Thread(target=guarded, args=(read,), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(r.replay) == 3 * 200 * ENVS
    with r.replay.lock:
        rows = r.replay.gather.batch(np.flatnonzero(r.replay.table.valid), None)
    for writer in range(3):
        mine = np.sort(rows["action"][rows["writer"] == writer])
        np.testing.assert_array_equal(mine, np.arange(200 * ENVS))
    # a reader's last request may be handled once the server found that it left
    assert set(r.server.rejected) <= {"unknown"}


def test_remote_priorities_determine_sampling_frequencies(rig: Callable[..., Rig]) -> None:
    """One row of ten times the priority of each other comes ten times as often."""
    r = rig(prioritized=True)
    with ReplayClient(r.server.address, prefetch=4) as client:
        for count in range(50):
            client.add(**step(count), priority=np.ones(ENVS))
        client.flush()
        batch = client.sample(64)
        client.update_priorities(batch.keys[:1], [10.0])
        favourite = int(batch.action[0])
        client.stats()  # by which the update has been done
        for _ in range(4):
            client.sample(64)  # drawn before
        drawn = np.concatenate([client.sample(64).action for _ in range(100)])
    share = 10 / (10 + 99)
    deviation = np.sqrt(share * (1 - share) / len(drawn))
    assert abs((drawn == favourite).mean() - share) < 5 * deviation
    assert r.replay.stale_updates == 0


def test_largest_weight_of_a_batch_is_one(rig: Callable[..., Rig]) -> None:
    with ReplayClient(rig(prioritized=True).server.address) as client:
        for count in range(50):
            client.add(**step(count), priority=1.0 + np.arange(ENVS) + count)
        client.flush()
        for _ in range(20):
            batch = client.sample(16)
            # beta 1 and the share of a row proportional to its priority, which is 1 + e + count.
            priority = 1.0 + batch.action % ENVS + batch.action // ENVS
            np.testing.assert_allclose(batch.weights, priority.min() / priority, rtol=1e-4)


# ----------------------------------------------------------------------------- what goes wrong


def test_sampling_waits_for_rows_until_a_timeout_error(rig: Callable[..., Rig]) -> None:
    address = rig().server.address
    with ReplayClient(address) as reader, ReplayClient(address) as writer:
        with pytest.raises(TimeoutError, match="0 of 8 rows are stored"):
            reader.sample(8, timeout_s=1.5)
        for count in range(8):
            writer.add(**step(count))
        writer.flush()
        check(reader.sample(8, timeout_s=5.0))


def test_invalid_requests_are_refused_with_a_reason(rig: Callable[..., Rig]) -> None:
    with ReplayClient(rig(capacity=100).server.address) as client:
        with pytest.raises(
            ReplayError, match=r"of 101 rows; ask for .* 100, the buffer's capacity"
        ):
            client.sample(101, timeout_s=5.0)
        with pytest.raises(ReplayError, match="2 priorities came for 1 keys"):
            client.update_priorities([1], [1.0, 2.0])
        with pytest.raises(ReplayError, match="priority nan at position 0 must be finite"):
            client.update_priorities([1], [float("nan")])
        wrong = step(0)
        wrong["obs"]["arm"] = np.zeros((ENVS, 4), np.float32)
        with pytest.raises(ReplayError, match=r"obs\.arm came with shape"):
            client.add(**wrong)


def test_missing_server_is_reported() -> None:
    with pytest.raises(ReplayError, match=r"no replay server answers at tcp://127\.0\.0\.1:9 "):
        ReplayClient("tcp://127.0.0.1:9", patience_s=0.3)


def test_restarted_server_receives_unstored_rows(rig: Callable[..., Rig]) -> None:
    first = rig()
    address = first.server.address
    with ReplayClient(address, prefetch=2) as client:
        for count in range(8):
            client.add(**step(count))
        client.flush()
        first.close()
        for count in range(8, 16):  # one slot, which finds nobody
            client.add(**step(count))
        second = rig(bind=address)
        client.flush(timeout_s=15.0)
        assert sorted(second.replay.sample(8).action.tolist())[0] >= 8 * ENVS
        check(client.sample(8, timeout_s=10.0))


@pytest.mark.parametrize("binds", ["tcp://0.0.0.0:*", "tcp://*:*"])
def test_exposed_address_needs_keys_or_explicit_consent(binds: str) -> None:
    replay = Replay(COLUMNS, 100, envs=ENVS, shared=True)
    with pytest.raises(ReplayError, match="can be reached from other hosts"):
        ReplayServer(replay, binds)
    ReplayServer(replay, binds, insecure=True).close()
    replay.close()


@pytest.mark.parametrize("insecure", [False, True])
def test_a_bind_that_is_no_address_is_refused(insecure: bool) -> None:
    replay = Replay(COLUMNS, 100, envs=ENVS, shared=True)
    with pytest.raises(ReplayError, match="7800 is not an address; give tcp"):
        ReplayServer(replay, "7800", insecure=insecure)
    replay.close()


def test_a_private_replay_is_refused() -> None:
    replay = Replay(COLUMNS, 100, envs=ENVS)
    with pytest.raises(ReplayError, match="make it with shared=True"):
        ReplayServer(replay, "tcp://127.0.0.1:*")
    replay.close()


def test_only_clients_with_listed_keys_connect(rig: Callable[..., Rig], tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        keys.make_keys(folder)
    (other / "learner.key").write_text((mine / "learner.key").read_text())
    address = rig(curve=mine).server.address
    with ReplayClient(address, curve=mine) as client:
        client.add(**step(0))
        client.flush()
    for curve in (other, None):
        with pytest.raises(ReplayError, match="no replay server answers"):
            ReplayClient(address, curve=curve, patience_s=0.5)


def test_malformed_messages_are_counted_and_the_server_continues(rig: Callable[..., Rig]) -> None:
    r = rig()
    with ReplayClient(r.server.address) as client:
        for count in range(8):
            client.add(**step(count))
        client.flush()
        run_id, spec = client._link.run_id, client.spec
        bad: list[tuple[str, list[Any]]] = [
            ("frames", [b"x"]),
            ("header", [b"x" * 100, b"\xc0"]),
            ("kind", wire.encode(Header(MessageKind.GRANT))),
            ("unknown", wire.encode(Header(MessageKind.SAMPLE, run_id=1))),
            ("meta", wire.encode(
                Header(MessageKind.SAMPLE, run_id=run_id, sequence=999), {"batch": "x"})),
            ("spec", wire.encode(Header(MessageKind.SLOT, run_id=run_id, spec_hash=1))),
            ("ungranted", wire.encode(
                Header(MessageKind.SLOT, run_id=run_id, spec_hash=spec.hash, sequence=77))),
            ("size", wire.encode(
                Header(MessageKind.UPDATE, run_id=run_id), None, [bytes(16), bytes(8)])),
        ]  # fmt: skip
        for reason, parts in bad:
            before = r.server.rejected[reason]
            client._link._socket.send_multipart(parts)
            wait_until(lambda reason=reason, n=before: r.server.rejected[reason] == n + 1)  # type: ignore[misc]
        head = Header(MessageKind.SLOT, run_id=run_id, spec_hash=spec.hash, sequence=1,
                    raw_nbytes=spec.payload_nbytes)  # fmt: skip
        torn = [bytes(part) for part in wire.encode(head, [["raw", 1]], [bytes(1)])]
        client._link._socket.send_multipart(torn)
        wait_until(lambda: r.server.rejected["frames"] == 2)
        rng = np.random.default_rng(0)
        for _ in range(200):
            client._link._socket.send_multipart(
                [rng.bytes(int(rng.integers(200))) for _ in range(3)]
            )
        check(client.sample(8))
        for count in range(8, 16):
            client.add(**step(count))
        client.flush()
    assert len(r.replay) == 16 * ENVS


def test_vanished_clients_do_not_affect_the_server(rig: Callable[..., Rig]) -> None:
    r = rig()
    for _ in range(10):
        client = ReplayClient(r.server.address)
        client.add(**step(0))
        client._requests.replenish()
        client._link._socket.close(0)  # without a word
        client._link._context.term()
    with ReplayClient(r.server.address) as client:
        client.add(**step(1))
        client.flush()
        check(client.sample(2))


# ----------------------------------------------------------------------------- trust


def test_unread_answers_of_a_client_are_bounded_by_its_credit(
    rig: Callable[..., Rig],
) -> None:
    limits = ServiceLimits(peer_nbytes=1 << 20, answers_nbytes=2 << 20)
    r = rig(limits=limits)
    with ReplayClient(r.server.address) as client, ReplayClient(r.server.address) as silent:
        for count in range(500):
            client.add(**step(count))
        client.flush()
        for number in range(1000, 1064):
            silent._requests.choose(1000, stacked=True)
            silent._requests.send(number, 4)
        wait_until(lambda: r.server.figures()["unread_nbytes"] > 0)
        before = r.server.figures()["unread_nbytes"]
        for _ in range(20):
            check(client.sample(64))
        assert r.server.figures()["unread_nbytes"] <= max(before, limits.answers_nbytes)
        assert len(client.stats()["server"]["rejected"]) == 0
        check(silent.sample(32))  # it reads after all


@pytest.mark.parametrize("encrypted", [False, True])
def test_false_read_reports_of_a_client_do_not_raise_its_credit(
    rig: Callable[..., Rig], tmp_path: Path, encrypted: bool
) -> None:
    """Its answers would wait in libzmq, which takes 64 of any size."""
    curve = tmp_path / "keys" if encrypted else None
    if curve is not None:
        keys.make_keys(curve)
    r = rig(curve=curve, limits=ServiceLimits(peer_nbytes=1 << 20, answers_nbytes=64 << 20))
    own = keys.load_actor(curve) if curve is not None else None
    with ReplayClient(r.server.address, curve=curve) as client:
        for count in range(2000):
            client.add(**step(count))
        client.flush()
    peers = r.server._service._peers.connected
    with zmq.Context() as context, dealer(context, r.server.address, own, received=1) as liar:
        while not liar.poll(50):
            with suppress(zmq.Again):  # no connection yet
                meta = {"version": service.REPLAY_VERSION, "token": ""}
                liar.send_multipart(wire.encode(Header(MessageKind.JOIN), meta), zmq.NOBLOCK)
        run_id = wire.decode(liar.recv_multipart()).head.run_id
        peer = list(peers.values())[-1]
        for number in range(300):
            ask = {"batch": 4000, "count": 1, "stacked": True, "read": peer.sent}
            head = Header(MessageKind.SAMPLE, run_id=run_id, sequence=number)
            liar.send_multipart(wire.encode(head, ask))
            time.sleep(0.005)
        assert 2 < peer.sent < 40  # of 0.9 MB; a few are in the system's buffers
        assert 0 < peer.unread_nbytes <= 1 << 20


def test_connections_that_never_read_are_closed_and_all_clients_go_on(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else frees what is not read; nothing is lost, and nothing comes twice."""
    monkeypatch.setattr(service, "STALL_S", 0.2)
    monkeypatch.setattr(service, "PROBE_S", 0.05)
    r = rig(limits=ServiceLimits(peer_nbytes=1 << 20, answers_nbytes=1 << 20))
    lines: list[str] = []
    r.server._log = lines.append
    with ReplayClient(r.server.address) as client:
        for count in range(500):
            client.add(**step(count))
        client.flush()
        silent = [ReplayClient(r.server.address) for _ in range(6)]
        deadline_s = time.monotonic() + 20.0
        numbers = itertools.count(1)
        count = 500
        while not lines and time.monotonic() < deadline_s:
            for each in silent:
                each._requests.choose(1000, stacked=True)
                each._requests.send(next(numbers), 1)
                if each._token:
                    each._send_join()
            client.add(**step(count))
            count += 1
            check(client.sample(16))
            time.sleep(0.01)
        assert "all clients reconnect" in lines[0]
        for _ in range(16):
            client.add(**step(count))
            count += 1
        client.flush(15.0)
        check(client.sample(16))
        assert r.replay.stats()["inserted"] == count * ENVS
        assert client.lost == 0
        for each in silent:
            each.close()


def test_rows_since_the_last_snapshot_are_lost_and_counted(
    rig: Callable[..., Rig], tmp_path: Path
) -> None:
    first = rig(snapshot=tmp_path)
    address = first.server.address
    with ReplayClient(address, prefetch=2) as client:
        for count in range(16):
            client.add(**step(count))
        client.flush()
        first.server.save()
        for count in range(16, 40):
            client.add(**step(count))
        client.flush()
        first.close()
        second = rig(bind=address, snapshot=tmp_path)
        assert len(second.replay) == 16 * ENVS
        for count in range(40, 48):
            client.add(**step(count))
        client.flush(15.0)
        check(client.sample(16))
        assert client.lost == 24 * ENVS
        assert client.stats()["client"] == {"lost": 24 * ENVS}
        assert second.replay.stats()["inserted"] == 24 * ENVS
        assert second.server.figures()["snapshots"] == {"saved": 0, "failed": 0}


def test_failing_snapshots_are_logged_in_one_line(rig: Callable[..., Rig], tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    lines: list[str] = []
    r = rig(snapshot=blocked, every_s=0.02, lines=lines)
    with ReplayClient(r.server.address) as client:
        client.add(**step(0))
        client.flush()
        wait_until(lambda: r.server.figures()["snapshots"]["failed"] > 2)
        check(client.sample(2))
    assert len(lines) == 1
    assert "could not be written" in lines[0]
    assert "the server continues" in lines[0]


def test_client_of_another_buffer_is_refused_by_name(rig: Callable[..., Rig]) -> None:
    first = rig()
    with ReplayClient(first.server.address, prefetch=1) as client:
        client.add(**step(0))
        client.flush()
        first.close()
        rig(bind=first.server.address, unroll=4)
        with pytest.raises(ReplayError, match="another buffer listens at"):
            client.sample(2, timeout_s=15.0)


def test_sequences_are_drawn_over_the_wire(rig: Callable[..., Rig]) -> None:
    r = rig(sequences=Sequences(4, overlap=2, burn_in=1, pad=True))
    with ReplayClient(r.server.address) as client:
        for count in range(40):
            client.add(**step(count))
        client.flush()
        batch = client.sample(8)
        rows, mask = batch["action"][0] + ENVS * np.arange(4)[:, None], batch.mask
        assert mask[0].all()
        np.testing.assert_array_equal(batch["action"][mask], rows[mask])
        np.testing.assert_array_equal(batch["obs"]["arm"][mask][:, 0], rows[mask])
        assert batch.burn_in == 1
        client.update_priorities(batch.keys, np.ones(8))
        assert client.stats()["server"]["rejected"] == {}


def test_sign_of_a_remote_priority_is_ignored(rig: Callable[..., Rig]) -> None:
    r = rig(prioritized=True)
    with ReplayClient(r.server.address) as client:
        client.add(**step(0))
        client.flush()
        keys = client.sample(2).keys
        client.update_priorities(keys[::2], [-7.0])
        assert client.stats()["server"]["rejected"] == {}
        assert r.replay.sampler.state_dict()["highest"] == 7.0

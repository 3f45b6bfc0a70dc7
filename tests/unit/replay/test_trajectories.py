"""The trajectory queue as a library: private memory, any thread, other processes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pages import blocks
from penstock.core.specs import Column, SlotSpec
from penstock.replay import TrajectoryQueue, Writer
from penstock.replay.errors import ReplayError
from penstock.transport.shm.store import Slot

COLUMNS = (Column("obs", "<f4", (40,), "unroll+1"), Column("reward", "<f4"))
STEPS = 6


@pytest.fixture
def queue() -> Iterator[TrajectoryQueue]:
    with TrajectoryQueue(COLUMNS, unroll=2, envs=3, slots=4, max_policy_lag=8) as made:
        yield made


def write(to: TrajectoryQueue | Writer, value: float, version: int = 0) -> None:
    with to.slot(timeout_s=1.0, version=version) as slot:
        slot.columns["reward"][...] = value


def rewards(slots: list[Slot]) -> list[float]:
    return [float(slot.columns["reward"][1, 2]) for slot in slots]


def test_explicit_extents_override_the_spec() -> None:
    spec = SlotSpec(7, 5, COLUMNS)
    with TrajectoryQueue(spec, unroll=3, slots=2) as queue:
        assert (queue.spec.unroll, queue.spec.envs) == (3, 5)
    with TrajectoryQueue(COLUMNS, slots=2) as queue:
        assert (queue.spec.unroll, queue.spec.envs) == (20, 1)


def test_slots_come_out_oldest_first_and_every_step_is_counted(queue: TrajectoryQueue) -> None:
    for value in range(4):
        write(queue, value)
    assert rewards(queue.take(3)) == [0, 1, 2]
    stats = queue.stats()
    assert (stats["produced"], stats["taken"], stats["in_flight"]) == (24, 18, 6)


def test_writer_waits_once_all_slots_are_filled(queue: TrajectoryQueue) -> None:
    for value in range(4):
        write(queue, value)
    with pytest.raises(TimeoutError, match=r"no slot was lent within 0\.05 s"), queue.slot(0.05):
        pass
    queue.release(queue.take(1))
    write(queue, 4)
    assert rewards(queue.take(4)) == [1, 2, 3, 4]


def test_drop_stale_keeps_the_freshest() -> None:
    with TrajectoryQueue(COLUMNS, unroll=2, envs=3, slots=3, overflow="drop_stale") as queue:
        for value in range(3):
            write(queue, value)
        assert rewards(queue.take(1)) == [2]
        assert queue.stats()["dropped"] == {"stale": 2 * STEPS}


def test_slots_beyond_max_policy_lag_are_dropped(queue: TrajectoryQueue) -> None:
    write(queue, 0, version=1)
    write(queue, 1, version=2)
    assert rewards(queue.take(1, version=10)) == [1]
    assert queue.stats()["dropped"] == {"lag": STEPS}


def test_taking_waits_for_a_writer_in_another_thread(queue: TrajectoryQueue) -> None:
    started_s = time.monotonic()
    assert queue.take(1, timeout_s=0.1) == []
    assert 0.09 < time.monotonic() - started_s < 1.0
    timer = threading.Timer(0.1, write, (queue, 5))
    timer.start()
    assert rewards(queue.take(1, timeout_s=5.0)) == [5]
    timer.join()


def test_exception_within_a_slot_publishes_nothing(queue: TrajectoryQueue) -> None:
    for _ in range(6):
        with pytest.raises(ZeroDivisionError), queue.slot() as slot:
            slot.columns["reward"][...] = 1 / 0
    write(queue, 3)
    assert rewards(queue.take(1)) == [3]


def test_writers_attach_and_detach(queue: TrajectoryQueue, tmp_path: Path) -> None:
    address = queue.serve(tmp_path / "q")
    assert address == queue.serve() == str(tmp_path / "q")
    for value in range(20):  # a lane is given back each time
        with Writer.attach(address) as writer:
            assert writer.spec == queue.spec
            write(writer, value)
            taken = queue.take(1, timeout_s=2.0)
            assert rewards(taken) == [value]
            queue.release(taken)
    assert queue.stats()["produced"] == 20 * STEPS


def test_raw_bytes_equal_the_column(queue: TrajectoryQueue) -> None:
    with Writer.attach(queue.serve()) as writer:
        with writer.slot() as slot:
            assert len(slot.raw("obs")) == 3 * 3 * 40 * 4
            slot.raw("obs")[:] = bytes(slot.raw("obs").nbytes)
            slot.columns["obs"][2, 1, 7] = 9
            assert slot.raw("obs").cast("f")[(2 * 3 + 1) * 40 + 7] == 9
            with pytest.raises(ReplayError, match="column reward is packed in records"):
                slot.raw("reward")
            with pytest.raises(ReplayError, match="column seat is none of this slot's"):
                slot.raw("seat")
        assert queue.take(1, timeout_s=2.0)[0].columns["obs"][2, 1, 7] == 9


def test_socket_folder_is_private_and_removed_with_the_queue() -> None:
    with TrajectoryQueue(COLUMNS, slots=2) as queue:
        folder = Path(queue.serve()).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"slots": 0}, "slots 0 must be at least 1"),
        ({"max_policy_lag": -1}, "max_policy_lag -1 at least 0"),
        ({"overflow": "grow"}, "overflow 'grow' \"block\""),
        ({"unroll": 0}, "unroll 0 and envs 1 must both be at least 1"),
    ],
)
def test_invalid_queue_options_are_refused(options: dict[str, int | str], text: str) -> None:
    with pytest.raises(ReplayError, match=text):
        TrajectoryQueue(COLUMNS, **options)  # type: ignore[arg-type]


def test_batch_larger_than_the_queue_is_refused(queue: TrajectoryQueue) -> None:
    with pytest.raises(ReplayError, match=r"take\(5\) can never be served by 4 slots"):
        queue.take(5)


# ------------------------------------------------------------------------------------- addresses


def test_missing_queue_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"no buffer answers at .*nowhere"):
        Writer.attach(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match=r"no buffer answers at .*file"):
        Writer.attach(str(tmp_path / "file"))


def test_foreign_socket_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "other"))
        listener.listen()
        with pytest.raises(ReplayError, match="no buffer answers"):
            Writer.attach(str(tmp_path / "other"))


@pytest.mark.parametrize("answer", [b"\xc1", b"hello", b"\x80", b"\x93\x01\x02\x03"])
def test_foreign_answer_is_refused(tmp_path: Path, answer: bytes) -> None:
    def strange(listener: socket.socket) -> None:
        peer, _ = listener.accept()
        peer.recv(1 << 16)
        peer.send(answer)
        peer.close()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "other"))
        listener.listen()
        thread = threading.Thread(target=strange, args=(listener,), daemon=True)
        thread.start()
        with pytest.raises(ReplayError, match=r"is no replay buffer|cannot be used"):
            Writer.attach(str(tmp_path / "other"))
        thread.join()


def test_owner_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "deaf"))
        listener.listen()
        with pytest.raises(ReplayError, match=r"did not answer within 0\.1 s"):
            Writer.attach(str(tmp_path / "deaf"), timeout_s=0.1)


def test_ended_owner_is_reported(tmp_path: Path) -> None:
    queue = TrajectoryQueue(COLUMNS, slots=2)
    writer = Writer.attach(queue.serve())
    queue.close()
    for _ in range(2):  # what was lent can still be filled, in vain
        with writer.slot():
            pass
    with pytest.raises(ConnectionError, match="has ended"), writer.slot(5.0):
        pass
    writer.close()
    queue.close()


def test_second_queue_at_a_path_is_refused(tmp_path: Path) -> None:
    with TrajectoryQueue(COLUMNS, slots=2) as first, TrajectoryQueue(COLUMNS, slots=2) as second:
        first.serve(tmp_path / "q")
        with pytest.raises(ReplayError, match="another process may be using it"):
            second.serve(tmp_path / "q")


def test_releasing_a_slot_twice_is_refused() -> None:
    """Released twice, it would be lent to two writers."""
    with TrajectoryQueue([Column("obs", "<f4", (2,))], unroll=2, slots=3) as queue:
        for _ in range(2):
            with queue.slot():
                pass
        taken = queue.take(2)
        for twice in (taken[:1] * 2, [*taken, taken[0]]):
            with pytest.raises(ReplayError, match="given a slot that is not taken"):
                queue.release(twice)
        queue.release(taken)
        with pytest.raises(ReplayError, match="given a slot that is not taken"):
            queue.release(taken)
        with queue.slot():
            pass
        assert len(queue.take(1)) == 1


def test_documented_code_fills_and_takes_slots() -> None:
    names: dict[str, Any] = {}
    exec(next(code for code in blocks("replay.md", "python") if "TrajectoryQueue(" in code), names)
    assert names["rewards"].shape == (1, 20, 8)
    assert (names["counts"]["produced"], names["counts"]["taken"]) == (160, 160)

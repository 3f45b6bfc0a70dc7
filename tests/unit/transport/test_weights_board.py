"""The board of weights, and memory that is not available."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.configs.errors import UserError
from penstock.core.interfaces import UnknownPolicyError
from penstock.core.params import Stamp, to_bf16
from penstock.transport.shm.arena import Arena, available_nbytes
from penstock.transport.shm.weights_board import WeightsBoard


def test_board_gives_the_newest_weights_in_either_precision() -> None:
    board = WeightsBoard.create(3, shared=False)
    out = np.zeros(3, np.float32)
    assert (board.stamp, board.read(out)) == (None, None)
    board.publish(np.array([1, 2, 3], np.float32), Stamp(1, 10))
    assert board.read(out, Stamp(1, 9)) == board.stamp == Stamp(1, 10)
    assert out.tolist() == [1, 2, 3]
    board.publish(to_bf16(np.array([4, 5, 6], np.float32)), Stamp(2, 1))
    assert board.read(out, Stamp(1, 10)) == Stamp(2, 1)
    assert out.tolist() == [4, 5, 6]
    assert board.read(out, Stamp(2, 1)) is None


def test_weights_in_several_arrays_are_published_as_one_vector() -> None:
    board = WeightsBoard.create(4, shared=False)
    out = np.zeros(4, np.float32)
    for version in (1, 2, 3):  # so that both buffers are used
        parts: list[npt.NDArray[Any]] = [np.full(1, version, np.float32), np.arange(3)]
        board.publish_parts(parts, Stamp(0, version))
        assert board.read(out) == Stamp(0, version)
        assert out.tolist() == [version, 0, 1, 2]
    with pytest.raises(UnknownPolicyError):
        board.publish_parts(parts, Stamp(0, 4), 1)


def test_board_holds_one_policy() -> None:
    assert WeightsBoard.create(3, shared=False).policy_id == 0
    board, values = WeightsBoard.create(3, policy_id=4), np.ones(3, np.float32)
    assert board.arena.fd is not None
    reader, out = WeightsBoard.attach(os.dup(board.arena.fd), 3), np.zeros(3, np.float32)
    board.publish(values, Stamp(0, 1), 4)
    with pytest.raises(UnknownPolicyError):
        board.publish(values, Stamp(0, 2))
    for policy_id in (0, 5):
        with pytest.raises(UnknownPolicyError):
            reader.read(out, None, policy_id)
    assert reader.read(out, None, 4) == Stamp(0, 1)
    reader.close()
    board.close()


def test_reader_never_sees_parts_of_two_versions() -> None:
    board = WeightsBoard.create(20_000, shared=False)
    stop = threading.Event()

    def publish() -> None:
        version = 0
        while not stop.is_set():
            version += 1
            board.publish(np.full(20_000, version, np.float32), Stamp(0, version))

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    out = np.zeros(20_000, np.float32)
    stamp, seen = None, 0
    begin_s = time.monotonic()
    try:
        while (s := time.monotonic() - begin_s) < 1.0 or seen <= 10:
            assert s < 60.0
            newer = board.read(out, stamp)
            if newer is None:
                continue
            assert (out == newer.version).all()
            assert stamp is None or newer.version > stamp.version
            stamp, seen = newer, seen + 1
    finally:
        stop.set()
        thread.join()


def test_interrupted_publication_leaves_the_previous_weights() -> None:
    board, out = WeightsBoard.create(3, shared=False), np.zeros(3, np.float32)
    for version in (1, 2):
        board.publish(np.full(3, version, np.float32), Stamp(0, version))
        board._begin(0)[:] = 0xFF
        assert board.read(out) == board.stamp == Stamp(0, version)
        assert out.tolist() == [version] * 3


@pytest.mark.parametrize(("published", "version"), [(1, 1), (2, 3), (3, 4)])
def test_reader_retries_if_its_buffer_may_have_been_overwritten(
    monkeypatch: pytest.MonkeyPatch, published: int, version: int
) -> None:
    """There are two buffers: the first publication while it reads goes into the other one."""
    board, out = WeightsBoard.create(3, shared=False), np.zeros(3, np.float32)
    copy, copies = board._copy, 0

    def publish(version: int) -> None:
        board.publish(np.full(3, version, np.float32), Stamp(0, version))

    def slow_copy(*args: Any) -> None:
        nonlocal copies
        copy(*args)
        copies += 1
        if copies == 1:
            for later in range(2, 2 + published):
                publish(later)

    monkeypatch.setattr(board, "_copy", slow_copy)
    publish(1)
    assert board.read(out) == Stamp(0, version)
    assert out.tolist() == [version] * 3
    assert copies == 1 + (version > 1)


def test_arena_beyond_the_available_memory_is_refused_at_creation() -> None:
    """And nothing is allocated first, which would have someone killed for it."""
    before = available_nbytes()
    with pytest.raises(UserError, match=r"1125899\.91 GB of shared memory for slots cannot"):
        Arena.shared(1 << 50, "slots")
    assert available_nbytes() > before // 2

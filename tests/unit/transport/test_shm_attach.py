"""An owner that gives away less than it says: the one that attaches ends with a sentence."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from penstock.configs.errors import UserError
from penstock.core.specs import Column, SlotSpec
from penstock.transport.shm.arena import Arena
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import Geometry
from penstock.transport.shm.weights_board import WeightsBoard

SPEC = SlotSpec(4, 2, (Column("obs", "float32", (8,)),))
GEOMETRY = Geometry(SPEC, slots=3, lanes=2)
REPLY: dict[str, Any] = {
    "run_id": 1,
    "generation": 0,
    "spec": SPEC.to_dict(),
    "layout": [["w", [16]]],
    "config": {},
    "lane": 1,
    "slots": 3,
    "lanes": 2,
}


@contextmanager
def owner(path: Path, reply: dict[str, Any], store_nbytes: int) -> Iterator[None]:
    """Answers one client with ``reply``, a board of 16 weights and a store of that size."""
    board = WeightsBoard.create(16)
    store = Arena.shared(store_nbytes, "test")
    events = [os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)]
    assert board.arena.fd is not None
    assert store.fd is not None
    fds = [board.arena.fd, store.fd, *events]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 17)
                socket.send_fds(peer, [msgpack.packb(reply)], fds)
                peer.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join()
    board.close()
    store.close()
    for event in events:
        os.close(event)


def column(dtype: str, shape: list[int], rows: str) -> dict[str, Any]:
    return {"spec": {**SPEC.to_dict(), "columns": [["obs", dtype, shape, rows]]}}


def test_a_sound_answer_is_taken(tmp_path: Path) -> None:
    with owner(tmp_path / "s", REPLY, GEOMETRY.nbytes):
        link = ShmLink(tmp_path / "s", SPEC, 1)
        link.close()


@pytest.mark.parametrize(
    "change",
    [
        {"slots": 4000},
        {"lanes": 1 << 20},
        {"lanes": 1 << 62, "slots": 1 << 62},
        {"slots": "3"[:0]},
        {"layout": [["w", [1 << 40]]]},
        {"layout": [["w", [1 << 40, 1 << 40]]]},
        {"layout": [["w", [-2000]]]},
        {"layout": 7},
        column("float32", [1 << 62], "unroll"),
        column("float32", [-8], "unroll"),
        column("O", [8], "unroll"),
        column("float32", [8], "everywhere"),
        {"spec": {**SPEC.to_dict(), "unroll": 1 << 60}},
        {"spec": None},
        {"run_id": None},
    ],
    ids=str,
)
def test_an_answer_that_says_more_than_there_is(tmp_path: Path, change: dict[str, Any]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        owner(tmp_path / "s", {**REPLY, **change}, GEOMETRY.nbytes),
        pytest.raises(UserError, match="the answer of the memory's owner cannot be used"),
    ):
        ShmLink(tmp_path / "s", SPEC, 1)
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer where garbage was collected

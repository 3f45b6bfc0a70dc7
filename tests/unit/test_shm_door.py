"""The door to shared memory: those who come, who leave, and an owner that does not answer."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.transport.shm.door import Attached, Door, Entry


class House:
    """A door that gives out numbered lanes, served by a thread."""

    def __init__(self, path: Path) -> None:
        self.left: list[int] = []
        self.given = 0
        self.door = Door(path, self._attach, self.left.append)
        self._stop = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _attach(self, request: dict[str, Any]) -> Attached:
        if request["name"] == "stranger":
            raise UserError("strangers stay outside")
        self.given += 1
        return Attached(self.given, [], {"lane": self.given})

    def _serve(self) -> None:
        while not self._stop:
            self.door.poll(0.01)

    def wait_left(self, count: int) -> None:
        deadline_s = time.monotonic() + 5
        while len(self.left) < count and time.monotonic() < deadline_s:
            time.sleep(0.005)
        assert len(self.left) == count

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.door.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "door")
    yield made
    made.close()


@contextmanager
def deaf_listener(path: Path) -> Iterator[None]:
    """Takes connections as a stopped process does: the kernel accepts, nobody reads."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)
        yield


def test_an_answer_comes_back(house: House, tmp_path: Path) -> None:
    entry = Entry(tmp_path / "door", {"name": "friend"})
    assert entry.reply == {"lane": 1}
    assert not entry.owner_gone
    entry.leave()


def test_a_refusal_is_its_sentence(house: House, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="strangers stay outside"):
        Entry(tmp_path / "door", {"name": "stranger"})


def test_who_says_bye_gives_the_lane_back(house: House, tmp_path: Path) -> None:
    entries = [Entry(tmp_path / "door", {"name": "friend"}) for _ in range(3)]
    entries[1].leave()
    house.wait_left(1)
    assert house.left == [2]
    for entry in (entries[0], entries[2]):
        entry.leave()
    house.wait_left(3)


def test_a_closed_connection_alone_gives_no_lane_back(house: House, tmp_path: Path) -> None:
    """The process lives, and so does its mapping."""
    entry = Entry(tmp_path / "door", {"name": "friend"})
    entry._socket.close()
    time.sleep(0.1)
    assert house.left == []


def test_an_owner_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with deaf_listener(tmp_path / "deaf"):
        for _ in range(3):  # the third finds the queue of connections full
            started_s = time.monotonic()
            with pytest.raises(TimeoutError, match=r"deaf did not answer within 0\.1 s; it may be"):
                Entry(tmp_path / "deaf", {"name": "friend"}, timeout_s=0.1)
            assert time.monotonic() - started_s < 1.0


def test_who_gave_up_waiting_is_given_nothing(tmp_path: Path) -> None:
    house = House.__new__(House)
    house.left, house.given = [], 0
    house.door = Door(tmp_path / "door", house._attach, house.left.append)
    with pytest.raises(TimeoutError):
        Entry(tmp_path / "door", {"name": "friend"}, timeout_s=0.05)
    for _ in range(3):
        house.door.poll(0.01)
    assert house.given == 0
    house.door.close()


def test_a_socket_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """One of another type refuses this connection, and yet its owner listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(tmp_path / "door"))
        other.listen(1)
        with pytest.raises(UserError, match="another process may be using it"):
            House(tmp_path / "door")
        assert (tmp_path / "door").is_socket()


def test_a_socket_that_was_left_is_replaced(tmp_path: Path) -> None:
    with deaf_listener(tmp_path / "door"):
        pass
    House(tmp_path / "door").close()
    assert not (tmp_path / "door").exists()


def test_what_has_replaced_the_socket_stays(tmp_path: Path) -> None:
    house = House(tmp_path / "door")
    (tmp_path / "door").unlink()
    (tmp_path / "door").write_text("mine")
    house.close()
    assert (tmp_path / "door").read_text() == "mine"


def test_an_owner_that_ends_is_noticed(tmp_path: Path) -> None:
    house = House(tmp_path / "door")
    entry = Entry(tmp_path / "door", {"name": "friend"})
    house.close()
    assert entry.owner_gone
    assert not os.path.exists(tmp_path / "door")
    entry.leave()
    with pytest.raises(FileNotFoundError):
        Entry(tmp_path / "door", {"name": "friend"})

"""Attaching to shared memory: clients that join and leave, and owners that do not answer."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import msgpack
import pytest

from penstock.configs.errors import UserError
from penstock.transport.shm import attach
from penstock.transport.shm.attach import AttachClient, Attached, AttachServer

NOBODY = 65534


class House:
    """A door that gives out numbered lanes, served by a thread."""

    def __init__(self, path: Path) -> None:
        self.left: list[int] = []
        self.given = 0
        self.door = AttachServer(path, self._attach, self.left.append)
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
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

    def close(self, *, over: bool = False) -> None:
        self._stop = True
        self._thread.join()
        self.door.close(over=over)


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


def test_attach_request_is_answered(house: House, tmp_path: Path) -> None:
    entry = AttachClient(tmp_path / "door", {"name": "friend"})
    assert entry.reply == {"lane": 1}
    assert not entry.owner_gone
    entry.leave()


def test_refusal_is_raised_with_its_sentence(house: House, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="strangers stay outside"):
        AttachClient(tmp_path / "door", {"name": "stranger"})


def test_leaving_client_frees_its_lane(house: House, tmp_path: Path) -> None:
    entries = [AttachClient(tmp_path / "door", {"name": "friend"}) for _ in range(3)]
    entries[1].leave()
    house.wait_left(1)
    assert house.left == [2]
    for entry in (entries[0], entries[2]):
        entry.leave()
    house.wait_left(3)


def test_closed_connection_of_a_living_process_keeps_its_lane(house: House, tmp_path: Path) -> None:
    """The process lives, and so does its mapping."""
    entry = AttachClient(tmp_path / "door", {"name": "friend"})
    entry._socket.close()
    time.sleep(0.1)
    assert house.left == []


@pytest.mark.parametrize("over", [True, False])
def test_ending_owner_states_whether_the_run_is_over(tmp_path: Path, over: bool) -> None:
    house = House(tmp_path / "door")
    entry = AttachClient(tmp_path / "door", {"name": "friend"})
    assert (entry.owner_gone, entry.owner_over) == (False, False)
    house.close(over=over)
    assert (entry.owner_gone, entry.owner_over) == (True, over)
    entry.leave()


CLIENT = """
import sys
from pathlib import Path
from penstock.transport.shm.attach import AttachClient
entry = AttachClient(Path(sys.argv[1]), {"name": "friend"})
print(entry.reply["lane"], flush=True)
sys.stdin.readline()
entry.leave()
print("left", flush=True)
sys.stdin.readline()
"""


def test_end_of_a_departed_process_frees_no_other_lane(tmp_path: Path) -> None:
    """Its pidfd is closed at its BYE, and the next client may get a pidfd of the same number."""
    left: list[int] = []
    lanes = iter((1, 2))

    def give(request: dict[str, Any]) -> Attached:
        lane = next(lanes)
        return Attached(lane, [], {"lane": lane})

    path = tmp_path / "door"
    door = AttachServer(path, give, left.append)
    command = [sys.executable, "-c", CLIENT, str(path)]
    with ExitStack() as opened:
        opened.callback(door.close)
        first = opened.enter_context(
            subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True, bufsize=1)
        )
        assert first.stdin is not None
        assert first.stdout is not None
        lower = os.dup(0)
        while len(door._selector.get_map()) < 2:  # the listener, and its connection
            door.poll(0.05)
        os.close(lower)  # the number of its pidfd, and of the next one after its end
        while not door._peers:
            door.poll(0.05)
        pidfd, (peer, _) = next(iter(door._peers.items()))
        second = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        second.connect(str(path))
        door.poll(0)  # accepts it
        assert first.stdout.readline() == "1\n"
        first.stdin.write("\n")
        assert first.stdout.readline() == "left\n"
        second.send(msgpack.packb({"attach": attach.ATTACH_VERSION, "name": "friend"}))
        first.stdin.write("\n")
        first.wait(10)
        events = door._selector.select(0)  # in any order
        order = {peer: 0, pidfd: 2}
        events.sort(key=lambda event: order.get(event[0].fileobj, 1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(door._selector, "select", lambda timeout_s: events)
            door.poll(0)
        assert msgpack.unpackb(second.recv(attach.MESSAGE_NBYTES)) == {"lane": 2}
        assert left == [1]


def test_owner_that_never_answers_causes_a_timeout(tmp_path: Path) -> None:
    with deaf_listener(tmp_path / "deaf"):
        for _ in range(3):  # the third finds the queue of connections full
            started_s = time.monotonic()
            with pytest.raises(TimeoutError, match=r"deaf did not answer within 0\.1 s; it may be"):
                AttachClient(tmp_path / "deaf", {"name": "friend"}, timeout_s=0.1)
            assert time.monotonic() - started_s < 1.0


def test_client_that_gave_up_waiting_gets_no_lane(tmp_path: Path) -> None:
    house = House.__new__(House)
    house.left, house.given = [], 0
    house.door = AttachServer(tmp_path / "door", house._attach, house.left.append)
    with pytest.raises(TimeoutError):
        AttachClient(tmp_path / "door", {"name": "friend"}, timeout_s=0.05)
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


def test_leftover_socket_is_replaced(tmp_path: Path) -> None:
    with deaf_listener(tmp_path / "door"):
        pass
    House(tmp_path / "door").close()
    assert not (tmp_path / "door").exists()


def test_file_that_replaced_the_socket_is_kept(tmp_path: Path) -> None:
    house = House(tmp_path / "door")
    (tmp_path / "door").unlink()
    (tmp_path / "door").write_text("mine")
    house.close()
    assert (tmp_path / "door").read_text() == "mine"


def test_owner_without_descriptors_accepts_once_one_is_free(tmp_path: Path) -> None:
    """The listener stays readable; the client is accepted as soon as a descriptor is free."""
    door = AttachServer(tmp_path / "door", lambda _: Attached(1, [], {}), lambda _: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(tmp_path / "door"))
        lowest = os.dup(0)
        os.close(lowest)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
            turns, ends_s = 0, time.monotonic() + 0.2
            while time.monotonic() < ends_s:
                door.poll(0.1)
                turns += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert turns <= 25
        client.send(msgpack.packb({"attach": attach.ATTACH_VERSION}))
        door.poll(0.1)  # accepts
        door.poll(0.1)  # answers
        assert msgpack.unpackb(client.recv(100)) == {}
    door.close()


def test_client_notices_the_end_of_the_owner(tmp_path: Path) -> None:
    house = House(tmp_path / "door")
    entry = AttachClient(tmp_path / "door", {"name": "friend"})
    house.close()
    assert entry.owner_gone
    assert not os.path.exists(tmp_path / "door")
    entry.leave()
    with pytest.raises(FileNotFoundError):
        AttachClient(tmp_path / "door", {"name": "friend"})


@contextmanager
def another_user(action: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """A process of another user that does something; what it returned, once it has ended."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            code = 0 if action() else 1
        finally:
            os._exit(code)
    yield lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder in which every user may do anything."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp(prefix="door-", dir="/tmp"))  # TMPDIR may be this user's alone
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_another_user_cannot_connect(open_folder: Path) -> None:
    house = House(open_folder / "door")

    def is_refused() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            return peer.connect_ex(str(open_folder / "door")) == errno.EACCES

    with another_user(is_refused) as was_refused:
        assert was_refused()
    house.close()


@pytest.mark.parametrize(
    "request_",
    [b"\xc1", b"\x93\x01", msgpack.packb([1]), msgpack.packb({}), b"\x91" * 2000, b"x" * 100_000],
    ids=lambda value: repr(value[:4]),
)
def test_malformed_request_is_refused_and_the_server_continues(
    house: House, tmp_path: Path, request_: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(5.0)
        peer.connect(str(tmp_path / "door"))
        peer.send(request_)
        answer = peer.recv(1000)
        assert answer == b"" or "error" in msgpack.unpackb(answer)
    assert house.given == 0
    AttachClient(tmp_path / "door", {"name": "friend"}).leave()


@contextmanager
def owner(path: Path, answer: bytes, fds: list[int]) -> Iterator[None]:
    """Gives one client this answer, whatever it asks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(attach.MESSAGE_NBYTES)
                socket.send_fds(peer, [answer], fds)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize(
    ("answer", "fds"),
    [
        (b"\xc1", 0),
        (msgpack.packb([1]), 2),
        (msgpack.packb({"x": b"0" * (1 << 17)}), 1),
        (msgpack.packb({}), attach.MAX_FDS + 1),
    ],
    ids=["no message", "no map", "too long", "too many descriptors"],
)
def test_malformed_answer_is_refused_and_leaks_no_descriptor(
    tmp_path: Path, answer: bytes, fds: int
) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    with owner(tmp_path / "door", answer, [null] * fds):
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(UserError, match="the answer of the memory's owner cannot be used"):
            AttachClient(tmp_path / "door", {"name": "friend"})
    os.close(null)
    assert len(set(os.listdir("/proc/self/fd"))) <= len(before)

"""`penstock check-client` with the echo games of `clients/`, and with games that depart."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from javascript import ROOT
from penstock.serving.client_check import check_client
from penstock.serving.client_script import parts
from train_command import Penstock

pytestmark = pytest.mark.system

CLIENTS = ROOT / "clients"
PYTHON = [sys.executable, str(CLIENTS / "python" / "echo_game.py")]
PARTS = {part.name: part for part in parts()}
WAIT_S = 3.0  # for a client that sends nothing


def node(folder: Path) -> list[str]:
    """The game in JavaScript."""
    return [found("node"), str(CLIENTS / "js" / "echo_game.mjs")]


def python(folder: Path) -> list[str]:
    """The game in Python."""
    return PYTHON


def c(folder: Path) -> list[str]:
    """The game in C."""
    sources = [str(CLIENTS / "c" / name) for name in ("echo_game.c", "penstock_game.c")]
    program = str(folder / "echo")
    subprocess.run([found("cc"), *sources, "-o", program], check=True)
    return [program]


def cpp(folder: Path) -> list[str]:
    """The game in C++."""
    client = str(folder / "penstock_game.o")
    program = str(folder / "echo")
    source = str(CLIENTS / "c" / "penstock_game.c")
    subprocess.run([found("cc"), "-c", source, "-o", client], check=True)
    game = str(CLIENTS / "cpp" / "echo_game.cpp")
    options = ["-std=c++17", f"-I{CLIENTS / 'c'}"]
    subprocess.run([found("c++"), *options, game, client, "-o", program], check=True)
    return [program]


def godot(folder: Path) -> list[str]:
    """The game in GDScript."""
    return [found("godot3-server"), "--path", str(CLIENTS / "godot"), "-s", "echo_game.gd"]


def found(program: str) -> str:
    """The path of a program. Skips the test without it."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"no {program}")
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command_in", [python, node, c, cpp, godot])
def test_the_echo_game_of_each_client_keeps_all(
    penstock: Penstock, tmp_path: Path, command_in: Callable[[Path], Sequence[str]]
) -> None:
    command = command_in(tmp_path)
    status, report, errors = penstock("check-client", "--json", "--", *command).end()
    assert (status, report["departures"]) == (0, 0), (report, errors)
    assert [part["part"] for part in report["parts"]] == [*PARTS]
    # 20 episodes of 3 seats of 4 to 8 rows, of which the same ones are cut short in each part.
    assert {part["rows"] for part in report["parts"]} == {316}


def test_a_game_that_somebody_starts_is_checked_at_the_port_that_is_told() -> None:
    games: list[subprocess.Popen[bytes]] = []

    def start_game(sentence: str) -> None:
        """Do what the sentence says."""
        match = re.search("start the echo game for (\\S+) ([0-9]+)$", sentence)
        assert match, sentence
        games.append(subprocess.Popen([*PYTHON, *match.groups()]))

    chosen = [PARTS["numbers"], PARTS["an image"]]
    results = check_client([], None, start_game, chosen=chosen)
    assert [(result.part, result.departure) for result in results] == [
        ("numbers", ""),
        ("an image", ""),
    ]
    assert [game.wait(10) for game in games] == [0, 0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["--", "no-such-game"], "no-such-game cannot be started", id="command"),
        pytest.param(["--port", "BUSY"], "give another --port", id="port"),
    ],
)
def test_bad_input_is_one_sentence(penstock: Penstock, words: list[str], sentence: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        words = [word.replace("BUSY", str(busy.getsockname()[1])) for word in words]
        status, _, errors = penstock("check-client", *words).end()
    assert status == 2
    assert sentence in errors
    assert "Traceback" not in errors


def test_a_game_ends_with_the_command_that_has_started_it(penstock: Penstock) -> None:
    sleeper = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(100)"
    command = penstock("check-client", "--", sys.executable, "-c", sleeper)
    pid_file = command.folder / "pid"
    command.wait_until(lambda: pid_file.exists() and pid_file.read_text())
    game = psutil.Process(int(pid_file.read_text()))
    command.process.terminate()
    game.wait(30)  # sleeps much longer


# What is done to the game in Python, in which part, and what is said of it. `client` and `echo` are
# its two modules.
MUTATIONS = {
    "an offset without alignment": (
        "parts with a mask",
        """
        true = client._row_dtype
        def shifted(columns, nbytes):
            columns = [[*column[:3], min(column[3], 14)] for column in columns]
            return true(columns, nbytes)
        client._row_dtype = shifted
        """,
        "byte 14 .* columns begin at their offsets in WELCOME",
    ),
    "rows in another order than their seats": (
        "numbers",
        """
        true = echo.Seat.write
        def swapped(self, rows, place, columns):
            other = len(rows.seats) - 1 - place
            flags, reward = rows.flags.copy(), rows.reward.copy()
            true(self, rows, other, columns)
            change = rows.flags[other], rows.reward[other]
            rows.flags[:], rows.reward[:] = flags, reward
            rows.flags[place], rows.reward[place] = change
        echo.Seat.write = swapped
        """,
        "shows the observation of seat 2; rows of bytes lie in the order of seat",
    ),
    "no padding of rows": (
        "an image",
        """
        true = client.Game._connect
        def unpadded(self):
            true(self)
            self.welcome["row_nbytes"] = 90
        client.Game._connect = unpadded
        """,
        "3 times row_nbytes, which is 96",
    ),
    "padding that is not zero": (
        "switches",
        """
        true = echo.Seat.write
        def dirty(self, rows, place, columns):
            true(self, rows, place, columns)
            rows.message[-1] = 7
        echo.Seat.write = dirty
        """,
        "byte 7 of the observation of seat 2 in its row 0 belongs to no column and is 7",
    ),
    "flags and rewards without zeros between them": (
        "numbers",
        """
        true = client.Game.step
        def dirty(self, *parts):
            for rows in parts:
                rows.message[12 + 5 * len(rows.seats)] = 1
            return true(self, *parts)
        client.Game.step = dirty
        """,
        "bytes between flags, rewards and observations are no zeros",
    ),
    "actions in the order of rows": (
        "numbers",
        """
        true = client.np.frombuffer
        def ordered(body, dtype, count, offset):
            array = true(body, dtype, count, offset)
            return client.np.sort(array) if dtype == "<u4" else array
        client.np.frombuffer = ordered
        """,
        "take each action by its seat",
    ),
    "a step that ends with its first ACT": (
        "numbers",
        """
        true = client.Game._take_actions
        def hasty(self, body):
            true(self, body)
            self._is_waiting[:] = False
        client.Game._take_actions = hasty
        """,
        "the flags|the reward|bytes came although",
    ),
    "a STEP before the ACT": (
        "numbers",
        """
        true, count = client.Game.step, iter(range(10**6))
        def hasty(self, *parts):
            if next(count) == 4:
                self._socket.sendall(parts[0].message.tobytes())
            return true(self, *parts)
        client.Game.step = hasty
        """,
        "bytes came although seats 0, 2 had no answer yet",
    ),
    "no reconnect": (
        "numbers",
        """
        true, count = client.Game.reconnect, iter(range(10**6))
        def once(self):
            if next(count):
                raise client.Lost("gone")
            true(self)
        client.Game.reconnect = once
        """,
        r"the client ended where it must connect.*exit code 1",
    ),
    "one attempt to reconnect": (
        "numbers",
        "client._LONGEST_PAUSE_S = client._FIRST_PAUSE_S = 1e9",
        "the client ended where it must connect",
    ),
    "an episode that goes on after a FAULT": (
        "numbers",
        "echo.Seat.give_up = lambda self: None",
        "1 .first. is expected; its row was answered by a FAULT",
    ),
    "an episode that goes on after reconnecting": (
        "numbers",
        """
        true, faults = echo.Seat.give_up, iter(range(10**6))
        echo.Seat.give_up = lambda self: None if next(faults) else true(self)
        """,
        "1 .first. is expected; the connection was lost",
    ),
    "the same episode again after a FAULT": (
        "numbers",
        "echo.Seat.give_up = lambda self: setattr(self, 'is_playing', False)",
        "episode i of seat s has",
    ),
    "a row after END": (
        "numbers",
        """
        true = client.Game._drop
        def late(self):
            if self._socket is not None:
                self._socket.sendall(self.rows([0]).message.tobytes())
            true(self)
        client.Game._drop = late
        """,
        "STEP came on a connection that END has closed",
    ),
    "terminated for truncated": (
        "numbers",
        "echo.TRUNCATED, echo.TERMINATED = echo.TERMINATED, echo.TRUNCATED",
        "is 4 .truncated. where|are 4 .truncated. where 2 .terminated. is expected",
    ),
    "rewards of the other byte order": (
        "numbers",
        """
        true = client.Game.step
        def swapped(self, *parts):
            for rows in parts:
                rows.reward.byteswap(inplace=True)
            return true(self, *parts)
        client.Game.step = swapped
        """,
        "the checksum of the action_nbytes bytes",
    ),
    "the padding of actions left out of the checksum": (
        "a choice",
        """
        true = echo.Seat.take
        echo.Seat.take = lambda self, action: true(self, action[:12])
        """,
        "the checksum of the action_nbytes bytes",
    ),
    "rows that are not counted where they end": (
        "numbers",
        """
        true = echo.Seat.write
        def uncounted(self, *rest):
            true(self, *rest)
            self.rows -= not self.is_playing
        echo.Seat.write = uncounted
        """,
        "shows the observation of row [0-9]+; rows count from 0",
    ),
    "rows that count anew after reconnecting": (
        "numbers",
        """
        true = client.Game.reconnect
        def anew(self):
            true(self)
            import gc
            for seat in [it for it in gc.get_objects() if isinstance(it, echo.Seat)]:
                seat.rows = 0
        client.Game.reconnect = anew
        """,
        r"seat 0 in its row [0-9]+ shows",
    ),
    "no turns": (
        "numbers",
        """
        true = client.Game.step
        def together(self, *parts):
            if len(parts) < 2:
                return true(self, *parts)
            all_rows = self.rows([0, 1, 2])
            all_rows.flags[:] = [flag for rows in parts for flag in rows.flags]
            return true(self, all_rows)
        client.Game.step = together
        """,
        "seats 0, 1, 2 where seats 0, 1 belong.*seat 2 a STEP of its own",
    ),
    "bounds that are not read": (
        "whole numbers",
        """
        true = echo.columns_of
        echo.columns_of = lambda welcome: [column._replace(low=0) for column in true(welcome)]
        """,
        "shows 0 where -3 is expected, at byte 0: element 0 of column obs, <i4",
    ),
    "a mask that is counted": (
        "parts with a mask",
        """
        true = echo.columns_of
        echo.columns_of = lambda welcome: [c._replace(name=c.name) for c in true(welcome)]
        echo.Column.values = lambda self, seat, row: (31 * row + 3 * self.elements) % 2
        """,
        "of column action_mask",
    ),
    "messages that are read in one piece": (
        "numbers",
        """
        def hasty(self):
            content = self._socket.recv(1 << 16)[4:]
            return int.from_bytes(content[:4], "little"), content
        client.Game._receive = hasty
        """,
        "the connection was closed|ended",
    ),
    "a length that counts itself": (
        "numbers",
        """
        true = client.Rows.__init__
        def longer(self, *rest):
            true(self, *rest)
            self.message[:4].view("<u4")[0] += 4
        client.Rows.__init__ = longer
        """,
        "92 of 96 bytes of a message came.*its length counts the bytes behind it",
    ),
    "another protocol": ("numbers", "client._PROTOCOL = 2", "HELLO is refused: protocol is 2"),
    "other seats": ("numbers", "echo.SEATS = 2", "HELLO says 2 seats; the echo game has 3"),
    "too few episodes": (
        "numbers",
        "echo.EPISODES = 2",
        "END came where a STEP|seats? .* where seats? .* belong",
    ),
    "no END": ("numbers", "client.Game.close = client.Game._drop", "closed where END is expected"),
    "an exit code": (
        "numbers",
        """
        import atexit, os
        atexit.register(os._exit, 3)
        """,
        "the client ended with exit code 3; end it with 0",
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_departure_is_explained_in_one_sentence(name: str, tmp_path: Path) -> None:
    part, mutation, sentence = MUTATIONS[name]
    program = tmp_path / "mutated.py"
    head = f"import sys\nsys.path.insert(0, {str(CLIENTS / 'python')!r})\n"
    head += "import echo_game as echo, penstock_game as client\n"
    program.write_text(head + textwrap.dedent(mutation) + "\necho.main()\n")
    (result,) = check_client(
        [sys.executable, str(program)], None, print, wait_s=WAIT_S, chosen=[PARTS[part]]
    )
    assert re.search(sentence, result.departure), result
    assert "\n" not in result.departure

"""Hostile messages at the port of games: how they are answered, whether memory stays flat, and
whether an honest game beside them is served.

Attackers in processes of their own send bursts of messages. Most are STEPs whose seats, flags,
rewards or observations are wrong, which cost a seat its episode. A burst may end with one that ends
the connection: lengths, kinds and counts at the limits of their integers, flipped bits, JSON of
strange values, a HELLO of huge spaces; or with half a message. Others are requests of HTTP.
Everything comes from ``--seed``.

An answer is typed if it is an ACT, a FAULT of a documented field, END, or a status of HTTP below
500. The exit code is 1 if any other arrives, if a connection is closed without a word, if memory
grows by more than `FLAT_NBYTES` after a tenth of the messages, or if the honest game gets a wrong
action or none.

With ``--recorded`` the service records for a learner, as that of `penstock serve-env` does. Each
slot that it publishes is checked: finite numbers, actions that exist, episodes that end before the
next begins, streams without a gap (`SlotCheck`). The rows of the honest game are compared with its
own log, and the exit code is 1 if one is missing, wrong, or if a slot is not sound.

    python benchmarks/hostile_games.py [--recorded] [--messages 1000000] [--seed 0] [--json]
"""

from __future__ import annotations

import json
import multiprocessing as mp
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import compile_package, finish, parser
from penstock.transport.shm.store import Slot, SlotStore
from recording_service import FORK, recording_service, take_slots
from serve import (
    ACT,
    FIRST,
    HELLO,
    STEP,
    WELCOME,
    Agent,
    Game,
    Rows,
    Served,
    cartpole_agent,
    hello_message,
    processor_time,
    serving,
    step_message,
)

FAULT = 5
END = 6
FIELDS = {
    "action", "connection", "flags", "hello", "message", "name", "observation", "protocol",
    "reward", "seat", "seats", "token",
}  # fmt: skip
ATTACKERS = 4
BURST = 64
SEATS = 2 * BURST + 1  # two for each message of a burst, which are acting when it is sent
PROBE = SEATS - 1  # the seat whose ACT shows that a burst has been read
FATAL_SHARE = 0.1  # of the bursts that end with a message which ends the connection
HTTP_SHARE = 0.01  # of the bursts that are a request instead
WAIT_S = 20
FLAT_NBYTES = 16 << 20
HONEST_SEATS = 32
HONEST_PAUSE_S = 0.005
# Of a service that records: what the honest game shows first, and slots of the learner. They are
# fewer than the seats of a connection that is closed, whose unrolls are published together.
MARK = 5000
SLOTS = 64
QUIET_S = 1.0  # without a slot: all are there
MOST_REWARD = 1e6

NUMBERS = (0, 1, 7, 8, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e6, 1.1e6, -3e38, float("nan"), float("inf"), float("-inf"))
STRANGE_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**70, 1e300, "", "x" * 300, [], {}, [[]], ["box", -1],
    {"discrete": {"n": 2**62}}, {"box": {"shape": [2**31, 2**31], "low": 0, "high": 1}},
]  # fmt: skip
STRANGE_TEXTS = (
    b"", b"\xff\xfe", b"{", b"[" * 20_000, b"{}" * 9, b"nul", b'"\\ud800"', b"1e999",
    b'{"protocol": 1, "protocol": 2}', b'{"protocol": NaN}',
)  # fmt: skip
REQUESTS = (
    b"GET /%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    b"GET /play HTTP/1.1\r\nHost: %s\r\nOrigin: http://evil.example\r\nUpgrade: websocket\r\n"
    b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAA\r\n\r\n",
    b"POST /act HTTP/1.1\r\nHost: %s\r\nContent-Length: -1\r\n\r\n",
    b"PUT /act HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n",
    b"POST /%s HTTP/9.9\r\n\r\n",
)
BODIES = (
    b"", b"null", b"[]", b"{", b'{"observation": null}', b'{"observation": [1, 2, 3]}',
    b'{"observation": [1, 2, 3, 1e999]}', b'{"observation": [0, 0, 0, 0], "state": [1]}',
    b'{"observation": {"a": 1}}', b'{"observation": ' + b"[" * 5000,
)  # fmt: skip


@dataclass
class Tally:
    """What an attacker has sent, and what came back."""

    sent: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    untyped: list[str] = field(default_factory=list)
    """Answers that are none, with what they followed."""


def main() -> None:
    """Attack a served policy; exits with 1 if it was harmed."""
    arguments = parser(__doc__)
    arguments.add_argument("--recorded", action="store_true", help="by a service that records")
    arguments.add_argument("--messages", type=int, default=1_000_000)
    arguments.add_argument("--seed", type=int, default=0)
    args = arguments.parse_args()

    compile_package()
    with tempfile.TemporaryDirectory() as folder:
        agent = cartpole_agent(Path(folder))
        if args.recorded:
            with recording(agent) as recorded:
                logged = LoggedGame(recorded.served.port, agent)
                result = attack(logged, recorded.served, args.messages, args.seed)
                result |= recorded.check(logged)
        else:
            with serving(agent) as served:
                compared = ComparedGame(served.port, agent)
                result = attack(compared, served, args.messages, args.seed)

    name = "hostile_games_recorded" if args.recorded else "hostile_games"
    rows = [["figure", "value"], *([name, value] for name, value in result.items())]
    finish(name, {"seed": args.seed, **result}, rows, args)
    sys.exit(0 if result["sound"] and result.get("slots_sound", True) else 1)


def attack(honest: HonestGame, served: Served, messages: int, seed: int) -> dict[str, Any]:
    """Returns what happened while so many messages were sent, and an honest game played."""
    context = mp.get_context("spawn")
    count: Synchronized[int] = context.Value("q", 0)
    results: Any = context.Queue()
    share = messages // ATTACKERS
    attackers = [
        context.Process(
            target=run_attacker, args=(served.port, share, seed + number, count, results)
        )
        for number in range(ATTACKERS)
    ]
    for attacker in attackers:
        attacker.start()

    # The honest game plays until the attackers are done.
    began_s = time.monotonic()
    began_processor_s = processor_time(served)
    early_nbytes = None
    tallies: list[Tally] = []
    while len(tallies) < ATTACKERS:
        honest.play()
        if early_nbytes is None and count.value > messages / 10:
            early_nbytes = served.process.memory_info().rss
        if not results.empty():
            tallies.append(results.get())
        assert all(attacker.exitcode in {None, 0} for attacker in attackers), "an attacker died"
    took_s = time.monotonic() - began_s
    for attacker in attackers:
        attacker.join()

    growth_nbytes = served.process.memory_info().rss - (early_nbytes or 0)
    untyped = [text for tally in tallies for text in tally.untyped]
    p50_ms, p99_ms = np.percentile(honest.times_ms, [50, 99])
    return {
        "messages": count.value,
        "messages_per_s": count.value / took_s,
        "processor_us": 1e6 * (processor_time(served) - began_processor_s) / count.value,
        "sent": dict(sum((tally.sent for tally in tallies), Counter())),
        "answers": dict(sum((tally.answers for tally in tallies), Counter())),
        "untyped": untyped[:20],
        "growth_after_a_tenth_mb": growth_nbytes / 1e6,
        "honest_decisions": HONEST_SEATS * len(honest.times_ms),
        "honest_wrong": honest.wrong,
        "honest_p50_ms": float(p50_ms),
        "honest_p99_ms": float(p99_ms),
        "sound": not untyped and growth_nbytes < FLAT_NBYTES and not honest.wrong,
    }


class HonestGame:
    """A game that harms nobody, and has its actions checked."""

    def __init__(self, port: int, observations: Rows) -> None:
        self.wrong = 0
        """Messages with an action that is wrong."""
        self.times_ms: list[float] = []
        """From each message until its last answer."""
        self._game = Game(port, observations)

    def play(self) -> None:
        """Send one message of all seats, and wait for the answers."""
        message = self._next_message()
        began_s = time.perf_counter()
        self._game.socket.sendall(message)
        actions: dict[int, int] = {}
        while len(actions) < HONEST_SEATS:
            actions |= self._game.read(with_actions=True)
        self.times_ms.append(1e3 * (time.perf_counter() - began_s))
        self.wrong += not self._are_right(actions)
        time.sleep(HONEST_PAUSE_S)

    def _next_message(self) -> bytes:
        """Returns the next STEP."""
        raise NotImplementedError

    def _are_right(self, actions: dict[int, int]) -> bool:
        """Whether these are the actions of the seats, by their number."""
        raise NotImplementedError


class ComparedGame(HonestGame):
    """A game whose actions are compared with those of the policy in this process."""

    def __init__(self, port: int, agent: Agent) -> None:
        observations = agent.observations(HONEST_SEATS)
        super().__init__(port, observations)
        actions, _ = agent.policy(observations)
        self._expected = dict(enumerate(actions.tolist()))
        self.wrong += not self._are_right(self._game.actions)

    def _next_message(self) -> bytes:
        return self._game.message

    def _are_right(self, actions: dict[int, int]) -> bool:
        return actions == self._expected


class LoggedGame(HonestGame):
    """A game that keeps what it was answered, for the comparison with what was recorded.

    Seat s shows ``[MARK + s, n, 0, 0]`` in its n-th row, and gets the reward n / 1000 for what it
    did there. Its episode has no end.
    """

    def __init__(self, port: int, agent: Agent) -> None:
        super().__init__(port, self._observations(0))
        self.actions: list[dict[int, int]] = [self._game.actions]
        """Of each row, by seat."""

    def close(self) -> None:
        """Leave."""
        self._game.close()

    def _next_message(self) -> bytes:
        number = len(self.actions)
        rewards = [(number - 1) / 1000] * HONEST_SEATS
        return step_message(range(HONEST_SEATS), self._observations(number), rewards=rewards)

    def _are_right(self, actions: dict[int, int]) -> bool:
        self.actions.append(actions)
        return {*actions.values()} <= {0, 1}

    def _observations(self, number: int) -> Rows:
        """Returns what the seats show in a row."""
        rows = np.zeros((HONEST_SEATS, 4), np.float32)
        rows[:, 0] = MARK + np.arange(HONEST_SEATS)
        rows[:, 1] = number
        return rows


class HonestRow(NamedTuple):
    """A row of the honest game that was recorded."""

    seat: int
    number: int
    action: int
    reward: float


@dataclass
class Findings:
    """What was recorded."""

    slots: int = 0
    steps: int = 0
    unsound: Counter[str] = field(default_factory=Counter)
    """What is wrong with how many slots."""
    honest: list[HonestRow] = field(default_factory=list)


class SlotCheck:
    """Checks slots of one seat each, as a learner gets them."""

    def __init__(self) -> None:
        self.findings = Findings()
        # Of each stream: its sequence and steps so far, and whether an episode has just ended.
        self._sequence: dict[int, int] = {}
        self._produced: dict[int, int] = {}
        self._has_ended: dict[int, bool] = {}

    def take(self, slot: Slot) -> None:
        """Check a slot."""
        columns = {name: array.reshape(len(array), -1) for name, array in slot.columns.items()}
        alive = columns["alive"][:, 0]
        self.findings.slots += 1
        self.findings.steps += int(alive.sum())
        self.findings.unsound.update(
            [*self._faults_of_header(slot, alive), *self._faults_of_rows(slot, columns, alive)]
        )

        seats = columns["obs"][: len(alive), 0] - MARK
        of_honest = alive & (seats >= 0) & (seats < HONEST_SEATS)
        for t in np.flatnonzero(of_honest).tolist():
            self.findings.honest.append(
                HonestRow(
                    seat=int(seats[t]),
                    number=int(columns["obs"][t, 1]),
                    action=int(columns["action"][t, 0]),
                    reward=float(columns["reward"][t, 0]),
                )
            )

    def _faults_of_header(self, slot: Slot, alive: Rows) -> Iterator[str]:
        """Yield what is wrong with the header."""
        actor = int(slot.header["actor"])
        steps = int(alive.sum())
        produced = self._produced.get(actor, 0) + steps
        if slot.header["steps"] != steps or slot.header["produced_steps"] != produced:
            yield "steps"
        if slot.header["sequence"] != self._sequence.get(actor, -1) + 1:
            yield "sequence"
        self._sequence[actor] = int(slot.header["sequence"])
        self._produced[actor] = int(slot.header["produced_steps"])

    def _faults_of_rows(self, slot: Slot, columns: dict[str, Rows], alive: Rows) -> Iterator[str]:
        """Yield what is wrong with the rows."""
        for name, array in columns.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                yield f"{name} is not finite"
        if not np.isin(columns["action"], (0, 1)).all():
            yield "action"
        if (np.abs(columns["reward"]) > MOST_REWARD).any():
            yield "reward"
        if columns["reward"][~alive].any():
            yield "a reward of a row that is no step"

        ended = (columns["terminated"] | columns["truncated"])[:, 0].astype(bool)
        if (ended & ~alive).any():
            yield "an end of a row that is no step"
        if (columns["episode_length"][ended, 0] < 1).any():
            yield "the length of an episode"
        actor = int(slot.header["actor"])
        follows_end = np.append(self._has_ended.get(actor, False), ended[:-1])
        if (follows_end & alive).any():
            yield "a step behind an end"
        self._has_ended[actor] = bool(ended[-1])


class Recorded(NamedTuple):
    """A service that records, and the process that checks its slots."""

    served: Served
    stop: Event
    findings: Connection

    def check(self, honest: LoggedGame) -> dict[str, Any]:
        """Returns what the slots have held, compared with the log of the honest game."""
        honest.close()
        self.stop.set()
        assert self.findings.poll(WAIT_S), "the check of slots has not ended"
        findings: Findings = self.findings.recv()

        wrong = 0
        numbers: dict[int, list[int]] = {seat: [] for seat in range(HONEST_SEATS)}
        for row in findings.honest:
            is_right = row.action == honest.actions[row.number][row.seat]
            reward = float(np.float32(row.number / 1000))
            wrong += not is_right or row.reward != reward
            numbers[row.seat].append(row.number)
        # The outcome of the last action is not known, as the game leaves.
        rows = [*range(len(honest.actions) - 1)]
        missing = sum(found != rows for found in numbers.values())
        return {
            "slots": findings.slots,
            "steps": findings.steps,
            "unsound_slots": dict(findings.unsound),
            "honest_rows": len(findings.honest),
            "honest_rows_wrong": wrong,
            "honest_seats_with_other_rows": missing,
            "slots_sound": not findings.unsound and not wrong and not missing,
        }


@contextmanager
def recording(agent: Agent) -> Iterator[Recorded]:
    """Run a service that records, and a process that checks its slots and frees them."""
    agent.policy.sample = True
    config = agent.policy.config
    # Rewards are recorded as they came, so that they can be compared.
    algo = config.algo.model_copy(update={"reward_scale": 1.0, "reward_clip": None})
    config = config.model_copy(update={"algo": algo})
    stop = FORK.Event()
    findings, findings_end = FORK.Pipe(duplex=False)
    check = partial(check_slots, stop=stop, findings=findings_end)
    with recording_service(agent, config, SLOTS, check) as served:
        yield Recorded(served, stop, findings)


def check_slots(store: SlotStore, stop: Event, findings: Connection) -> None:
    """Check slots and free them, until ``stop`` is set and none has come for a while."""
    check = SlotCheck()
    is_last = False
    while not is_last:
        is_last = stop.is_set()
        for index in take_slots(store, QUIET_S):
            check.take(store.slots[index])
    findings.send(check.findings)


def run_attacker(
    port: int, messages: int, seed: int, count: Synchronized[int], results: Any
) -> None:
    """Send so many messages, which are counted in ``count``; puts a `Tally` into ``results``."""
    attacker = Attacker(port, random.Random(seed))
    sent = 0
    while sent < messages:
        sent_now = attacker.send_burst()
        sent += sent_now
        with count.get_lock():
            count.value += sent_now
    results.put(attacker.tally)


class Attacker:
    """Sends bursts over a connection, and opens another when it is closed."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.tally = Tally()
        self._port = port
        self._rng = rng
        self._socket: socket.socket | None = None
        self._unread = b""

    def send_burst(self) -> int:
        """Send messages, read the answers, and return how many were sent."""
        rng = self._rng
        if rng.random() < HTTP_SHARE:
            self._request()
            return 1
        if rng.random() < 0.01:
            self._greet_badly()
            return 1

        if self._socket is None:
            self._socket = self._connect(hello_message({"protocol": 1, "seats": SEATS}))
            assert next(self._answers())[0] == WELCOME
        seats = [*range(PROBE)]
        while seats:
            begin = step_message(
                seats, np.zeros((len(seats), 4), "<f4"), flags=[FIRST] * len(seats)
            )
            refused = self._expect_acts(begin, seats)
            if refused is None:
                return 1
            # A service that records may have held the row of a seat, which then was not idle.
            seats = refused

        burst = [hostile_step(rng, [2 * number, 2 * number + 1]) for number in range(BURST)]
        names = [name for name, _ in burst]
        data = b"".join([message for _, message in burst])
        if rng.random() < FATAL_SHARE:
            name, message = fatal_message(rng)
            self._finish(name, data + message)
        else:
            name = "sound"
            probe = step_message([PROBE], np.zeros((1, 4), "<f4"), flags=[FIRST])
            self._expect_acts(data + probe, [PROBE])
        self.tally.sent.update([*names, name])
        return BURST + 2

    def _greet_badly(self) -> None:
        """Begin a connection with something that is no HELLO, or one that must be refused."""
        self._close()
        name, message = bad_hello(self._rng)
        self._socket = self._connect(b"")
        self._finish(name, message)
        self.tally.sent[name] += 1

    def _request(self) -> None:
        """Send a request of HTTP, which gets a status below 500."""
        rng = self._rng
        host = b"127.0.0.1:%d" % self._port
        request = rng.choice(REQUESTS).replace(b"%s", host)
        if rng.random() < 0.5:
            body = rng.choice(BODIES)
            head = b"POST /act HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n" % host
            head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
            request = head + body
        connection = self._connect(request)
        with connection:
            answer = read_to_end(connection)
        self.tally.sent["http"] += 1
        status = answer[9:12].decode(errors="replace")
        if answer.startswith(b"HTTP/1.1 ") and status < "500":
            self.tally.answers[f"status {status}"] += 1
        else:
            self.tally.untyped.append(f"{answer[:60]!r} to {request[:80]!r}")

    def _expect_acts(self, data: bytes, seats: Sequence[int]) -> list[int] | None:
        """Send messages, and count the answers until these seats have theirs.

        Returns the seats that were refused; None if a STEP has ended the connection with a FAULT.
        """
        assert self._socket is not None
        self._socket.sendall(data)
        waiting = set(seats)
        refused: list[int] = []
        for kind, body in self._answers():
            self._count(kind, body, "steps")
            if kind == ACT:
                waiting -= {*acting_seats(body)}
            elif kind == FAULT and (seat := json.loads(body)["seat"]) in waiting:
                waiting.remove(seat)
                refused.append(seat)
            if not waiting:
                return refused
        self._close()
        return None

    def _finish(self, name: str, data: bytes) -> None:
        """Send messages of which the last, ``name``, ends the connection."""
        assert self._socket is not None
        self._socket.sendall(data)
        if name.startswith("half"):
            self._close()
            return
        if name == "flipped":
            # What is flipped may leave a message sound, or too short for its length.
            self._socket.shutdown(socket.SHUT_WR)
        last_kind = 0
        for kind, body in self._answers():
            self._count(kind, body, name)
            last_kind = kind
        if last_kind not in {FAULT, END} and name != "flipped":
            self.tally.untyped.append(f"closed after kind {last_kind}, to {name}")
        self._close()

    def _count(self, kind: int, body: bytes, name: str) -> None:
        """Count an answer to messages of this ``name``."""
        if kind == ACT:
            self.tally.answers["act"] += 1
            return
        try:
            content = json.loads(body)
            assert kind in {FAULT, END, WELCOME}
            if kind == FAULT:
                assert content.keys() == {"seat", "field", "error"}
                assert content["field"] in FIELDS
                assert content["error"]
                self.tally.answers[f"fault {content['field']}"] += 1
        except (ValueError, AssertionError, KeyError):
            self.tally.untyped.append(f"kind {kind}, {body[:80]!r}, to {name}")

    def _answers(self) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and the body of each message, until the connection is closed."""
        assert self._socket is not None
        while True:
            while len(self._unread) >= 8:
                length, kind = struct.unpack_from("<II", self._unread)
                if len(self._unread) < 4 + length:
                    break
                body = self._unread[8 : 4 + length]
                self._unread = self._unread[4 + length :]
                yield kind, body
            try:
                data = self._socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return
            self._unread += data

    def _connect(self, first: bytes) -> socket.socket:
        """Returns a connection that has sent its first bytes."""
        self._unread = b""
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=WAIT_S)
        connection.sendall(first)
        return connection

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def hostile_step(rng: random.Random, seats: list[int]) -> tuple[str, bytes]:
    """Returns a STEP of two acting ``seats`` whose first row is wrong, and what is wrong."""
    flags = [0, rng.choice((0, FIRST, 2, 4))]
    rewards = [0.0, 0.0]
    rows = np.zeros((2, 4), "<f4")
    name = rng.choice(("seat", "order", "flags", "reward", "observation"))
    match name:
        case "seat":
            seats = [rng.choice((SEATS, 2**16, 2**31, 2**32 - 1)), seats[1]]
        case "order":
            # The seat of another message, which has stepped already or is to step.
            seats = [rng.randrange(PROBE) // 2 * 2, seats[1]]
        case "flags":
            flags[0] = rng.randrange(256)
        case "reward":
            rewards[0] = rng.choice(FLOATS)
        case "observation":
            rows[0, rng.randrange(4)] = rng.choice(FLOATS)
    return name, step_message(seats, rows, flags=flags, rewards=rewards)


def fatal_message(rng: random.Random) -> tuple[str, bytes]:
    """Returns a message that ends the connection, and its name."""
    sound = step_message([0], np.zeros((1, 4), "<f4"), flags=[FIRST])
    name = rng.choice(("length", "long", "kind", "count", "json", "hello", "flipped", "half"))
    match name:
        case "length":
            # Shorter than the message is; what remains is read as another.
            return name, struct.pack("<II", rng.choice((0, 1, 3, 5, 7, 12)), STEP) + bytes(40)
        case "long":
            return name, struct.pack("<II", rng.choice((2**24 + 1, 2**31, 2**32 - 1)), STEP)
        case "kind":
            kind = rng.choice([*NUMBERS[:1], *NUMBERS[3:], WELCOME, ACT, FAULT])
            return name, struct.pack("<II", 8, kind) + bytes(4)
        case "count":
            return name, sound[:8] + struct.pack("<I", rng.choice(NUMBERS[2:])) + sound[12:]
        case "json":
            text = rng.choice(STRANGE_TEXTS)
            return name, struct.pack("<II", 4 + len(text), HELLO) + text
        case "hello":
            return name, hello_message({"protocol": 1})
        case "half":
            return name, sound[: rng.randrange(1, len(sound))]
    changed = bytearray(sound)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return name, bytes(changed)


def bad_hello(rng: random.Random) -> tuple[str, bytes]:
    """Returns the first message of a connection that must be refused, and its name."""
    if rng.random() < 0.5:
        text = rng.choice(STRANGE_TEXTS)
        return "first json", struct.pack("<II", 4 + len(text), HELLO) + text
    content: dict[str, Any] = {"protocol": 1, "seats": 1}
    name = rng.choice(("protocol", "seats", "observation", "action"))
    # None and 1 are sound values of some fields. True is equal to 1.
    content[name] = rng.choice([value for value in STRANGE_VALUES if value not in (None, 1)])
    return f"hello {name}", hello_message(content)


def acting_seats(body: bytes) -> tuple[int, ...]:
    """Returns the seats of an ACT."""
    (count,) = struct.unpack_from("<I", body)
    return struct.unpack_from(f"<{count}I", body, 4)


def read_to_end(connection: socket.socket) -> bytes:
    """Returns all that arrives until the connection is closed."""
    content = b""
    try:
        while data := connection.recv(1 << 16):
            content += data
    except ConnectionError:
        pass
    return content


if __name__ == "__main__":
    main()

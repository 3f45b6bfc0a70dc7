"""How fast `penstock serve` decides for games: latency, and decisions a second.

Each row is a served process of its own and a client in this process, over loopback. A client asks
for a seat's next decision as soon as it has the last one, unless it is paced.

    latency    from sending the STEP of one observation until its ACT is read, for CartPole's MLP
               and for the Nature CNN of docs/agents/pong: of one client, of 64 clients at once, and
               of 64 that ask 15 times a second each, as Atari's games do with a skip of 4 frames
    rates      one message a decision, of 256 seats on one connection and on 256 connections,
               against a pyzmq ROUTER that echoes the same bytes to DEALER sockets, in turns
    rows       256 seats in each message, of one game and of two

The actions of each policy are compared with those of `penstock.load_policy` first. Where the
machine is shared, the processor time of the server for a decision is the better figure.

    python benchmarks/serve.py [--seconds 3] [--rounds 5] [--json] [--save]
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import zmq

import penstock
from common import ONE_THREAD, compile_package, finish, parser
from penstock.algos.samples import network_shape
from penstock.envs import make

# The kinds of messages, and the flag of a row that begins an episode.
HELLO = 1
WELCOME = 2
STEP = 3
ACT = 4
FIRST = 1
HEAD = struct.Struct("<III")  # length, kind, number of rows
SEATS = 256
CLIENTS = 64
PACE = 15  # decisions a second of a paced client
WAIT_S = 60
PONG = Path(__file__).parents[1] / "docs" / "agents" / "pong.safetensors"

Rows = npt.NDArray[Any]


class Agent(NamedTuple):
    """A policy, and the file that is served."""

    path: Path
    policy: penstock.LoadedPolicy

    @classmethod
    def load(cls, path: Path) -> Agent:
        return cls(path, penstock.load_policy(path, sample=False))

    def observations(self, count: int) -> Rows:
        """Returns random observations ``[count, *shape]``, the same each time."""
        space = self.policy.observation_space
        assert space.shape is not None
        rng = np.random.default_rng(0)
        if space.dtype == np.uint8:
            return rng.integers(0, 256, (count, *space.shape), np.uint8)
        return rng.standard_normal((count, *space.shape), np.float32)


class Served(NamedTuple):
    """A process that answers at a port of this host."""

    port: int
    process: psutil.Process


class Rate(NamedTuple):
    """What a server did in a period."""

    messages_per_s: float
    processor_us: float
    """Its processor time for a message."""


class Game:
    """One connection to `penstock serve`. Its seats play one episode without end."""

    def __init__(self, port: int, observations: Rows) -> None:
        """Connect with a seat for each of the ``observations``, and begin their episodes."""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread = b""
        seats = range(len(observations))
        self.socket.sendall(hello_message({"protocol": 1, "seats": len(seats)}))
        welcome = self._read_welcome()
        assert welcome["row_nbytes"] == observations[0].nbytes, welcome

        self.messages = [step_message([seat], observations[[seat]]) for seat in seats]
        """The STEP of each seat alone."""
        self.message = step_message(seats, observations)
        """The STEP of all seats."""

        # The first answers have the actions of all seats.
        self.actions: dict[int, int] = {}
        self._action_nbytes = welcome["action_nbytes"]
        self.socket.sendall(step_message(seats, observations, flags=[FIRST] * len(seats)))
        while len(self.actions) < len(seats):
            self.actions |= self.read(with_actions=True)

    def send(self, seats: Sequence[int]) -> None:
        """Send one message for each of these seats."""
        self.socket.sendall(b"".join([self.messages[seat] for seat in seats]))

    def receive(self) -> list[int]:
        """Returns the seats of the ACTs that have arrived, perhaps none; waits for bytes."""
        return [*self.read()]

    def receive_all(self) -> None:
        """Wait for the ACTs of all seats."""
        waiting = len(self.messages)
        while waiting:
            waiting -= len(self.receive())

    def read(self, *, with_actions: bool = False) -> dict[int, int]:
        """Returns what `receive` does, with the actions if asked for, else 0."""
        data = self._unread + self.socket.recv(1 << 20)
        answers: dict[int, int] = {}
        offset = 0
        while len(data) - offset >= HEAD.size:
            length, kind, count = HEAD.unpack_from(data, offset)
            end = offset + 4 + length
            if end > len(data):
                break
            assert kind == ACT, data[offset:end]
            seats = struct.unpack_from(f"<{count}I", data, offset + HEAD.size)
            actions: Sequence[int] = bytes(count)
            if with_actions:
                first = end - count * self._action_nbytes
                actions = np.frombuffer(data, "<i8", count, first).tolist()
            answers |= zip(seats, actions, strict=True)
            offset = end
        self._unread = data[offset:]
        return answers

    def close(self) -> None:
        self.socket.close()

    def _read_welcome(self) -> dict[str, Any]:
        with self.socket.makefile("rb", buffering=0) as file:
            length, kind = struct.unpack("<II", file.read(8))
            content = b""
            while len(content) < length - 4:
                content += file.read(length - 4 - len(content))
        assert kind == WELCOME, content
        welcome: dict[str, Any] = json.loads(content)
        return welcome


def main() -> None:
    """Measure everything, or in a child process echo."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=3.0, help="of each rate")
    arguments.add_argument("--rounds", type=int, default=5, help="rates of each kind, in turns")
    arguments.add_argument("--calls", type=int, default=2000, help="of each latency, of one client")
    arguments.add_argument("--echo", action="store_true", help="be the echo")
    args = arguments.parse_args()
    if args.echo:
        echo()
        return

    compile_package()
    with tempfile.TemporaryDirectory() as folder:
        cartpole = cartpole_agent(Path(folder))
        latencies = {
            "cartpole": measure_latency(cartpole, args.calls),
            "pong": measure_latency(Agent.load(PONG), args.calls // 4),
        }
        rates = measure_rates(cartpole, args.seconds, args.rounds)

    rows: list[list[Any]] = [
        ["", "p50 ms", "p99 ms", "decisions/s", "of the echo", "processor us"],
        *(
            [f"{name}, {clients}", times["p50_ms"], times["p99_ms"], None, None, None]
            for name, measured in latencies.items()
            for clients, times in measured.items()
        ),
        *(
            [name, None, None, rate["decisions_per_s"], rate.get("ratio"), rate["processor_us"]]
            for name, rate in rates.items()
        ),
    ]
    finish("serve", {"latency": latencies, "rates": rates}, rows, args)


def cartpole_agent(folder: Path) -> Agent:
    """Returns a policy for CartPole, whose weights are random: any take as long."""
    config = penstock.resolve("cartpole")
    env = make(config.env, 1)
    env.close()
    layout = network_shape(config, env.info).layout
    policy = penstock.LoadedPolicy(
        config,
        0.3 * np.random.default_rng(0).standard_normal(layout.size, np.float32),
        env.info.spaces,
        env.info,
        sample=False,
        seed=0,
    )
    path = folder / "cartpole.safetensors"
    policy.save(path)
    return Agent(path, policy)


def check_actions(agent: Agent, served: Served) -> None:
    """Compare the served actions with those of the policy in this process."""
    observations = agent.observations(32)
    game = Game(served.port, observations)
    game.close()
    actions, _ = agent.policy(observations)
    answers = [game.actions[seat] for seat in range(32)]
    assert answers == actions.tolist(), (answers, actions)


def measure_latency(agent: Agent, calls: int) -> dict[str, dict[str, float]]:
    """Returns the latency of one client and of several, by their number."""
    with serving(agent) as served:
        check_actions(agent, served)
        return {
            "1 client": client_latency(agent, served, 1, calls),
            f"{CLIENTS} clients": client_latency(agent, served, CLIENTS, calls),
            f"{CLIENTS} clients, {PACE}/s each": paced_latency(agent, served, calls),
        }


def client_latency(agent: Agent, served: Served, clients: int, calls: int) -> dict[str, float]:
    """Returns the latency of clients with one seat each, all at once."""
    observations = agent.observations(clients)
    games = [Game(served.port, observations[[number]]) for number in range(clients)]
    times_ns: list[int] = []
    with selectors.DefaultSelector() as selector:
        sent_ns = {}
        for game in games:
            selector.register(game.socket, selectors.EVENT_READ, game)
            sent_ns[game] = time.perf_counter_ns()
            game.send([0])
        while len(times_ns) < calls * min(clients, 4):
            for key, _ in selector.select():
                game = key.data
                if game.receive():
                    received_ns = time.perf_counter_ns()
                    times_ns.append(received_ns - sent_ns[game])
                    sent_ns[game] = time.perf_counter_ns()
                    game.send([0])
    for game in games:
        game.close()

    return percentiles(times_ns)


def paced_latency(agent: Agent, served: Served, calls: int) -> dict[str, float]:
    """Returns the latency of `CLIENTS` clients that ask in turn, `PACE` times a second each.

    It counts from the time at which a client was to ask, also where that one was late.
    """
    observations = agent.observations(CLIENTS)
    games = [Game(served.port, observations[[number]]) for number in range(CLIENTS)]
    interval_ns = round(1e9 / (CLIENTS * PACE))
    began_ns = time.perf_counter_ns()
    times_ns: list[int] = []
    asked = 0
    due_ns: dict[Game, int] = {}  # of the clients that wait for an answer
    with selectors.DefaultSelector() as selector:
        for game in games:
            selector.register(game.socket, selectors.EVENT_READ, game)
        while len(times_ns) < calls:
            game = games[asked % CLIENTS]
            next_ns = began_ns + asked * interval_ns
            wait_ns = next_ns - time.perf_counter_ns()
            if wait_ns <= 0 and game not in due_ns:
                due_ns[game] = next_ns
                game.send([0])
                asked += 1
                continue
            # A client that is late waits for its answer first.
            for key, _ in selector.select(wait_ns / 1e9 if wait_ns > 0 else None):
                if key.data.receive():
                    times_ns.append(time.perf_counter_ns() - due_ns.pop(key.data))
    for game in games:
        game.close()
    return percentiles(times_ns)


def percentiles(times_ns: Sequence[int]) -> dict[str, float]:
    """Returns the latencies in ms, without the first tenth, which warms up."""
    times_ms = np.array(times_ns[len(times_ns) // 10 :]) / 1e6
    p50, p99 = np.percentile(times_ms, [50, 99])
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def measure_rates(agent: Agent, seconds: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the rates of all kinds, with medians over rounds in which each has its turn."""
    observations = agent.observations(SEATS)
    with ExitStack() as stack:
        served = stack.enter_context(serving(agent))
        echoing = stack.enter_context(echo_server())
        check_actions(agent, served)
        # One game of all seats, and games of one seat each; likewise sockets of the echo.
        together = Game(served.port, observations)
        apart = [Game(served.port, observations[[seat]]) for seat in range(SEATS)]
        second = Game(served.port, observations)
        message = together.messages[0][4:]  # ZeroMQ has lengths of its own
        context = stack.enter_context(zmq.Context())
        dealers = [dealer(context, echoing.port) for _ in range(SEATS + 1)]

        turns: dict[str, Callable[[], Rate]] = {
            "served, 1 connection": lambda: rate_of(
                served, seconds, lambda ends_s: play_messages(together, ends_s)
            ),
            "echo, 1 connection": lambda: rate_of(
                echoing, seconds, lambda ends_s: echo_messages(dealers[:1], message, ends_s)
            ),
            f"served, {SEATS} connections": lambda: rate_of(
                served, seconds, lambda ends_s: play_apart(apart, ends_s)
            ),
            f"echo, {SEATS} connections": lambda: rate_of(
                echoing, seconds, lambda ends_s: echo_messages(dealers[1:], message, ends_s)
            ),
            f"served, {SEATS} rows a message": lambda: rate_of(
                served, seconds, lambda ends_s: play_rows([together], ends_s)
            ),
            f"served, {SEATS} rows a message, 2 games": lambda: rate_of(
                served, seconds, lambda ends_s: play_rows([together, second], ends_s)
            ),
        }
        measured: dict[str, list[Rate]] = {name: [] for name in turns}
        for _ in range(rounds):
            for name, turn in turns.items():
                measured[name].append(turn())
        for game in (together, second, *apart):
            game.close()

    rates = {name: summary(runs) for name, runs in measured.items()}
    for connections in ("1 connection", f"{SEATS} connections"):
        served_name = f"served, {connections}"
        pairs = zip(measured[served_name], measured[f"echo, {connections}"], strict=True)
        ratios = [run.messages_per_s / echo_run.messages_per_s for run, echo_run in pairs]
        rates[served_name] |= {"ratio": statistics.median(ratios), "ratios": ratios}
    return rates


def summary(runs: Sequence[Rate]) -> dict[str, Any]:
    return {
        "decisions_per_s": statistics.median(run.messages_per_s for run in runs),
        "processor_us": statistics.median(run.processor_us for run in runs),
        "runs": [run.messages_per_s for run in runs],
    }


def rate_of(server: Served, seconds: float, play: Callable[[float], int]) -> Rate:
    """Returns the rate of the messages that ``play`` counts until a time of the monotonic clock."""
    processor_s = processor_time(server)
    began_s = time.monotonic()
    count = play(began_s + seconds)
    took_s = time.monotonic() - began_s
    used_s = processor_time(server) - processor_s
    return Rate(count / took_s, 1e6 * used_s / count)


def processor_time(server: Served) -> float:
    times = server.process.cpu_times()
    return float(times.user + times.system)


def play_messages(game: Game, ends_s: float) -> int:
    """Returns how many decisions one connection got, with one message for each."""
    game.send(range(SEATS))
    count = 0
    while time.monotonic() < ends_s:
        seats = game.receive()
        count += len(seats)
        game.send(seats)

    # The answers of the messages in flight are part of the period.
    game.receive_all()
    return count + SEATS


def play_apart(games: Sequence[Game], ends_s: float) -> int:
    """Returns how many decisions connections of one seat each got."""
    for game in games:
        game.send([0])
    count = 0
    for game in cycle(games):
        if game.receive():
            count += 1
            if time.monotonic() >= ends_s:
                break
            game.send([0])
    # That game has its answer; the others wait for theirs.
    for other in games:
        if other is not game:
            count += len(other.receive())
    return count


def play_rows(games: Sequence[Game], ends_s: float) -> int:
    """Returns how many decisions games got that send all their seats in one message."""
    for game in games:
        game.socket.sendall(game.message)
    count = 0
    for game in cycle(games):
        game.receive_all()
        count += SEATS
        if time.monotonic() >= ends_s:
            break
        game.socket.sendall(game.message)
    for other in games:
        if other is not game:
            other.receive_all()
            count += SEATS
    return count


def echo_messages(dealers: Sequence[Any], message: bytes, ends_s: float) -> int:
    """Returns how many echoes arrived of `SEATS` messages in flight, over one socket or many."""
    for dealer_socket in dealers:
        for _ in range(SEATS // len(dealers)):
            dealer_socket.send(message)
    count = 0
    for dealer_socket in cycle(dealers):
        dealer_socket.recv()
        count += 1
        if time.monotonic() >= ends_s:
            break
        dealer_socket.send(message)

    for other in dealers:
        in_flight = SEATS // len(dealers) - (other is dealer_socket)
        for _ in range(in_flight):
            other.recv()
            count += 1
    return count


def dealer(context: zmq.Context[zmq.Socket[bytes]], port: int) -> zmq.Socket[bytes]:
    dealer_socket = context.socket(zmq.DEALER)
    dealer_socket.linger = 0
    dealer_socket.rcvtimeo = 1000 * WAIT_S
    dealer_socket.connect(f"tcp://127.0.0.1:{port}")
    return dealer_socket


def echo() -> None:
    """Send each message back, until the process is ended."""
    router = zmq.Context().socket(zmq.ROUTER)
    print(router.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    while True:
        router.send_multipart(router.recv_multipart())


@contextmanager
def echo_server() -> Iterator[Served]:
    """Run the echo."""
    with subprocess.Popen([sys.executable, __file__, "--echo"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield Served(int(process.stdout.readline()), psutil.Process(process.pid))
        finally:
            process.kill()


@contextmanager
def serving(agent: Agent) -> Iterator[Served]:
    """Run `penstock serve`, in the environment that its users have."""
    variables = {name: text for name, text in os.environ.items() if name not in ONE_THREAD}
    command = [sys.executable, "-m", "penstock", "serve", str(agent.path)]
    command += ["--port", "0", "--greedy", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=variables) as process:
        assert process.stdout is not None
        try:
            address = json.loads(process.stdout.readline())["address"]
            port = int(address.rsplit(":", 1)[1].rstrip("/"))
            yield Served(port, psutil.Process(process.pid))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(WAIT_S)


def hello_message(content: dict[str, Any]) -> bytes:
    """Returns a HELLO with its length."""
    text = json.dumps(content).encode()
    return struct.pack("<II", 4 + len(text), HELLO) + text


def step_message(
    seats: Sequence[int],
    observations: Rows,
    *,
    flags: Sequence[int] | None = None,
    rewards: Sequence[float] | None = None,
) -> bytes:
    """Returns a STEP with its length; flags and rewards are 0 by default."""
    count = len(seats)
    message = struct.pack(f"<II{count}I", STEP, count, *seats) + bytes(flags or [0] * count)
    message += bytes(-len(message) % 4) + struct.pack(f"<{count}f", *(rewards or [0.0] * count))
    message += bytes(-len(message) % 8) + observations.tobytes()
    return struct.pack("<I", len(message)) + message


if __name__ == "__main__":
    main()

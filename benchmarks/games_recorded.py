"""What it costs to record games for a learner: the rate of a service that does, and of one that
only plays.

Both are the same service of CartPole's MLP with sampled actions, in processes of their own. A game
in this process has 256 seats on one connection and sends all of them in each message; as soon as it
has all actions it sends the next one. Its episodes have 50 rows, so that in each message about five
seats end theirs and five begin the next. The slots of the recording service are taken in by a third
process, as a learner would, which frees them at once. Rates are measured in turns; where the
machine is shared, the processor time of the service for a message is the better figure.

Memory is that of each service (unique set size) before and after a game of 2,048 seats has filled
a slot of each.

    python benchmarks/games_recorded.py [--seconds 3] [--rounds 5] [--json] [--save]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from common import compile_package, finish, parser
from penstock.serving.port import MOST_GAMES, Port
from penstock.serving.service import Service
from penstock.transport.shm.store import SlotStore
from recording_service import FORK, recording_service, serve_port, take_slots
from serve import SEATS, WAIT_S, Agent, Game, Rate, Served, cartpole_agent, rate_of, step_message

ROWS = 50  # of an episode
MANY_SEATS = 2048
SLOTS = 2 * MANY_SEATS
FIRST = 1
TERMINATED = 2


class EndlessGame:
    """A game whose episodes of all seats end and begin, each at its own time."""

    def __init__(self, port: int, agent: Agent, seats: int) -> None:
        observations = agent.observations(seats)
        self._game = Game(port, observations)  # has begun the first episodes
        self._turn = 1
        places = (np.arange(seats) * 7)[None] + np.arange(ROWS)[:, None]
        flags = np.select([places % ROWS == 0, places % ROWS == ROWS - 1], [FIRST, TERMINATED], 0)
        self._messages = [
            step_message(range(seats), observations, flags=row.tolist(), rewards=[1.0] * seats)
            for row in flags
        ]
        self._answers = np.count_nonzero(flags != TERMINATED, axis=1).tolist()

    def play(self, ends_s: float) -> int:
        """Returns how many messages were answered until a time of the monotonic clock."""
        count = 0
        while time.monotonic() < ends_s:
            self.play_one()
            count += 1
        return count

    def play_one(self) -> None:
        """Send one message, and wait for the answer of each seat that goes on."""
        turn = self._turn % ROWS
        self._turn += 1
        self._game.socket.sendall(self._messages[turn])
        waiting = self._answers[turn]
        while waiting:
            waiting -= len(self._game.receive())


def main() -> None:
    """Measure."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=3.0, help="of each rate")
    arguments.add_argument("--rounds", type=int, default=5, help="rates of each kind, in turns")
    args = arguments.parse_args()

    compile_package()
    with tempfile.TemporaryDirectory() as folder:
        agent = cartpole_agent(Path(folder))
        agent.policy.sample = True
        rates = measure_rates(agent, args.seconds, args.rounds)
        memory = {
            "seats": MANY_SEATS,
            "play_mb": memory_of_seats(agent, records=False),
            "record_mb": memory_of_seats(agent, records=True),
        }

    played, recorded = rates["play"], rates["record"]
    rows: list[list[Any]] = [
        [
            f"{SEATS} rows a message",
            "messages/s",
            "decisions/s",
            "processor us",
            "of play",
            f"MB of {MANY_SEATS} seats",
        ],
        ["play only", *figures(played), None, memory["play_mb"]],
        ["recording", *figures(recorded), recorded["ratio"], memory["record_mb"]],
        ["the same by processor time", *[None] * 3, recorded["processor_ratio"], None],
    ]
    finish("games_recorded", {"rates": rates, "memory": memory}, rows, args)


def figures(rate: dict[str, Any]) -> list[float]:
    """Returns what a row of the table shows of a rate."""
    return [rate["messages_per_s"], SEATS * rate["messages_per_s"], rate["processor_us"]]


def measure_rates(agent: Agent, seconds: float, rounds: int) -> dict[str, dict[str, Any]]:
    """Returns medians over rounds in which both services have their turn."""
    with ExitStack() as stack:
        servers = {
            "play": stack.enter_context(serving(agent, records=False)),
            "record": stack.enter_context(serving(agent, records=True)),
        }
        games = {name: EndlessGame(server.port, agent, SEATS) for name, server in servers.items()}
        runs: dict[str, list[Rate]] = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                runs[name].append(rate_of(server, seconds, games[name].play))

    pairs = [*zip(runs["record"], runs["play"], strict=True)]
    ratios = [record.messages_per_s / play.messages_per_s for record, play in pairs]
    processor_ratios = [play.processor_us / record.processor_us for record, play in pairs]
    rates: dict[str, dict[str, Any]] = {
        name: {
            "messages_per_s": statistics.median(rate.messages_per_s for rate in of_name),
            "processor_us": statistics.median(rate.processor_us for rate in of_name),
            "runs": [rate._asdict() for rate in of_name],
        }
        for name, of_name in runs.items()
    }
    rates["record"] |= {
        "ratio": statistics.median(ratios),
        "processor_ratio": statistics.median(processor_ratios),
    }
    return rates


def memory_of_seats(agent: Agent, *, records: bool) -> float:
    """Returns what many seats add to the memory of a service, in MB."""
    with serving(agent, records=records) as server:
        one = EndlessGame(server.port, agent, 1)
        one.play_one()
        previous_nbytes = server.process.memory_full_info().uss
        many = EndlessGame(server.port, agent, MANY_SEATS)
        for _ in range(agent.policy.config.actors.unroll + ROWS):
            many.play_one()
        nbytes = server.process.memory_full_info().uss
    return float(nbytes - previous_nbytes) / 1e6


@contextmanager
def serving(agent: Agent, *, records: bool) -> Iterator[Served]:
    """Run a service, and what takes in its slots if it records."""
    if records:
        with recording_service(agent, agent.policy.config, SLOTS, free_slots) as served:
            yield served
        return
    port, ready = FORK.Pipe(duplex=False)
    process = FORK.Process(target=serve, args=(agent, ready))
    process.start()
    try:
        assert port.poll(WAIT_S), "the service has not begun"
        yield Served(port.recv(), psutil.Process(process.pid))
    finally:
        process.kill()
        process.join()


def serve(agent: Agent, ready: Connection) -> None:
    """Serve until killed, without recording; the port goes to ``ready``."""
    serve_port(Port(Service(agent.policy), None, MOST_GAMES), ready, started=lambda: None)


def free_slots(store: SlotStore) -> None:
    """Take in slots and free them, until killed."""
    while True:
        for _ in take_slots(store, WAIT_S):
            pass


if __name__ == "__main__":
    main()

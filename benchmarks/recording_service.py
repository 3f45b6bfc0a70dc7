"""The service of `penstock serve-env` as a process of a benchmark, without a run around it."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import psutil

import penstock
from penstock.algos.registry import algorithm
from penstock.algos.samples import slot_spec
from penstock.core.descriptors import wait_readable
from penstock.core.params import Stamp
from penstock.core.web.listen import Listen
from penstock.serving.game_recorder import GameRecorder
from penstock.serving.port import MOST_GAMES, Port
from penstock.serving.server import make_server
from penstock.serving.service import MOST_SEATS, Service
from penstock.transport.shm.store import SlotStore, drain_event
from serve import WAIT_S, Agent, Served

FORK = multiprocessing.get_context("fork")


@contextmanager
def recording_service(
    agent: Agent, config: penstock.Config, slots: int, learn: Callable[[SlotStore], None]
) -> Iterator[Served]:
    """Run a service that records slots of one seat each, and a process that takes them in.

    Args:
        agent: decides.
        config: of the slots; its ``actors.envs`` becomes 1.
        slots: of the learner.
        learn: takes in slots and frees them, until it is killed.
    """
    actors = config.actors.model_copy(update={"envs": 1})
    config = config.model_copy(update={"actors": actors})
    store = SlotStore(slot_spec(config, agent.policy.info), slots, lanes=1)
    lane = store.open_lane(want=slots)
    port, ready = FORK.Pipe(duplex=False)
    service = FORK.Process(target=_serve, args=(agent, config, store, lane, ready))
    processes = [service, FORK.Process(target=learn, args=(store,))]
    for process in processes:
        process.start()
    try:
        assert port.poll(WAIT_S), "the service has not begun"
        yield Served(port.recv(), psutil.Process(service.pid))
    finally:
        for process in processes:
            process.kill()
            process.join()
        store.close()


def take_slots(store: SlotStore, wait_s: float) -> Iterator[int]:
    """Yield the index of each filled slot, which is freed after it; ends after a quiet while."""
    while wait_readable(store.filled_event, wait_s):
        drain_event(store.filled_event)
        store.collect()
        while store.ready:
            index = store.ready.popleft()
            yield index
            store.release(index)


def _serve(
    agent: Agent, config: penstock.Config, store: SlotStore, lane: int, ready: Connection
) -> None:
    """Serve until killed; the port goes to ``ready``."""
    writer = store.local_writer(lane)
    recorder = GameRecorder(
        config,
        store.geometry.spec,
        MOST_SEATS,
        writer,
        first_actor=0,
        incarnation=0,
        process=partial(algorithm(config.algo).process, config.algo),
    )
    service = Service(agent.policy, recorder=recorder)
    service.load(agent.policy._weights, Stamp(0, 1))
    port = Port(service, None, MOST_GAMES)

    def on_slots_lent() -> None:
        """Go on with the seats that were held."""
        drain_event(writer.event)
        if recorder.publish_waiting():
            port.turn_soon()

    serve_port(
        port, ready, lambda: asyncio.get_running_loop().add_reader(writer.event, on_slots_lent)
    )


def serve_port(port: Port, ready: Connection, started: Callable[[], object]) -> None:
    """Serve at any free port until killed; its number goes to ``ready``, and ``started`` is called
    in the loop.
    """
    listen = Listen(port=0)
    server = make_server(port, listen, started=started, ended=lambda figures: None)
    listener = listen.bind()
    ready.send(listener.getsockname()[1])
    server.run([listener])

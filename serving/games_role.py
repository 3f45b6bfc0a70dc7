"""The service of `penstock serve-env`: games play on its port, and a learner trains on that.

It is a connector: attached to its learner's memory by a lane, it fills slots with what games play
(`game_recorder.py`), and decides for them by the newest weights on the learner's board
(`service.py`). One loop does all that, and so its heartbeat. When the learner ends, games are told
to connect again and the process is started anew, as their episodes so far are of a learner that is
gone.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import socket
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from penstock.algos.registry import algorithm
from penstock.autotune.forms import with_acting_form
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.memory import TRIM_S, give_back_memory, keep_freed_memory
from penstock.core.notes import note_logger
from penstock.core.params import Float32, Stamp
from penstock.core.role import EXIT_REJOIN, RoleContext
from penstock.core.web.listen import listen_at
from penstock.envs import EnvInfo, probe
from penstock.envs.make import FirstIndex
from penstock.evaluation.loaded_policy import LoadedPolicy
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase
from penstock.serving.game_recorder import GameRecorder
from penstock.serving.opponents import Opponents, make_opponents
from penstock.serving.port import Game, Port
from penstock.serving.server import (
    check_packages,
    connection_limits,
    connection_note,
    make_server,
    open_listener,
)
from penstock.serving.service import MOST_SEATS, DecidedRows, Service
from penstock.transport.shm.link import ShmLink, attach_lane
from penstock.transport.shm.store import SlotWriter, drain_event

logger = note_logger(__name__)

# The longest time between two heartbeats.
TICK_S = 0.1
# Of slow games few rows arrive together, and a turn for each takes a third of a core at 2,000 rows
# a second. So they wait for others: for this share of the mean time between two rows of a seat,
# within these bounds. Games that are fast notice nothing.
PAUSE_SHARE = 0.01
PAUSES_S = (0.0005, 0.005)
# A predecessor that was killed, or is presumed dead, may hold the port for a moment.
PORT_PATIENCE_S = 5.0
# The bits of an actor's id below the index of the connector: the place of a seat.
PLACE_BITS = 32


def run(ctx: RoleContext) -> None:
    """Serve games until asked to stop: the main function of the role.

    Exits with EXIT_REJOIN when the learner is gone.
    """
    config = ctx.config
    assert config is not None
    assert ctx.address is not None
    check_packages("penstock serve-env")
    keep_freed_memory()
    ctx.status.begin(Phase.ENVIRONMENT)
    info = probe(config.env, config.actors.env_threads, FirstIndex.LEARNER + ctx.learner)

    ctx.status.begin(Phase.WAITING)
    link = attach_lane(ctx)
    if link is None:
        return
    with closing(link):
        config, note = with_acting_form(config, info)
        if note and ctx.index == 0:
            logger.info("%s", note)
        opponents = _opponents(ctx, config, info, link)
        if opponents is None or _wait_for_opponents(ctx, opponents, link):
            GamesProcess(ctx, config, info, link, opponents).run()
    if not ctx.stopping():
        raise SystemExit(EXIT_REJOIN)


def _opponents(ctx: RoleContext, config: Config, info: EnvInfo, link: ShmLink) -> Opponents | None:
    """Returns those who play some seats of the games, without weights; None if nobody does."""
    if not config.league.has_matches:
        return None
    entropy = [config.run.seed, ctx.index, ctx.incarnation, link.welcome.generation, 1]
    [seed] = np.random.SeedSequence(entropy).generate_state(1)
    return make_opponents(config, info, MOST_SEATS // info.seating.seats, int(seed))


def _wait_for_opponents(ctx: RoleContext, opponents: Opponents, link: ShmLink) -> bool:
    """Wait until each chair of the learner has weights; returns False if the learner ends before.

    A learner shows them before it listens, unless it is asked to stop.
    """
    while not opponents.refresh(link.read_weights):
        if ctx.stopping() or link.learner_gone():
            return False
        ctx.status.beat()
        time.sleep(TICK_S)
    return True


class LedgerSelector(selectors.DefaultSelector):
    """The selector of a loop, whose time in `select` is that of waiting."""

    def __init__(self, ledger: TimeLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events."""
        self._ledger.switch(Part.WAIT)
        events = super().select(timeout)
        self._ledger.switch(Part.RECEIVE)
        return events


class NewestWeights:
    """The weights of a service, which follow those on the learner's board."""

    def __init__(self, link: ShmLink, opponents: Opponents | None) -> None:
        """Read the weights of ``link``; a learner publishes before it listens.

        Those of ``opponents`` follow the learner's too.
        """
        self.values: Float32 = np.empty(link.welcome.layout.size, np.float32)
        """The flat vector of the network's parameters."""
        self._link = link
        self._opponents = opponents
        stamp = link.read_weights(self.values, None)
        assert stamp is not None, "the learner listens before it has published weights"
        self.stamp: Stamp = stamp

    def refresh(self) -> bool:
        """Read the weights if there are newer ones; returns whether there were."""
        if self._opponents is not None:
            self._opponents.refresh(self._link.read_weights)
        stamp = self._link.read_weights(self.values, self.stamp)
        if stamp is None:
            return False
        self.stamp = stamp
        return True


class LearningPort(Port):
    """Games whose policy learns: each turn is decided by the newest weights."""

    def __init__(
        self,
        service: Service,
        token: str | None,
        most_games: int,
        weights: NewestWeights,
        ledger: TimeLedger,
    ) -> None:
        """Create a port without games.

        Args:
            service: decides, by weights that were loaded.
            token: what HELLO must show; None if nothing.
            most_games: games at the same time.
            weights: follow the learner's.
            ledger: of the loop's thread.
        """
        super().__init__(service, token, most_games)
        self.received_nbytes = 0
        """Bytes that games have sent."""
        self._weights = weights
        self._ledger = ledger

    def receive(self, game: Game, content: bytes) -> None:
        """Take bytes of a game, and count them."""
        self.received_nbytes += len(content)
        super().receive(game, content)

    def _decide(self) -> DecidedRows | None:
        """Decide by the newest weights."""
        self._ledger.switch(Part.INFER)
        if self._weights.refresh():
            self.service.load(self._weights.values, self._weights.stamp)
        decisions = super()._decide()
        self._ledger.switch(Part.SEND)
        return decisions


def pause_s(seats: int, rows_per_s: float) -> float:
    """Returns how long a turn waits for further rows, so that it decides more at once.

    Args:
        seats: of all games.
        rows_per_s: of all of them together.
    """
    if not rows_per_s:
        return 0.0
    shortest_s, longest_s = PAUSES_S
    wanted_s = PAUSE_SHARE * seats / rows_per_s
    return 0.0 if wanted_s < shortest_s else min(wanted_s, longest_s)


class GamesProcess:
    """One process that serves games, between its attachment to the learner and its end."""

    def __init__(
        self,
        ctx: RoleContext,
        config: Config,
        info: EnvInfo,
        link: ShmLink,
        opponents: Opponents | None,
    ) -> None:
        """Make the service and open its port.

        Args:
            ctx: of this role.
            config: of the run.
            info: the environment that the games are.
            link: attached to the learner with a lane; it stays the caller's.
            opponents: play some seats of the games, if any; they have weights.

        Raises:
            UserError: the address cannot be served at.
        """
        assert link.writer is not None
        assert ctx.address is not None
        self._ctx = ctx
        self._config = config
        self._link = link
        self._writer: SlotWriter = link.writer
        # The store has no other writer, and the learner limits what is in use.
        self._writer.want = config.first_actors * config.transport.slots

        weights = NewestWeights(link, opponents)
        first_actor = ctx.index << PLACE_BITS
        entropy = [config.run.seed, first_actor, ctx.incarnation, link.welcome.generation]
        [seed] = np.random.SeedSequence(entropy).generate_state(1)
        policy = LoadedPolicy(
            config, weights.values.copy(), info.spaces, info, sample=True, seed=int(seed)
        )
        self._recorder = GameRecorder(
            config,
            link.spec,
            MOST_SEATS,
            self._writer,
            first_actor=first_actor,
            incarnation=ctx.incarnation,
            process=partial(algorithm(config.algo).process, config.algo),
        )
        service = Service(policy, ctx.run_dir.name, recorder=self._recorder, opponents=opponents)
        service.load(weights.values, weights.stamp)

        self._listen = listen_at(ctx.address, ctx.listen or {})
        self._limits = connection_limits()
        self._port = LearningPort(
            service, self._listen.token, self._limits.games, weights, ctx.ledger
        )
        self._error: BaseException | None = None
        """What ends the process, of a callback of the loop."""

    def run(self) -> None:
        """Serve until asked to stop, or until the learner has gone."""
        with closing(self._open_listener()) as listener:
            loop = asyncio.SelectorEventLoop(LedgerSelector(self._ctx.ledger))
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                # A collection that leaves out what is loaded by now delays no answer.
                gc.freeze()
                runner.run(self._serve(listener))

    def _open_listener(self) -> socket.socket:
        """Returns the listening socket. Raises UserError if the port stays taken."""
        patience_s = PORT_PATIENCE_S if self._ctx.incarnation else 0.0
        deadline_s = time.monotonic() + patience_s
        while True:
            self._ctx.status.beat()
            try:
                return open_listener(self._listen)
            except UserError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(TICK_S)

    async def _serve(self, listener: socket.socket) -> None:
        """Serve, and end in order."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_error)
        loop.add_reader(self._writer.event, self._on_slots_lent)
        server = make_server(
            self._port,
            self._listen,
            most_silent=self._limits.silent,
            handles_signals=False,
            started=partial(self._on_started, listener.getsockname()[1]),
            ended=lambda figures: None,
        )
        serving = loop.create_task(server.serve([listener]))
        await self._work_until_the_end(serving)

        self._ctx.status.phase = Phase.STOPPING
        is_over = self._ctx.stopping()
        self._port.end("the run ends" if is_over else "the learner restarts; connect again")
        server.should_exit = True
        await serving
        if self._error is not None:
            raise self._error
        if is_over:
            await self._publish_the_rest()
            deadline_s = time.monotonic() + self._config.run.grace_s / 4
            while not self._report() and time.monotonic() < deadline_s:
                await asyncio.sleep(TICK_S / 10)

    def _on_started(self, port: int) -> None:
        """Report that games can connect."""
        ctx = self._ctx
        if not ctx.incarnation:
            logger.info("%s", connection_note(self._listen, port))
        ctx.report("ready")
        self._report()
        ctx.status.phase = Phase.RECEIVING

    async def _work_until_the_end(self, serving: asyncio.Task[None]) -> None:
        """Beat and report, while games are served by callbacks of the loop."""
        ctx = self._ctx
        interval_s = self._config.run.interval_s
        next_report_s = time.monotonic() + interval_s
        next_trim_s = time.monotonic() + TRIM_S

        while not (ctx.stopping() or serving.done() or self._error or self._link.learner_gone()):
            ctx.status.beat()
            ctx.messages()
            service = self._port.service
            self._port.pause_s = pause_s(service.seats.taken, service.figures.rate(perf_counter()))
            now_s = time.monotonic()
            if now_s >= next_report_s:
                next_report_s = now_s + interval_s
                self._report()
            if now_s >= next_trim_s:
                next_trim_s = now_s + TRIM_S
                give_back_memory()
            await asyncio.sleep(TICK_S)

    def _on_slots_lent(self) -> None:
        """Publish what waits for slots, and go on with the seats that it has held."""
        drain_event(self._writer.event)
        if self._recorder.publish_waiting():
            self._port.turn_soon()

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Keep an error of a callback, which ends the process; connections that break do not."""
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError):
            self._error = self._error or error

    async def _publish_the_rest(self) -> None:
        """Publish the unrolls in progress, as far as the learner lends slots for them."""
        self._recorder.flush_all()
        deadline_s = time.monotonic() + self._config.run.grace_s / 2
        while self._recorder.held and time.monotonic() < deadline_s:
            if self._link.learner_gone():
                return
            self._ctx.status.beat()
            self._recorder.publish_waiting()
            await asyncio.sleep(TICK_S / 10)

    def _report(self) -> bool:
        """Report the counters; returns whether the supervisor's socket had room for them."""
        service = self._port.service
        recorder = self._recorder
        return self._ctx.report(
            "connector",
            index=self._ctx.index,
            incarnation=self._ctx.incarnation,
            actors=service.seats.taken,
            rejected=dict(service.figures.faults),
            slots=recorder.slots,
            steps=recorder.steps,
            raw_nbytes=recorder.nbytes,
            coded_nbytes=self._port.received_nbytes,
            games=len(self._port.games),
            held=recorder.held,
            streams=(),
        )

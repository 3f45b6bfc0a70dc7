"""An actor that moves to another learner keeps its environments and begins a new stream."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.actors import join as joining
from penstock.actors import matches
from penstock.actors import role as actor_main
from penstock.algos.samples import network_shape, slot_spec
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.control import Channel
from penstock.core.interfaces import LearnerGoneError, Welcome
from penstock.core.params import Float32, Stamp
from penstock.core.role import EXIT_REJOIN, RoleContext, learner_socket
from penstock.core.specs import HEADER, SlotSpec
from penstock.envs import BatchedEnv, make, probe
from penstock.profiling.ledger import TimeLedger
from penstock.profiling.status import StatusPage
from penstock.replay import Accounting
from penstock.transport.shm import link as shm_link
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.link import ShmLink
from penstock.transport.shm.store import Slot, SlotStore
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq import relay
from transport_world import RUN_ID, Learner, Taken, connector, context, in_thread
from waiting import wait_until

ACTOR = 1


@pytest.fixture
def config() -> Config:
    options = ["learner.count=2", "actors.count=2", "actors.envs=2", "actors.unroll=5"]
    return resolve("cartpole", [*options, "stop.return=null"])


@contextmanager
def learner(folder: Path, rank: int, config: Config, kind: str) -> Iterator[Learner]:
    """A learner that trains nothing, with connector and relay where ``kind`` is zmq."""
    info = probe(config.env)
    spec, layout = slot_spec(config, info), network_shape(config, info).layout
    store, board = SlotStore(spec, 8), WeightsBoard.create(layout.size)
    board.publish(np.zeros(layout.size, np.float32), Stamp(0, 0))
    welcome = Welcome(RUN_ID, 0, spec, layout, config.model_dump(mode="json"))
    path = learner_socket(folder, rank)
    side = Learner(path, store, [board], welcome)
    side.start(ShmHost(path, welcome, [board], store))
    try:
        if kind == "shm":
            yield side
        else:
            follower = context(folder, "relay", address=wire(folder, rank), learner=rank)
            with connector(side, wire(folder, rank)), in_thread(follower, relay.run):
                yield side
    finally:
        side.stop()
        store.close()
        board.close()


def wire(folder: Path, rank: int) -> str:
    return f"ipc://{folder}/wire-{rank}"


@dataclass
class Actor:
    """An actor's role in a thread, and its supervisor's end of the line."""

    ctx: RoleContext
    line: Channel
    kind: str
    exit_code: object = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def give_to(self, rank: int, incarnation: int) -> None:
        address = wire(self.ctx.runtime_dir, rank) if self.kind == "zmq" else None
        place = {"index": rank, "address": address, "incarnation": incarnation}
        assert self.line.send({"kind": "learner", **place})

    def _live(self) -> None:
        try:
            actor_main.run(self.ctx)
        except SystemExit as error:
            self.exit_code = error.code

    def end(self) -> float:
        """Have it stop; the seconds that took."""
        began_s = time.monotonic()
        self.ctx.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        return time.monotonic() - began_s


@contextmanager
def actor(folder: Path, config: Config, kind: str, learner: int) -> Iterator[Actor]:
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    line, theirs = Channel.pair()
    address = wire(folder, learner) if kind == "zmq" else None
    ctx = RoleContext(
        "actor", ACTOR, 0, RUN_ID, folder, folder, Channel(theirs), page,
        config=config, address=address, learner=learner,
    )  # fmt: skip
    made = Actor(ctx, line, kind)
    try:
        yield made
    finally:
        made.end()
        line.close()
        ctx.channel.close()


def take_all(side: Learner) -> list[Taken]:
    """What has arrived, once nothing more comes."""
    while True:
        before = len(side.taken)
        time.sleep(0.3)
        if len(side.taken) == before:
            return list(side.taken)


def stream(taken: list[Taken], incarnation: int) -> list[Taken]:
    return [slot for slot in taken if slot.header["incarnation"] == incarnation]


def assert_accounted(taken: list[Taken], first: int) -> None:
    """Sequences from ``first`` on without a gap, and no step lost."""
    accounting = Accounting()
    for slot in taken:
        accounting.arrived(slot.header)
    assert [slot.header["sequence"] for slot in taken] == list(range(first, first + len(taken)))
    assert accounting.lost.total() == 0
    assert accounting.produced == sum(slot.header["steps"] for slot in taken)


def same_games(before: Taken, after: Taken, spec: SlotSpec) -> bool:
    return bool(np.array_equal(before.columns["obs"][spec.unroll], after.columns["obs"][0]))


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_actor_moves_to_another_learner_and_back(
    tmp_path: Path, config: Config, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[BatchedEnv] = []

    def make_once_more(*args: Any, **kwargs: Any) -> BatchedEnv:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(matches, "make", make_once_more)
    with (
        learner(tmp_path, 0, config, kind) as first,
        learner(tmp_path, 1, config, kind) as second,
        actor(tmp_path, config, kind, learner=0) as one,
    ):
        wait_until(lambda: len(first.taken) > 3, 30)
        one.give_to(1, incarnation=1)
        wait_until(lambda: len(second.taken) > 3, 30)
        home = take_all(first)
        one.give_to(0, incarnation=2)
        wait_until(lambda: len(stream(list(first.taken), 2)) > 3, 30)
        away = take_all(second)
        page = one.ctx.status
        assert page.incarnation == 2
        one.end()
        back = stream(take_all(first), 2)
        assert (page.sequence, page.produced_steps) == (
            back[-1].header["sequence"] + 1,
            back[-1].header["produced_steps"],
        )
        all_steps = sum(slot.header["steps"] for slot in [*home, *away, *back])
        assert page.played_steps == all_steps
    assert len(made) == 1
    assert {slot.header["incarnation"] for slot in away} == {1}
    # From the second on streams begin in the middle of episodes, which sequence 0 would deny.
    for taken, sequence in ((home, 0), (away, 1), (back, 1)):
        assert_accounted(taken, sequence)
    spec = first.welcome.spec
    assert same_games(home[-1], away[0], spec)
    assert same_games(away[-1], back[0], spec)


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_actor_that_lost_its_learner_joins_the_assigned_one(
    tmp_path: Path, config: Config, kind: str
) -> None:
    with learner(tmp_path, 1, config, kind) as second:
        with learner(tmp_path, 0, config, kind) as first:
            run = actor(tmp_path, config, kind, learner=0)
            one = run.__enter__()
            wait_until(lambda: len(first.taken) > 3, 30)
        one.give_to(1, incarnation=1)
        given_s = time.monotonic()
        wait_until(lambda: len(second.taken) > 3, 30)
        assert time.monotonic() - given_s < 3
        run.__exit__(None, None, None)
        assert_accounted(take_all(second), 1)


def test_unassigned_actor_retries_slowly_and_ends_on_request(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    def attempt(path: Path, *args: Any) -> ShmLink:
        tried.append(path)
        return ShmLink(path, *args)

    monkeypatch.setattr(shm_link, "ShmLink", attempt)
    with learner(tmp_path, 0, config, "shm") as first:
        run = actor(tmp_path, config, "shm", learner=0)
        one = run.__enter__()
        wait_until(lambda: len(first.taken) > 3, 30)
    wait_until(lambda: len(tried) > 2, 10)
    before, since_s = len(tried), time.monotonic()
    time.sleep(0.5)
    more = len(tried) - before
    assert 1 <= more <= (time.monotonic() - since_s) / joining.RETRY_S + 1
    assert one.ctx.status.beat_s > since_s  # it does not look hung
    assert one.end() < 1
    run.__exit__(None, None, None)
    assert tried[-1] == learner_socket(tmp_path, 0)


@pytest.mark.parametrize("loses_learner", [False, True])
def test_environments_are_closed_when_an_actor_ends(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, loses_learner: bool
) -> None:
    """A process that ends by itself runs no finalizers; simulators, files and licences may need
    their `close`."""
    closed: list[BatchedEnv] = []
    monkeypatch.setattr(BatchedEnv, "close", lambda game: closed.append(game))
    with learner(tmp_path, 0, config, "shm") as side:
        del closed[:]  # that of the learner's probe
        with actor(tmp_path, config, "shm", learner=0) as one:
            wait_until(lambda: len(side.taken) > 1, 30)
            if loses_learner:
                lost = LearnerGoneError("lost")
                monkeypatch.setattr(
                    actor_main, "find_learner", lambda ctx: (_ for _ in ()).throw(lost)
                )
                one.give_to(0, incarnation=1)
                one.thread.join(20)
                assert one.exit_code == EXIT_REJOIN
            assert len(closed) == int(loses_learner)
            one.end()
            assert len(closed) == 1


def test_actor_waiting_over_the_wire_can_be_reassigned(tmp_path: Path, config: Config) -> None:
    with (
        learner(tmp_path, 1, config, "zmq") as second,
        actor(tmp_path, config, "zmq", learner=0) as one,
    ):
        time.sleep(0.3)
        one.give_to(1, incarnation=1)
        wait_until(lambda: len(second.taken) > 1, 30)
        # It had played nothing before, so that this is the beginning of its episodes.
        assert_accounted(list(second.taken), 0)


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_actor_joins_the_restarted_learner_in_the_same_environments(
    tmp_path: Path, config: Config, kind: str
) -> None:
    alone = config.model_copy(update={"learner": config.learner.model_copy(update={"count": 1})})
    with learner(tmp_path, 0, alone, kind) as first:
        run = actor(tmp_path, alone, kind, learner=0)
        one = run.__enter__()
        wait_until(lambda: len(first.taken) > 3, 30)
    with learner(tmp_path, 0, alone, kind) as second:
        one.give_to(0, incarnation=1)
        wait_until(lambda: any(t.header["incarnation"] == 1 for t in list(second.taken)), 30)
        run.__exit__(None, None, None)
        own = [taken for taken in take_all(second) if taken.header["incarnation"] == 1]
        assert_accounted(own, 1)  # in the middle of episodes
    assert one.exit_code is None


class LosesOne:
    """A link whose first filled slot reaches no learner."""

    fills_store = False

    def __init__(self, config: Config, game: BatchedEnv) -> None:
        spec, layout = slot_spec(config, game.info), network_shape(config, game.info).layout
        self.welcome = Welcome(RUN_ID, 0, spec, layout, {})
        self.sent: list[int] = []
        self._lost = False

    @contextmanager
    def slot(self, timeout_s: float) -> Iterator[Slot]:
        spec = self.welcome.spec
        payload, header = spec.zeros(), np.zeros((), HEADER)
        yield Slot(0, header, tuple(payload), spec.views(payload))
        if not self._lost:
            self._lost = True
            raise LearnerGoneError("left before the last slot could be sent")
        self.sent.append(int(header["sequence"]))

    def beat(self) -> None:
        pass

    def read_weights(self, out: Float32, newer_than: Stamp | None, policy_id: int = 0) -> Stamp:
        out[:] = 0
        return Stamp(0, 0)

    def close(self) -> None:
        pass


def test_a_stream_after_a_first_slot_that_was_lost_begins_in_the_middle_of_episodes(
    config: Config,
) -> None:
    game = make(config.env, config.actor_envs)
    link = LosesOne(config, game)
    page, descriptor = StatusPage.create()
    os.close(descriptor)
    player = actor_main.Player(config, link, game, ACTOR, 0, page, TimeLedger())
    with pytest.raises(LearnerGoneError):
        player.play(1.0)
    player.join(link, 1)
    assert player.play(1.0)
    assert link.sent == [1]
    restored = actor_main.Player(config, link, game, ACTOR, 0, page, TimeLedger())
    restored.load_state_dict(player.state_dict())
    restored.join(link, 3)
    assert restored.sequence == 1
    restored.close()

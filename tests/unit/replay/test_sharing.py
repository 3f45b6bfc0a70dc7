"""Steps added by another process are stored as by the owner's own `add`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.specs import Column, SlotSpec
from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.sharing import WRITER_SLOTS, StoreServer
from penstock.replay.steps import Autoreset
from penstock.replay.writer import Writer
from penstock.transport.shm.store import SlotStore

STACK, SIDE, ENVS, STEPS = 3, 24, 2, 150
FRAMED: dict[str, Any] = {"obs": (np.uint8, (STACK, SIDE, SIDE)), "action": (np.int64, ())}
INLINE: dict[str, Any] = {"obs": (np.float32, (3,)), "action": (np.int64, ())}


def frame(value: int) -> Any:
    return np.full((SIDE, SIDE), value % 251, np.uint8)


class Games:
    """Environments that count; episodes of random length. What `add` takes, step by step."""

    def __init__(self, autoreset: Autoreset, framed: bool) -> None:
        self.autoreset, self.framed = autoreset, framed
        self.rng = np.random.default_rng(7)
        self.seen = [0] * ENVS
        self.stacks = [self._begin(e) for e in range(ENVS)]
        self.over = [False] * ENVS
        self.count = 0

    def _next(self, e: int) -> int:
        self.seen[e] += 1
        return self.seen[e] + 100 * e

    def _begin(self, e: int) -> Any:
        first = self._next(e)
        return [first] * STACK if self.framed else first

    def _move(self, e: int, state: Any) -> Any:
        new = self._next(e)
        return [*state[1:], new] if self.framed else new

    def _show(self, states: list[Any]) -> Any:
        if self.framed:
            return np.stack([[frame(v) for v in state] for state in states])
        return np.array([[v, -v, 2 * v] for v in states], np.float32)

    def step(self) -> tuple[dict[str, Any], list[tuple[int, Any, Any, bool]]]:
        """Arguments of `add`, and the transitions they mean: action, obs, next_obs, terminated."""
        before = list(self.stacks)
        done = self.rng.random(ENVS) < 0.12
        meant, finals, after = [], [None] * ENVS, list(self.stacks)
        for e in range(ENVS):
            action = self.count * ENVS + e
            if self.over[e] and self.autoreset == "next_step":
                after[e], done[e] = self._begin(e), False
                continue
            moved = self._move(e, before[e])
            meant.append((action, self._show([before[e]])[0], self._show([moved])[0], done[e]))
            after[e] = moved
            if done[e] and self.autoreset == "same_step":
                finals[e], after[e] = self._show([moved])[0], self._begin(e)
        arguments = {
            "obs": self._show(before),
            "action": np.arange(ENVS) + self.count * ENVS,
            "reward": np.zeros(ENVS, np.float32),
            "terminated": done.copy(),
            "truncated": np.zeros(ENVS, bool),
            "next_obs": self._show(after),
        }
        if self.autoreset == "same_step" and done.any():
            final = np.empty(ENVS, object)
            final[:] = finals
            arguments["info"] = {"final_obs": final, "_final_obs": done.copy()}
        if self.autoreset == "none":
            after = [self._begin(e) if done[e] else after[e] for e in range(ENVS)]
        self.stacks, self.over = after, list(done)
        self.count += 1
        return arguments, meant


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Iterator[Replay]:
    autoreset, framed = request.param
    made = Replay(
        FRAMED if framed else INLINE, 1000, envs=ENVS, unroll=16, writers=3, shared=True, seed=0,
        autoreset=autoreset, frame_stack=STACK if framed else 1,
    )  # fmt: skip
    yield made
    made.close()


def wait_stored(rb: Replay, count: int) -> None:
    deadline_s = time.monotonic() + 5
    while len(rb) < count and time.monotonic() < deadline_s:
        time.sleep(0.002)
    assert len(rb) == count


@pytest.mark.parametrize(
    "shared",
    [(a, f) for a in ("none", "next_step", "same_step") for f in (False, True)],
    indirect=True,
    ids=str,
)
def test_transitions_of_a_remote_writer_are_stored_as_added(shared: Replay) -> None:
    games = Games(shared.autoreset, bool(shared.layout.framed))
    meant: dict[int, tuple[Any, Any, bool]] = {}
    with Writer.attach(shared.serve()) as writer:
        for _ in range(STEPS):
            arguments, transitions = games.step()
            writer.add(**arguments)
            meant |= {action: rest for action, *rest in transitions}  # type: ignore[misc]
    wait_stored(shared, len(meant))
    with shared.lock:
        rows = np.flatnonzero(shared.table.valid)
        batch = shared.gather.batch(rows, None)
    assert sorted(batch.action.tolist()) == sorted(meant)
    for i, action in enumerate(batch.action.tolist()):
        obs, after, terminated = meant[action]
        np.testing.assert_array_equal(batch.obs[i], obs, err_msg=f"obs of {action}")
        np.testing.assert_array_equal(batch.next_obs[i], after, err_msg=f"next of {action}")
        assert batch.terminated[i] == terminated


@pytest.mark.parametrize("shared", [("none", False)], indirect=True)
def test_owner_and_remote_writers_add_at_once(shared: Replay) -> None:
    address = shared.serve()

    def write(games: Games) -> None:
        with Writer.attach(address) as writer:
            for _ in range(50):
                writer.add(**games.step()[0])

    threads = [
        threading.Thread(target=write, args=(Games("none", False),), daemon=True) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    own = Games("none", False)
    for _ in range(50):
        shared.add(**own.step()[0])
    for thread in threads:
        thread.join()
    wait_stored(shared, 3 * 50 * ENVS)


@pytest.mark.parametrize("shared", [("none", False)], indirect=True)
def test_remote_priorities_reach_the_sampler(shared: Replay) -> None:
    with Writer.attach(shared.serve()) as writer:
        games = Games("none", False)
        writer.add(**games.step()[0], priority=[1.0, 2.0])
        with pytest.raises(ReplayError, match="priority came as"):
            writer.add(**games.step()[0], priority=[1.0, float("nan")])
        writer.flush()
        wait_stored(shared, 2)
    assert shared.table.records["priority"][shared.table.valid].tolist() == [1.0, 2.0]


def test_a_private_replay_cannot_be_served() -> None:
    rb = Replay(INLINE, 100)
    with pytest.raises(ReplayError, match="make it with shared=True"):
        rb.serve()
    rb.close()


@pytest.mark.parametrize("shared", [("none", False)], indirect=True)
def test_writer_notices_that_the_owner_has_ended(shared: Replay, tmp_path: Path) -> None:
    writer = Writer.attach(shared.serve(tmp_path / "rb"))
    shared.close()
    games = Games("none", False)

    def add_all() -> None:
        for _ in range(100):
            writer.add(**games.step()[0], timeout_s=5.0)

    with pytest.raises(ConnectionError, match="has ended"):
        add_all()
    writer.close()


def test_held_back_writers_get_no_new_slots() -> None:
    """Only what they hold already may still come."""
    open_ = [False]
    store = SlotStore(SlotSpec(2, 1, (Column("reward", "<f4"),)), 20)

    def use_up() -> None:
        store.collect()
        while store.ready:
            store.release(store.ready.popleft())

    lock = threading.Lock()
    failures: list[BaseException] = []
    server = StoreServer(
        store, lock, None, collect=use_up, on_failed=failures.append, may_lend=lambda: open_[0]
    )
    published = 0
    with Writer.attach(server.address) as writer:
        with suppress(TimeoutError):
            while published <= WRITER_SLOTS:
                with writer.slot(timeout_s=0.1):
                    published += 1
        assert published <= WRITER_SLOTS
        open_[0] = True
        for _ in range(10 * WRITER_SLOTS):
            with writer.slot(timeout_s=5.0):
                published += 1
    server.close()
    store.close()
    assert not failures

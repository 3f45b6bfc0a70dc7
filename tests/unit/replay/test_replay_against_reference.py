"""Every column of every stored row equals that of plain lists, after any history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.replay.batch import unstack
from penstock.replay.buffer import Replay, StreamWriter
from penstock.replay.samplers import Uniform
from penstock.replay.steps import Autoreset
from replay_reference import PADDINGS, History, Player, Shape

KINDS: dict[str, dict[str, Shape]] = {
    "inline": {"": Shape("f4", (4,))},
    "inline, a column of its own": {"": Shape("f8", (12,))},
    "one frame": {"": Shape("f4", (70,))},
    "stack of 2": {"": Shape("u1", (2, 3), 2)},
    "stack of 4": {"": Shape("u1", (5,), 4)},
    "nested": {
        "camera": Shape("u1", (2, 2), 3),
        "speed": Shape("f4", (2,)),
        "far": Shape("f8", (40,)),
    },
}
AUTORESETS: tuple[Autoreset, ...] = ("none", "next_step", "same_step")
ENDS = ("", "", "", "", "terminated", "truncated", "both")
STREAM = 1_000_000  # first action of each stream; an action names a step
DISCOUNT = 0.9


def declared(shapes: dict[str, Shape]) -> dict[str, Any]:
    leaves = {name: (shape.dtype, shape.shape) for name, shape in shapes.items()}
    return {"obs": leaves.get("", leaves), "action": ("i8", ())}


def leaf(value: Any, name: str) -> Any:
    return value[name] if name else value


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return all(np.array_equal(left[key], right[key]) for key in left)
    return np.array_equal(left, right)


class ReplayMachine(RuleBasedStateMachine):
    """Adds random episodes, and compares everything that can be sampled after each step."""

    replay: Replay | None = None

    @initialize(
        kind=st.sampled_from(list(KINDS)),
        envs=st.integers(1, 3),
        unroll=st.integers(1, 7),
        slots=st.integers(1, 4),
        n_step=st.integers(1, 4),
        autoreset=st.sampled_from(AUTORESETS),
        dense=st.booleans(),
        streams=st.integers(1, 2),
        seed=st.integers(0, 99),
    )
    def begin(
        self,
        kind: str,
        envs: int,
        unroll: int,
        slots: int,
        n_step: int,
        autoreset: Autoreset,
        dense: bool,
        streams: int,
        seed: int,
    ) -> None:
        shapes = KINDS[kind]
        self.shapes, self.envs, self.n_step, self.autoreset = shapes, envs, n_step, autoreset
        self.stack = max(shape.stack for shape in shapes.values()) or 1
        self.replay = Replay(
            declared(shapes),
            slots * unroll * envs,
            n_step=n_step,
            discount=DISCOUNT,
            frame_stack=self.stack,
            sampler=Uniform(),
            envs=envs,
            autoreset=autoreset,
            unroll=unroll,
            writers=streams,
            seed=seed,
        )
        self.players = [Player(shapes, envs, autoreset, i * STREAM, seed + i) for i in (0, 1)]
        for player in self.players:
            player.layout = "dense" if dense else "object"
        self.writers: list[Replay | StreamWriter] = [self.replay]
        self.writers += [self.replay.writer() for _ in range(streams - 1)]
        self.given: list[Any] = [None, None]

    @rule(data=st.data(), same_arrays=st.booleans(), times=st.integers(1, 4))
    def add(self, data: st.DataObject, same_arrays: bool, times: int) -> None:
        stream = data.draw(st.integers(0, len(self.writers) - 1))
        for _ in range(times):
            ends, paddings, rolls = (
                data.draw(st.lists(what, min_size=self.envs, max_size=self.envs))
                for what in (st.sampled_from(ENDS), st.sampled_from(PADDINGS), st.integers(0, 5))
            )
            self.step(stream, ends, paddings, [roll == 0 for roll in rolls], same_arrays)

    def step(
        self, stream: int, ends: Any, paddings: Any, silent: list[bool], same_arrays: bool
    ) -> None:
        assert self.replay is not None
        may_break_off = self.autoreset == "none" and bool(self.replay.layout.framed)
        step = self.players[stream].step(ends, paddings, [may_break_off and s for s in silent])
        if (
            same_arrays
            and self.given[stream] is not None
            and equal(step["obs"], self.given[stream])
        ):
            step["obs"] = self.given[stream]
        self.writers[stream].add(**step)
        self.given[stream] = step["next_obs"]

    @invariant()
    def everything_stored_is_what_was_added(self) -> None:
        if self.replay is None:
            return
        stats, rows = self.replay.stats(), np.flatnonzero(self.replay.table.valid)
        known = self.known()
        counted = sum(history.steps[index].counts for history, index in known.values())
        assert stats["inserted"] == counted == stats["stored"] + sum(stats["evicted"].values())
        assert len(rows) == len(self.replay) == stats["stored"]
        if not self.replay.layout.framed and self.autoreset != "next_step":
            assert len(rows) >= min(counted, self.replay.capacity)
        if len(rows):
            batch = self.replay.gather.batch(rows, None)
            assert len(set(batch.action.tolist())) == len(rows)
            for i, action in enumerate(batch.action.tolist()):
                self.compare(batch, i, *known[action])
            self.frames_stack_to_the_same(rows, batch)

    def known(self) -> dict[int, tuple[History, int]]:
        """Where each action was taken."""
        histories = [history for player in self.players for history in player.histories]
        return {
            step.action: (history, index)
            for history in histories
            for index, step in enumerate(history.steps)
        }

    def compare(self, batch: Any, i: int, history: History, index: int) -> None:
        assert history.steps[index].counts
        want = history.expected(index, self.n_step, DISCOUNT)
        for name in self.shapes:
            np.testing.assert_array_equal(leaf(batch.obs, name)[i], want.obs[name])
            np.testing.assert_array_equal(leaf(batch.next_obs, name)[i], want.next_obs[name])
        assert batch.reward[i] == pytest.approx(want.reward, rel=1e-6)
        assert batch.discount[i] == pytest.approx(want.discount, rel=1e-6)
        assert (batch.terminated[i], batch.truncated[i]) == (want.terminated, want.truncated)

    def frames_stack_to_the_same(self, rows: Any, batch: Any) -> None:
        assert self.replay is not None
        stacks = {name: shape.stack for name, shape in self.shapes.items() if shape.stack}
        apart = self.replay.gather.batch(rows, None, stacked=False)
        for name, stack in stacks.items():
            obs, after = unstack(leaf(apart.frames, name), stack)
            np.testing.assert_array_equal(obs, leaf(batch.obs, name))
            np.testing.assert_array_equal(after, leaf(batch.next_obs, name))

    def teardown(self) -> None:
        if self.replay is not None:
            self.replay.close()


ReplayMachine.TestCase.settings = settings(
    max_examples=50,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestReplay = ReplayMachine.TestCase


@pytest.mark.parametrize("seed", range(30))
def test_long_random_histories_match_the_list_reference(seed: int) -> None:
    """The same, longer, with many wraps; one seed for each."""
    rng = np.random.default_rng(seed)
    machine = ReplayMachine()
    machine.begin(
        kind=list(KINDS)[seed % len(KINDS)],
        envs=int(rng.integers(1, 4)),
        unroll=int(rng.integers(1, 8)),
        slots=int(rng.integers(1, 5)),
        n_step=int(rng.integers(1, 5)),
        autoreset=AUTORESETS[seed // len(KINDS) % 3],
        dense=bool(rng.integers(2)),
        streams=int(rng.integers(1, 3)),
        seed=seed,
    )
    for i in range(60):
        ends, paddings = (rng.choice(what, machine.envs) for what in (ENDS, PADDINGS))
        stream = int(rng.integers(len(machine.writers)))
        silent = (rng.random(machine.envs) < 0.15).tolist()
        machine.step(stream, ends, paddings, silent, same_arrays=bool(rng.integers(2)))
        if i % 5 == 4:
            machine.everything_stored_is_what_was_added()
    machine.teardown()

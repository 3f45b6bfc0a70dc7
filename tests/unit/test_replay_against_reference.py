"""Every column of every stored row equals what plain lists say, whatever happened before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.replay.batch import unstack
from penstock.replay.buffer import Replay, StreamWriter
from penstock.replay.samplers import Uniform
from replay_reference import PADDINGS, Player, Shape

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
ACTIONS_PER_STREAM = 1_000_000


def declared(shapes: dict[str, Shape]) -> dict[str, Any]:
    leaves = {name: (s.dtype, s.shape) for name, s in shapes.items()}
    return {"obs": leaves.get("", leaves), "action": ("i8", ())}


class ReplayMachine(RuleBasedStateMachine):
    """Adds random episodes, and compares everything that can be sampled after each step."""

    @initialize(
        kind=st.sampled_from(list(KINDS)),
        envs=st.integers(1, 3),
        unroll=st.integers(1, 7),
        slots=st.integers(1, 4),
        n_step=st.integers(1, 4),
        autoreset=st.sampled_from(["none", "next_step", "same_step"]),
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
        autoreset: str,
        dense: bool,
        streams: int,
        seed: int,
    ) -> None:
        shapes = KINDS[kind]
        self.shapes, self.envs, self.n_step, self.autoreset = shapes, envs, n_step, autoreset
        self.stack = max(shape.stack for shape in shapes.values()) or 1
        self.replay = Replay(
            declared(shapes),
            capacity=slots * unroll * envs,
            n_step=n_step,
            discount=0.9,
            frame_stack=self.stack,
            sampler=Uniform(),
            envs=envs,
            autoreset=autoreset,  # type: ignore[arg-type]
            unroll=unroll,
            writers=streams,
            seed=seed,
        )
        self.framed = bool(self.replay.layout.framed)
        self.players = [
            Player(shapes, envs, autoreset, i * ACTIONS_PER_STREAM, seed + i)
            for i in range(streams)
        ]
        for player in self.players:
            player.layout = "dense" if dense else "object"
        self.writers: list[Replay | StreamWriter] = [self.replay, self.replay.writer()][:streams]
        self.given: list[dict[str, Any]] = [{} for _ in range(streams)]

    @rule(data=st.data(), same_arrays=st.booleans(), times=st.integers(1, 4))
    def add(self, data: st.DataObject, same_arrays: bool, times: int) -> None:
        stream = data.draw(st.integers(0, len(self.players) - 1))
        for _ in range(times):
            each = {"min_size": self.envs, "max_size": self.envs}
            ends = data.draw(
                st.lists(
                    st.sampled_from(["", "", "", "", "terminated", "truncated", "both"]), **each
                )
            )
            paddings = data.draw(st.lists(st.sampled_from(PADDINGS), **each))
            quiet = self.framed and self.autoreset == "none"
            silent = data.draw(st.lists(st.integers(0, 5), **each))
            step = self.players[stream].step(ends, paddings, [quiet and not s for s in silent])
            if same_arrays and same(step["obs"], self.given[stream].get("next_obs")):
                step["obs"] = self.given[stream]["next_obs"]
            self.writers[stream].add(**step)
            self.given[stream] = step

    @rule()
    def flush(self) -> None:
        pass

    @invariant()
    def everything_stored_is_what_was_added(self) -> None:
        if not hasattr(self, "replay"):
            return
        rows = np.flatnonzero(self.replay.table.valid)
        stats = self.replay.stats()
        assert len(rows) == len(self.replay) == stats["stored"]
        assert stats["inserted"] == stats["stored"] + sum(stats["evicted"].values())
        known = {
            step.action: (history, index)
            for player in self.players
            for history in player.histories
            for index, step in enumerate(history.steps)
        }
        counted = sum(history.steps[index].counts for history, index in known.values())
        assert stats["inserted"] + self.lost() == counted
        if not len(rows):
            return
        batch = self.replay.gather.batch(rows, None)
        assert len(set(batch.action.tolist())) == len(rows)
        for i, action in enumerate(batch.action.tolist()):
            history, index = known[action]
            assert history.steps[index].counts
            want = history.expected(index, self.n_step, 0.9)
            for key in ("obs", "next_obs"):
                for name in self.shapes:
                    got = batch[key][i] if name == "" else batch[key][name][i]
                    np.testing.assert_array_equal(got, getattr(want, key)[name], f"{key}.{name}")
            assert batch.reward[i] == pytest.approx(want.reward, rel=1e-6)
            assert batch.discount[i] == pytest.approx(want.discount, rel=1e-6)
            assert (batch.terminated[i], batch.truncated[i]) == (want.terminated, want.truncated)
        self.frames_stack_to_the_same(rows, batch)

    def lost(self) -> int:
        return 0

    def frames_stack_to_the_same(self, rows: Any, batch: Any) -> None:
        if self.stack == 1:
            return
        apart = self.replay.gather.batch(rows, None, stacked=False)
        for name, shape in self.shapes.items():
            if shape.stack:
                frames = apart.frames if name == "" else apart.frames[name]
                obs, after = unstack(frames, shape.stack)
                whole = (
                    (batch.obs, batch.next_obs)
                    if name == ""
                    else (batch.obs[name], batch.next_obs[name])
                )
                np.testing.assert_array_equal(obs, whole[0])
                np.testing.assert_array_equal(after, whole[1])

    def teardown(self) -> None:
        if hasattr(self, "replay"):
            self.replay.close()


def same(left: Any, right: Any) -> bool:
    if right is None:
        return False
    if isinstance(left, dict):
        return all(np.array_equal(left[k], right[k]) for k in left)
    return np.array_equal(left, right)


ReplayMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestReplay = ReplayMachine.TestCase

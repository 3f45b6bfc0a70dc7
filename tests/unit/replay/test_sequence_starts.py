"""The valid starts of sequences, against lists of episodes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.specs import Column, SlotSpec
from penstock.replay.samplers import Prioritized, Sampler, Uniform
from penstock.replay.sequences import Sequences, SequenceSampler

RECORD = np.dtype([("terminated", "?"), ("truncated", "?"), ("age", "u1")], align=True)


class Slots:
    """As much of a table as a sampler of sequences looks at."""

    def __init__(self, slots: int, unroll: int, envs: int) -> None:
        self.spec = SlotSpec(unroll, envs, (Column("reward", "<f4"),))
        self.slots = slots
        self.records = np.zeros(slots * unroll * envs, RECORD)
        self.valid = np.zeros(slots * unroll * envs, bool)
        self.length = np.zeros(slots, np.int32)
        self.prev = np.full(slots, -1, np.int32)


@dataclass
class Step:
    row: int
    slot: int
    counts: bool = True
    first: bool = False
    last: bool = False
    gone: bool = False


@dataclass
class World:
    """Streams of steps in slots that may end early, resets of every kind, and lists of them."""

    rng: np.random.Generator
    sequences: Sequences
    unroll: int
    envs: int
    streams: int
    slots: int
    ends: float
    resets: float
    short: float
    steps: list[list[list[Step]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = Slots(self.slots, self.unroll, self.envs)
        inner: Sampler = Prioritized(fast=False) if self.rng.random() < 0.5 else Uniform()
        self.sampler = SequenceSampler(self.sequences, inner)
        self.sampler.place(self.table)
        self.sampler.bind(self.table.valid, np.random.default_rng(0))
        self.free, self.order = list(range(self.slots)), list[int]()
        self.now: list[int | None] = [None] * self.streams
        self.steps = [[[] for _ in range(self.envs)] for _ in range(self.streams)]

    def step(self) -> None:
        stream = int(self.rng.integers(self.streams))
        slot = self.now[stream]
        if slot is None or self.table.length[slot] == self.unroll or self.rng.random() < self.short:
            slot = self._next_slot(stream)
        start = (slot * self.unroll + int(self.table.length[slot])) * self.envs
        for env, steps in enumerate(self.steps[stream]):
            steps.append(self._made(steps, slot, start + env))
        self.table.length[slot] += 1
        self.sampler.insert(start, start + self.envs, None)

    def _made(self, steps: list[Step], slot: int, row: int) -> Step:
        before = steps[-1] if steps else Step(-1, -1, last=True)
        reset = before.last and before.counts and bool(steps) and self.rng.random() < self.resets
        restart = self.rng.random() < self.resets / 4  # the episode before had no last step
        first = not reset and (before.last or not before.counts or restart)
        last = bool(self.rng.random() < self.ends)
        truncated = self.rng.random() < 0.5
        age = 0 if first else min(255, int(self.table.records["age"][before.row]) + 1)
        self.table.records[row] = (last and not truncated, last and truncated, age)
        self.table.valid[row] = not reset
        return Step(row, slot, not reset, first, last and not reset)

    def _next_slot(self, stream: int) -> int:
        if not self.free:
            self._evict()
        slot = self.free.pop(int(self.rng.integers(len(self.free))))
        before = self.now[stream]
        self.table.prev[slot] = -1 if before is None or before not in self.order else before
        self.table.length[slot] = 0
        self.now[stream] = slot
        self.order.append(slot)
        return slot

    def _evict(self) -> None:
        slot = next(s for s in self.order if s not in self.now)
        self.order.remove(slot)
        size = self.unroll * self.envs
        self.table.valid[slot * size : (slot + 1) * size] = False
        self.sampler.remove(slot * size, (slot + 1) * size)
        self.table.length[slot] = 0
        self.table.prev[self.table.prev == slot] = -1
        self.free.append(slot)
        for step in (s for stream in self.steps for env in stream for s in env):
            step.gone |= step.slot == slot

    def starts(self) -> set[int]:
        """Rows at which a sequence starts, by the words of the docstring."""
        found = set()
        for steps in (env for stream in self.steps for env in stream):
            for episode, ended in self._episodes(steps):
                for at in range(0, len(episode), self.sequences.stride):
                    complete = at + self.sequences.length <= len(episode)
                    if (complete or (ended and self.sequences.pad)) and not episode[at].gone:
                        found.add(episode[at].row)
        return found

    @staticmethod
    def _episodes(steps: list[Step]) -> list[tuple[list[Step], bool]]:
        episodes: list[tuple[list[Step], bool]] = []
        running: list[Step] = []
        for step in steps:
            if running and (step.first or not step.counts):
                episodes.append((running, True))
                running = []
            if step.counts:
                running.append(step)
            if step.last and running:
                episodes.append((running, True))
                running = []
        return [*episodes, (running, False)]

    def check(self) -> None:
        expected = self.starts()
        assert len(self.sampler) == len(expected)
        if expected:
            assert set(self.sampler.sample(40 * len(expected))[0].tolist()) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_sequence_starts_match_a_list_of_episodes(seed: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 14))
    streams = data.draw(st.integers(1, 2))
    world = World(
        np.random.default_rng(seed),
        Sequences(length, data.draw(st.integers(0, length - 1)), pad=data.draw(st.booleans())),
        unroll=data.draw(st.integers(1, 8)),
        envs=data.draw(st.integers(1, 3)),
        streams=streams,
        slots=streams + data.draw(st.integers(2, 9)),
        ends=data.draw(st.sampled_from([0.02, 0.1, 0.4])),
        resets=data.draw(st.sampled_from([0.0, 0.3])),
        short=data.draw(st.sampled_from([0.0, 0.1])),
    )
    for step in range(data.draw(st.integers(5, 120))):
        world.step()
        if step % 17 == 0:
            world.check()
    world.check()

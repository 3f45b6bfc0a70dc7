"""The parts of a replay, made of what its constructor was told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.core import cgroup
from penstock.core.specs import SlotSpec
from penstock.replay.checks import whole
from penstock.replay.errors import ReplayError
from penstock.replay.gather import Gather
from penstock.replay.layout import Layout, layout_of_spec, make_layout
from penstock.replay.samplers import Sampler, Uniform
from penstock.replay.sequence_gather import SequenceGather
from penstock.replay.sequences import Sequences, SequenceSampler
from penstock.replay.table import LANES_PRIVATE, LANES_SHARED, Table
from penstock.replay.times_sampled import SampleCountLimit
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.store import Geometry

MOST_ROWS = 1 << 31  # keys have 32 bits for the row


def lay_out(
    columns: SlotSpec | Mapping[str, Any],
    capacity: int,
    envs: int,
    frame_stack: int | Mapping[str, int],
    unroll: int | None,
    *,
    shared: bool,
    follow: bool,
) -> Layout:
    """The layout of declared columns, or of slots that others fill."""
    unroll = None if unroll is None else whole("unroll", unroll)
    if isinstance(columns, SlotSpec):
        return layout_of_spec(columns, frame_stack)
    return make_layout(columns, capacity, envs, frame_stack, unroll, shared=shared, follow=follow)


def wrap_sampler(
    sampler: Sampler | None, n_step: int, sequences: Sequences | None, most: int | None
) -> Sampler:
    """``sampler``; of sequences, or drawing each row ``most`` times, where that is asked."""
    chosen: Sampler = Uniform() if sampler is None else sampler
    if not callable(getattr(chosen, "bind", None)):
        raise ReplayError(
            f"sampler {sampler!r} is not a sampler; give an object, such as Uniform() or "
            "Prioritized(alpha=0.6)"
        )
    if sequences is not None:
        sequences.refuse_n_step(n_step)
        chosen = SequenceSampler(sequences, chosen)
    if most is None:
        return chosen
    if sequences is not None:
        raise ReplayError("max_times_sampled counts rows, not sequences; leave one out")
    return SampleCountLimit(chosen, most)


def make_table(
    layout: Layout, capacity: int, in_hand: int, writers: int, sampler: Sampler, *, shared: bool
) -> Table:
    """A table that keeps the ``capacity`` newest rows while ``writers`` hold ``in_hand`` slots.

    Raises ReplayError where its memory is not there.
    """
    spec = layout.spec
    # The oldest slot's first rows lose their frame stacks with the slot before them.
    kept = capacity + layout.history * spec.envs
    slots = max(2, math.ceil(kept / (spec.unroll * spec.envs))) + in_hand
    if slots * spec.unroll * spec.envs > MOST_ROWS:
        raise ReplayError(f"capacity {capacity} is above the {MOST_ROWS} rows that keys name")
    refuse_what_cannot_fit(spec, slots, shared=shared, capacity=capacity)
    return Table(spec, slots, sampler, shared=shared, history=layout.history, writers=writers)


def bind_sampler(sampler: Sampler, table: Table, seed: int | None) -> None:
    """Tell a sampler what it draws from."""
    if isinstance(sampler, SequenceSampler | SampleCountLimit):
        sampler.place(table)
    sampler.bind(table.valid, np.random.default_rng(seed))


def make_gather(
    table: Table, layout: Layout, n_step: int, discount: float, sequences: Sequences | None
) -> Gather | SequenceGather:
    """What makes batches of rows, or of sequences."""
    if sequences is None:
        return Gather(table, layout, n_step, discount)
    return SequenceGather(table, layout, discount, sequences)


def nbytes_of(spec: SlotSpec, slots: int, *, shared: bool) -> int:
    """Bytes of a table: its slots, and what says which rows count."""
    geometry = Geometry(spec, slots, LANES_SHARED if shared else LANES_PRIVATE)
    return geometry.nbytes + slots * spec.unroll * spec.envs


def refuse_what_cannot_fit(spec: SlotSpec, slots: int, *, shared: bool, capacity: int) -> None:
    """Raise ReplayError where the host, or the control group, has not that much memory left."""
    needed = nbytes_of(spec, slots, shared=shared)
    free, where = available_nbytes(), "this host"
    allowed = cgroup.memory_left_nbytes()
    if allowed is not None and allowed < free:
        free, where = allowed, "its control group"
    if needed > free:
        fits = max(0, int(capacity * free / needed))
        raise ReplayError(
            f"capacity {capacity} needs {needed / 1e9:.2f} GB and {where} has {free / 1e9:.2f} GB "
            f"left; lower capacity to about {fits}"
        )

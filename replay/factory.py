"""Makes the parts of a replay: from its arguments, an environment or a saved description."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.configs.samplers import SAMPLERS
from penstock.core import cgroup
from penstock.core.specs import SlotSpec
from penstock.replay.errors import ReplayError
from penstock.replay.gather import Gather
from penstock.replay.layout import Layout, layout_of_spec, make_layout
from penstock.replay.samplers import NamedSampler, SampleCountLimit, Sampler, Uniform
from penstock.replay.sequences import SequenceGather, Sequences, SequenceSampler
from penstock.replay.sharing import WRITER_SLOTS
from penstock.replay.snapshot import FolderReader
from penstock.replay.steps import AUTORESETS, Autoreset
from penstock.replay.table import LANES_PRIVATE, LANES_SHARED, Table
from penstock.transport.shm.arena import available_nbytes
from penstock.transport.shm.store import Geometry

if TYPE_CHECKING:
    from penstock.configs.sections import ReplayConfig

# Rows that a table may have: keys have 32 bits for the row.
MOST_ROWS = 1 << 31

# Names of gymnasium's autoreset modes.
MODES: dict[str, Autoreset] = {
    "NextStep": "next_step",
    "SameStep": "same_step",
    "Disabled": "none",
}


def positive_int(name: str, value: Any) -> int:
    """``value`` as an int of at least 1; 1e6 is accepted. Raises ReplayError for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int | np.integer) or value < 1:
        raise ReplayError(f"{name} {value!r} must be a whole number and at least 1")
    return int(value)


def slots_in_hand(in_hand: int | None, writers: int, *, shared: bool) -> int:
    """Slots that ``writers`` hold together: by default one each, two if ``shared``."""
    each = WRITER_SLOTS if shared else 1
    return positive_int("in_hand", writers * each if in_hand is None else in_hand)


def check_numbers(capacity: int, discount: float, envs: int, autoreset: str) -> None:
    """Raise ReplayError for options out of range."""
    if capacity < envs:
        raise ReplayError(
            f"capacity {capacity} is below the {envs} rows of one step; give at least that"
        )
    if not 0 <= discount <= 1:
        raise ReplayError(f"discount {discount} must lie between 0 and 1")
    if autoreset not in AUTORESETS:
        raise ReplayError(f"autoreset {autoreset!r} must be one of {', '.join(AUTORESETS)}")


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
    """Make the layout of declared columns, or read that of slots which other processes fill.

    Args:
        columns: as given to `Replay`, or the spec of such slots.
        capacity: rows that the replay keeps.
        envs: environments of a step.
        frame_stack: frames of a stack, for all observations or by name.
        unroll: steps of a slot; None: chosen.
        shared: whether other processes may write.
        follow: whether columns are added that tell which rows follow each other.

    Raises:
        ReplayError: the columns or a number cannot be used.
    """
    if unroll is not None:
        unroll = positive_int("unroll", unroll)
    if isinstance(columns, SlotSpec):
        return layout_of_spec(columns, frame_stack)
    return make_layout(columns, capacity, envs, frame_stack, unroll, shared=shared, follow=follow)


def wrap_sampler(
    sampler: Sampler | None, n_step: int, sequences: Sequences | None, most: int | None
) -> Sampler:
    """Wrap a sampler for sequences, or for a limit of draws per row.

    Args:
        sampler: draws rows, or starts of sequences; None: `Uniform`.
        n_step: steps of the returns, which sequences have not.
        sequences: draw sequences; None: draw rows.
        most: draws per row; None: no limit.

    Raises:
        ReplayError: the sampler is none, or the options do not go together.
    """
    chosen: Sampler = Uniform() if sampler is None else sampler
    if isinstance(chosen, type) or not callable(getattr(chosen, "bind", None)):
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
    """Make a table that keeps the newest rows.

    Args:
        layout: of its slots.
        capacity: rows that it keeps, while writers hold slots.
        in_hand: slots that all writers hold together.
        writers: the number of writers.
        sampler: draws its rows.
        shared: whether other processes may write.

    Raises:
        ReplayError: there is not enough memory, or there are more rows than keys.
    """
    spec = layout.spec

    # The first rows of the oldest slot lose their frame stacks with the slot before it.
    rows = capacity + layout.history * spec.envs
    rows_per_slot = spec.unroll * spec.envs
    slots = max(2, math.ceil(rows / rows_per_slot)) + in_hand
    if slots * rows_per_slot > MOST_ROWS:
        raise ReplayError(
            f"capacity {capacity} is too large, as keys can identify {MOST_ROWS} rows; lower it"
        )

    refuse_what_cannot_fit(spec, slots, shared=shared, capacity=capacity)
    return Table(spec, slots, sampler, shared=shared, history=layout.history, writers=writers)


def bind_sampler(sampler: Sampler, table: Table, seed: int | None) -> None:
    """Connect a sampler to the table that it draws from."""
    if isinstance(sampler, SequenceSampler | SampleCountLimit):
        sampler.place(table)
    sampler.bind(table.valid, np.random.default_rng(seed))


def make_gather(
    table: Table, layout: Layout, n_step: int, discount: float, sequences: Sequences | None
) -> Gather | SequenceGather:
    """The object that makes batches of rows, or of sequences."""
    if sequences is None:
        return Gather(table, layout, n_step, discount)
    return SequenceGather(table, layout, discount, sequences)


def nbytes_of(spec: SlotSpec, slots: int, *, shared: bool) -> int:
    """Bytes of a table: its slots, and the marks of the rows that count."""
    geometry = Geometry(spec, slots, LANES_SHARED if shared else LANES_PRIVATE)
    return geometry.nbytes + slots * spec.unroll * spec.envs


def refuse_what_cannot_fit(spec: SlotSpec, slots: int, *, shared: bool, capacity: int) -> None:
    """Raise ReplayError where the host, or the control group, lacks the memory.

    Args:
        spec: of the table's slots.
        slots: the number of them.
        shared: whether other processes may write.
        capacity: for the message, which names one that fits.
    """
    needed_nbytes = nbytes_of(spec, slots, shared=shared)
    free_nbytes = available_nbytes()
    limited_by = "this host"
    group_nbytes = cgroup.memory_left_nbytes()
    if group_nbytes is not None and group_nbytes < free_nbytes:
        free_nbytes = group_nbytes
        limited_by = "its control group"

    if needed_nbytes > free_nbytes:
        fitting_capacity = max(0, int(capacity * free_nbytes / needed_nbytes))
        raise ReplayError(
            f"capacity {capacity} needs {needed_nbytes / 1e9:.2f} GB and {limited_by} has "
            f"{free_nbytes / 1e9:.2f} GB left; lower capacity to about {fitting_capacity}"
        )


def columns_of(env: Any) -> dict[str, Any]:
    """The spaces of one environment, by column, from a single or a vector environment.

    Raises:
        ReplayError: it has no spaces.
    """
    spaces = {}
    for attribute, column in (("observation_space", "obs"), ("action_space", "action")):
        space = getattr(env, f"single_{attribute}", None) or getattr(env, attribute, None)
        if space is None:
            raise ReplayError(f"{env!r} has no {attribute}; pass a gymnasium environment")
        spaces[column] = space
    return spaces


def envs_of(env: Any) -> int:
    """The number of environments that one step advances."""
    return int(getattr(env, "num_envs", 1))


def resets_of(env: Any) -> Autoreset:
    """The autoreset mode of an environment, from its ``metadata``.

    It is "none" for a single environment, which its caller resets.

    Raises:
        ReplayError: a vector environment tells no mode, or an unknown one.
    """
    metadata = getattr(env, "metadata", None) or {}
    mode = metadata.get("autoreset_mode")
    if mode is None:
        if hasattr(env, "num_envs"):
            raise ReplayError(
                "the vector environment does not say in metadata['autoreset_mode'] how it resets; "
                "give autoreset='next_step', 'same_step' or 'none'"
            )
        return "none"

    # Gymnasium's mode is an enum, whose value is the name.
    name = getattr(mode, "value", mode)
    if name not in MODES:
        raise ReplayError(f"autoreset mode {mode!r} is none of {list(MODES)}; give autoreset=")
    return MODES[name]


def _unwrapped(sampler: Sampler) -> Sampler:
    """The sampler that `wrap_sampler` was given."""
    return sampler.sampler if isinstance(sampler, SequenceSampler | SampleCountLimit) else sampler


def describe_sampler(sampler: Sampler) -> dict[str, Any] | None:
    """JSON values from which `read_sampler` makes the sampler again.

    None for a sampler without a name. Wrappers follow from the replay's other options.
    """
    inner = _unwrapped(sampler)
    entry = f"{type(inner).__module__}:{type(inner).__qualname__}"
    if not isinstance(inner, NamedSampler) or entry not in SAMPLERS.values():
        return None
    kind = next(name for name, named_entry in SAMPLERS.items() if named_entry == entry)
    return {"kind": kind} | inner.arguments()


def read_sampler(reader: FolderReader, described: dict[str, Any] | None) -> Sampler:
    """Make the sampler that a snapshot describes.

    Args:
        reader: of the snapshot, for errors.
        described: as from `describe_sampler`.

    Raises:
        ReplayError: it was a custom sampler, or the snapshot is damaged.
    """
    with reader.reporting_damage():
        arguments = dict(described or {})
        kind = arguments.pop("kind", None)
        sampler = find_sampler_class(kind).from_arguments(arguments) if kind in SAMPLERS else None
        if sampler is not None:
            return sampler
    raise ReplayError(
        f"{reader.folder} was saved with a sampler or schedule of your own; make it and give it as "
        "Replay.load(folder, sampler=...)"
    )


def sampler_for(options: ReplayConfig, steps: Callable[[], int]) -> Sampler:
    """The sampler that the section `replay` names; see `NamedSampler.for_run`."""
    by_priority = "prioritized" if options.prioritized else "uniform"
    return find_sampler_class(options.sampler or by_priority).for_run(options, steps)


def find_sampler_class(name: str) -> type[NamedSampler]:
    """The class of a sampler."""
    sampler_class: type[NamedSampler] = resolve_name(SAMPLERS[name])
    return sampler_class

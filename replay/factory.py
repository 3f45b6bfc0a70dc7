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

MOST_ROWS = 1 << 31  # keys have 32 bits for the row
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
    """The layout of declared columns, or of slots that other processes fill."""
    unroll = None if unroll is None else positive_int("unroll", unroll)
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
    """Make a table that keeps the ``capacity`` newest rows while ``writers`` hold ``in_hand``
    slots.

    Raises ReplayError where there is not enough memory.
    """
    spec = layout.spec
    # The first rows of the oldest slot lose their frame stacks with the slot before it.
    rows = capacity + layout.history * spec.envs
    slots = max(2, math.ceil(rows / (spec.unroll * spec.envs))) + in_hand
    if slots * spec.unroll * spec.envs > MOST_ROWS:
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
    """Raise ReplayError where the host, or the control group, lacks the memory."""
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


def columns_of(env: Any) -> dict[str, Any]:
    """The spaces of one environment, by column, from a single or a vector environment."""
    spaces = {}
    for name, column in (("observation_space", "obs"), ("action_space", "action")):
        space = getattr(env, f"single_{name}", None) or getattr(env, name, None)
        if space is None:
            raise ReplayError(f"{env!r} has no {name}; pass a gymnasium environment")
        spaces[column] = space
    return spaces


def envs_of(env: Any) -> int:
    """The number of environments that one step advances."""
    return int(getattr(env, "num_envs", 1))


def resets_of(env: Any) -> Autoreset:
    """The autoreset mode in ``metadata``.

    "none" for a single environment, which its caller resets.
    """
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode")
    if mode is None:
        if hasattr(env, "num_envs"):
            raise ReplayError(
                "the vector environment does not say in metadata['autoreset_mode'] how it resets; "
                "give autoreset='next_step', 'same_step' or 'none'"
            )
        return "none"
    name = getattr(mode, "value", mode)
    if name not in MODES:
        raise ReplayError(f"autoreset mode {mode!r} is none of {list(MODES)}; give autoreset=")
    return MODES[name]


def _inner(sampler: Sampler) -> Sampler:
    return sampler.sampler if isinstance(sampler, SequenceSampler | SampleCountLimit) else sampler


def describe_sampler(sampler: Sampler) -> dict[str, Any] | None:
    """JSON values from which `read_sampler` makes the sampler again.

    None for a sampler without a name. Wrappers follow from the replay's other options.
    """
    inner = _inner(sampler)
    entry = f"{type(inner).__module__}:{type(inner).__qualname__}"
    if not isinstance(inner, NamedSampler) or entry not in SAMPLERS.values():
        return None
    kind = next(name for name, known in SAMPLERS.items() if known == entry)
    return {"kind": kind} | inner.arguments()


def read_sampler(reader: FolderReader, described: dict[str, Any] | None) -> Sampler:
    """Make the sampler that a snapshot describes.

    Args:
        reader: of the snapshot, for errors.
        described: as from `describe_sampler`.

    Raises:
        ReplayError: it was a custom sampler, or the snapshot is damaged.
    """
    with reader.refusing():
        arguments = dict(described or {})
        kind = arguments.pop("kind", None)
        sampler = named(kind).from_arguments(arguments) if kind in SAMPLERS else None
        if sampler is not None:
            return sampler
    raise ReplayError(
        f"{reader.folder} was saved with a sampler or schedule of your own; make it and give it as "
        "Replay.load(folder, sampler=...)"
    )


def sampler_for(options: ReplayConfig, steps: Callable[[], int]) -> Sampler:
    """The sampler that the section `replay` names; see `NamedSampler.for_run`."""
    by_priority = "prioritized" if options.prioritized else "uniform"
    return named(options.sampler or by_priority).for_run(options, steps)


def named(name: str) -> type[NamedSampler]:
    """The class of a sampler."""
    found: type[NamedSampler] = resolve_name(SAMPLERS[name])
    return found

"""The writer behind `Replay.add`: steps of one environment or a vector, into slots in place.

Each writer is a stream: its steps follow each other. The rows of the slot that it fills count at
once. The autoreset mode decides what a row means:

- "none": the caller resets. The row after an episode's end begins another.
- "next_step": the call after the end resets; it is no decision and is dropped.
- "same_step": next_obs is already the reset observation, the final one is in ``info``.

Most steps end no episode and have plain arrays. `StepWriter.add` writes those itself and is dense,
since it runs once per step; all other steps go through `StepWriter._add_checked`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numpy import frombuffer, ndarray

from penstock.replay.columns import Array, Leaf, Nest, flatten, validated
from penstock.replay.errors import ReplayError
from penstock.replay.frames import FrameWriter
from penstock.replay.layout import OLDEST, Layout
from penstock.replay.samplers import MAX_PRIORITY, are_priorities
from penstock.replay.table import NONE, SlotStream, Table

Autoreset = Literal["none", "next_step", "same_step"]
AUTORESETS = ("none", "next_step", "same_step")
Flags = npt.NDArray[np.bool_]
StepArguments = tuple[Any, Any, Any, Any, Any, Any, Mapping[str, Any] | None, Any, dict[str, Any]]
"""The arguments of `StepWriter.add`, in order; no record, since one is made for each step."""

FLAG = np.dtype(bool)

# Two flags that lie side by side, as one word.
FLAG_PAIR = np.dtype(np.uint16)

REWARD = Leaf("reward", np.dtype(np.float32), ())

# A word of 16 bytes, which numpy copies in one piece.
WIDE = np.dtype("c16")

# Rows from which a wide copy pays for making the view.
WIDE_FROM = 32

# Python's scalar types that fit columns of a dtype, by its character.
SCALARS: dict[str, tuple[type, ...]] = {
    "?": (bool,),
    "l": (int,),
    "f": (float, int),
    "d": (float, int),
}


class _Target:
    """The memory for a column's values of one step, and their expected dtype and shape."""

    __slots__ = ("_wide", "accepted", "column", "leaf", "name", "one", "scalars", "shape", "wide")

    def __init__(self, table: Table, leaf: Leaf, name: str, envs: int) -> None:
        self.leaf = leaf

        self.name = name
        """Of the column."""

        own_block = table.columns.get(name)
        self.column: Array = table.records[name] if own_block is None else own_block
        """The column of all rows of the table."""

        self.shape = (envs, *leaf.shape)
        """Of a step's values."""

        self.one = envs == 1
        """Whether values may come without the axis of environments."""

        self.accepted = leaf.dtype
        """The dtype of the last arrays, which is known to fit: can_cast takes a microsecond."""

        self.scalars = SCALARS.get(leaf.dtype.char, ()) if self.shape == (1,) else ()
        """Python's scalar types that are accepted."""

        is_wide = len(leaf.shape) == 1 and leaf.nbytes == WIDE.itemsize and envs >= WIDE_FROM
        is_wide = is_wide and own_block is None
        self._wide = _words_of(table.records, name, WIDE) if is_wide else None
        self.wide = self._wide
        """The column as words of 16 bytes; None if it has others, or while values must be cast."""

    def check(self, value: Any) -> Array:
        """``value`` as an array [envs, *shape]. Raises ReplayError if it does not fit."""
        if type(value) is np.ndarray and value.dtype is self.accepted:
            if value.shape == self.shape:
                return value
            if self.one and value.shape == self.leaf.shape:
                return value[None]
        if type(value) in self.scalars:
            return np.array((value,), self.leaf.dtype)

        array = validated(self.leaf, value, self.shape[0], self.name)
        if isinstance(value, np.ndarray):
            self.accepted = array.dtype
            self.wide = self._wide if array.dtype == self.leaf.dtype else None
        return array

    def write(self, rows: slice, value: Array) -> None:
        """Store checked values in ``rows`` of the table."""
        wide = self.wide
        if wide is None or value.dtype is not self.leaf.dtype or not value.flags.c_contiguous:
            self.column[rows] = value
        else:
            wide[rows] = frombuffer(value, WIDE)


def _words_of(records: Array, name: str, word: np.dtype[Any]) -> Array:
    """A view of one field of all records as [rows] of ``word``."""
    assert records.dtype.fields is not None
    layout = {
        "names": ["word"],
        "formats": [word],
        "offsets": [records.dtype.fields[name][1]],
        "itemsize": records.dtype.itemsize,
    }
    words: Array = records.view(np.dtype(layout))["word"]  # type: ignore[call-overload]
    return words


def _both_flags(records: Array) -> Array | None:
    """A view of `terminated` and `truncated` as [rows] of one word.

    None where they are not adjacent.
    """
    fields = records.dtype.fields
    assert fields is not None
    first = fields["terminated"][1]
    second = fields["truncated"][1]
    return _words_of(records, "terminated", FLAG_PAIR) if second == first + 1 else None


class StepWriter:
    """One stream of steps. Used under the buffer's lock."""

    def __init__(self, table: Table, layout: Layout, autoreset: Autoreset) -> None:
        envs = table.spec.envs
        self._table = table
        self._layout = layout
        self._autoreset = autoreset
        self._envs = envs
        self._stream = SlotStream(table)
        self._no_envs: Flags = np.zeros(envs, bool)

        self._resetting = self._no_envs
        """Environments whose next row only resets them; of none unless NEXT_STEP."""

        self._any_resetting = False

        self._frames = FrameWriter(table, layout, self._stream) if layout.framed else None
        """Writes the observations that are stored as frames, if there are any."""

        def make_target(leaf: Leaf, name: str) -> _Target:
            return _Target(table, leaf, name, envs)

        # `_targets` has all columns but the flags, in the order in which they are checked.
        obs = [make_target(o.leaf, o.name) for o in layout.inline]
        self._next_obs = [make_target(o.leaf, o.next_name) for o in layout.inline]
        further = [make_target(leaf, leaf.name) for leaf in layout.other_leaves]
        self._targets = [*obs, *self._next_obs, *further, make_target(REWARD, "reward")]
        self._terminated = make_target(Leaf("terminated", FLAG, ()), "terminated")
        self._truncated = make_target(Leaf("truncated", FLAG, ()), "truncated")
        self._flags_shape = (envs,)

        # Both flags of a row are cleared together where they are one word.
        self._flags = _both_flags(table.records)
        self._no_flags: Array = np.zeros(envs, FLAG_PAIR)

        names = [target.name for target in self._targets]
        tracks_episodes = "age" in (table.records.dtype.names or ()) and not layout.framed
        self._episodes = EpisodeTracker(envs) if tracks_episodes else None
        """Finds where episodes begin, if the age of rows is recorded and no frame shows it."""

        inline = ["obs", "next_obs"] if self._frames is None else []
        is_flat = layout.obs == "obs" and not tracks_episodes
        self._direct = names == [*inline, "action", "reward"] and is_flat
        """Whether there are only the usual columns, without nesting, which `add` itself writes."""

        self._extra_names = layout.other_nests.keys() - {"action"}

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        next_obs: Any,
        info: Mapping[str, Any] | None,
        priority: Any,
        extra: dict[str, Any],
    ) -> None:
        """Add one step of every environment; the arguments are those of `Replay.add`.

        Raises:
            ReplayError: a value does not fit. Nothing is stored then.
        """
        shape = self._flags_shape
        if (
            type(terminated) is not ndarray
            or terminated.dtype is not FLAG
            or terminated.shape != shape
        ):
            terminated = self._terminated.check(terminated)
        if (
            type(truncated) is not ndarray
            or truncated.dtype is not FLAG
            or truncated.shape != shape
        ):
            truncated = self._truncated.check(truncated)

        # At the end of an episode it does not matter whether obs and next_obs are one array.
        if self._stream.slot == NONE and not terminated.all():
            refuse_one_memory(obs, next_obs)

        # Steps that end an episode, or need more than a copy of each column, go the longer way.
        # A byte search takes a tenth of the time that `any` needs to start.
        ends_episode = 1 in terminated.tobytes() or 1 in truncated.tobytes()
        stream = self._stream
        frames = self._frames
        is_plain = self._direct and not (
            ends_episode or self._any_resetting or extra or priority is not None
        )
        if is_plain:
            if stream.slot == NONE:
                stream.begin()
            is_plain = frames is None or frames.follows(obs, next_obs)
        if not is_plain:
            self._add_checked(
                self._flatten(obs, action, reward, next_obs, extra),
                terminated=terminated,
                truncated=truncated,
                ends_episode=ends_episode,
                info=info,
                priority=priority,
            )
            return

        # `_Target.check` and `_Target.write` are spelt out here for values that fit as they are.
        rows = slice(stream.start, stream.start + self._envs)
        values = (obs, next_obs, action, reward) if frames is None else (action, reward)
        for target, value in zip(self._targets, values):  # noqa: B905 - strict costs 3 % of a step
            if (
                type(value) is not ndarray
                or value.dtype is not target.accepted
                or value.shape != target.shape
            ):
                target.write(rows, target.check(value))
            elif target.wide is None:
                target.column[rows] = value
            else:
                try:
                    target.wide[rows] = frombuffer(value, WIDE)
                except ValueError:  # it is not contiguous
                    target.column[rows] = value
        if self._flags is None:
            self._terminated.column[rows] = terminated
            self._truncated.column[rows] = truncated
        else:
            self._flags[rows] = self._no_flags

        if frames is None:
            self._table.commit_all(stream.slot, stream.t, rows)
        else:
            frames.write_following(next_obs)
            self._table.commit(stream.slot, stream.t)
        stream.advance()

    def flush(self) -> None:
        """Publish the slot with its rows; the stream continues in another."""
        if self._stream.slot != NONE and self._stream.t:
            self._stream.end()

    def close(self) -> None:
        """Publish the written rows; the stream ends."""
        self._stream.close()

    def _add_checked(
        self,
        flat: dict[str, Any],
        *,
        terminated: Array,
        truncated: Array,
        ends_episode: bool,
        info: Mapping[str, Any] | None,
        priority: Any,
    ) -> None:
        """Add rows of any kind: that end episodes, only reset, are framed or nested.

        Args:
            flat: the values by column, but for the flags.
            terminated: checked flags [E].
            truncated: checked flags [E].
            ends_episode: whether any of these flags is set.
            info: of the environment.
            priority: of the new rows, [E]; None: the sampler's own.
        """
        # Check everything before the first byte is written.
        stream = self._stream
        frames = self._frames
        values = [target.check(flat[target.name]) for target in self._targets]
        resetting = self._resetting if self._any_resetting else None
        done = self._done(terminated, truncated) if ends_episode else None
        finals = self._finals(info, done)
        priorities = None if priority is None else _validated_priorities(priority, self._envs)
        if stream.slot == NONE:
            stream.begin()
        next_frames = frames.accept(flat, resetting, done, finals) if frames else {}

        # Write the row's columns, and the final observations over the next ones.
        self._write(values, terminated, truncated)
        if self._episodes is not None:
            inline = len(self._next_obs)
            ages = self._episodes.ages(
                obs=values[:inline],
                next_obs=values[inline : 2 * inline],
                over=terminated | truncated,
            )
            self._table.records["age"][stream.start : stream.start + self._envs] = ages
        if finals is not None and done is not None:
            rows = stream.start + np.flatnonzero(done)
            for target in self._next_obs:
                target.column[rows] = finals[target.leaf.name]
        close_slot = frames.write(next_frames, done, finals) if frames else False
        self._commit(resetting, priorities)

        # Note what the next row is: the first of an episode, or one that only resets.
        resets_next = self._autoreset == "next_step"
        if frames:
            frames.advance(resetting if resets_next else done, resetting)
        if resets_next:
            self._any_resetting = done is not None
            self._resetting = self._no_envs if done is None else done
        stream.advance()
        if close_slot:
            stream.end()

    def _commit(self, resetting: Flags | None, priorities: Array | None) -> None:
        """Let the row count in all environments but those that it only resets.

        Rows whose stacks could not be kept do not count either; the table counts them as refused.
        """
        counts = None if resetting is None else ~resetting
        lost = self._frames.lost if self._frames else None
        if lost is not None:
            if counts is None:
                counts = np.ones(self._envs, bool)
            self._table.count_refused(int(np.count_nonzero(lost & counts)), "history")
            counts &= ~lost
        self._table.commit(self._stream.slot, self._stream.t, counts, priorities)

    def _done(self, terminated: Array, truncated: Array) -> Flags | None:
        """Environments that ended an episode in this step; None: no environment."""
        done: Flags = (terminated | truncated) & ~self._resetting
        return done if done.any() else None

    # ------------------------------------------------------------------------- checking the input

    def _flatten(
        self, obs: Any, action: Any, reward: Any, next_obs: Any, extra: dict[str, Any]
    ) -> dict[str, Any]:
        """The values of a step by column. Raises ReplayError for another nesting or set of them."""
        layout = self._layout
        if extra.keys() != self._extra_names:
            raise ReplayError(
                f"add came with the further columns {sorted(extra)}, expected "
                f"{sorted(self._extra_names)}: "
                "declare columns when the replay is made, and pass each of them at every add"
            )

        flat: dict[str, Any] = {"reward": reward}
        flatten(layout.obs, obs, "obs", flat)
        next_flat: dict[str, Any] = {}
        flatten(layout.obs, next_obs, "next_obs", next_flat)
        flat |= {f"next_{name}": value for name, value in next_flat.items()}
        for root, nest in layout.other_nests.items():
            flatten(nest, action if root == "action" else extra[root], root, flat)
        return flat

    def _finals(
        self, info: Mapping[str, Any] | None, done: Flags | None
    ) -> dict[str, Array] | None:
        """SAME_STEP: final observations [n, *shape] of the environments that are done."""
        if done is None:
            return None
        if self._autoreset == "same_step":
            return final_observations(self._layout, info, done)
        refuse_finals(info, self._autoreset)
        return None

    def _write(self, values: list[Array], terminated: Array, truncated: Array) -> None:
        """Write the checked columns of a row; a step with both flags counts as terminated."""
        rows = slice(self._stream.start, self._stream.start + self._envs)
        for target, value in zip(self._targets, values, strict=True):
            target.write(rows, value)
        self._terminated.column[rows] = terminated
        self._truncated.column[rows] = truncated & ~terminated


class EpisodeTracker:
    """Tells where the episodes of ``envs`` environments begin, from steps in one stream.

    For observations that are stored beside their successors. An episode that was given up, by a
    reset without a flag or by a second use of the stream, shows in an observation that differs from
    the ``next_obs`` of the step before. n-step returns and sequences stop there.
    """

    def __init__(self, envs: int) -> None:
        self._expected: list[Array] = []
        """The last ``next_obs``, which the next observation should equal."""

        self._over: Flags = np.ones(envs, bool)
        """Environments whose last step ended an episode; at first all."""

        self._age: npt.NDArray[np.int64] = np.zeros(envs, np.int64)

    def ages(self, obs: Sequence[Array], next_obs: Sequence[Array], over: Flags) -> Array:
        """Add a step, and tell how long each environment's episode has lasted.

        Args:
            obs: the observation, one array ``[E, ...]`` per leaf.
            next_obs: the next observation, alike.
            over: ``[E]``, environments whose episode this step ends.

        Returns:
            Steps since the episode began, uint8 ``[E]``: 0 where it is this step, at most `OLDEST`.
        """
        starts = self._over.copy()
        # Nothing is expected of the first step.
        for value, expected in zip(obs, self._expected, strict=False):
            starts |= _differing(value, expected)

        self._age = np.where(starts, 0, np.minimum(self._age + 1, OLDEST))
        self._expected = [np.array(value) for value in next_obs]
        self._over = np.array(over, bool)
        return self._age.astype(np.uint8)


def _differing(values: Array, others: Array) -> Flags:
    """For each environment, whether any byte of it differs: NaN equals itself."""
    if values.dtype != others.dtype:
        others = others.astype(values.dtype)
    differ: Flags = (_bytes(values) != _bytes(others)).any(axis=1)
    return differ


def _bytes(values: Array) -> npt.NDArray[np.uint8]:
    """The bytes of arrays [E, ...] as [E, bytes]."""
    return np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)


def _validated_priorities(priority: Any, envs: int) -> Array:
    """Priorities of a step as float64 [E]. Raises ReplayError for others."""
    priorities = np.asarray(priority, np.float64).reshape(-1)
    if len(priorities) != envs or not are_priorities(priorities).all():
        raise ReplayError(
            f"priority came as {priority!r}, expected {envs} numbers from 0 to {MAX_PRIORITY:g}"
        )
    return priorities


def refuse_one_memory(obs: Any, next_obs: Any, name: str = "obs") -> None:
    """Raise ReplayError where an array of ``obs`` and its counterpart share one address.

    An environment that writes each observation into the same array has overwritten obs by the time
    next_obs exists. Both then have one address, which shows at the first step. Overlapping arrays
    are allowed: stacks of frames may be views of one history.

    Args:
        obs: an observation: an array, or a dict or tuple of observations.
        next_obs: the observation that followed it.
        name: of their column, for the message.
    """
    if isinstance(obs, np.ndarray) and isinstance(next_obs, np.ndarray):
        if obs is next_obs or _address(obs) == _address(next_obs):
            raise ReplayError(
                f"{name} and next_{name} are the same memory, so the environment has written over "
                "the first of them; give add a copy of it that was made before the step"
            )

    # Parts that only one of them has are refused when they are flattened.
    elif isinstance(obs, Mapping) and isinstance(next_obs, Mapping):
        for key in obs.keys() & next_obs.keys():
            refuse_one_memory(obs[key], next_obs[key], f"{name}.{key}")
    elif isinstance(obs, tuple) and isinstance(next_obs, tuple):
        for i, (part, next_part) in enumerate(zip(obs, next_obs, strict=False)):
            refuse_one_memory(part, next_part, f"{name}.{i}")


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def final_observations(
    layout: Layout, info: Mapping[str, Any] | None, done: Flags
) -> dict[str, Array]:
    """Read the final observations from the `info` of a SAME_STEP environment.

    Two layouts exist: gymnasium's vector environments give an object array with an observation for
    each environment that ended, and a mask ``_final_obs``; ale-py gives one dense array, without a
    mask.

    Args:
        layout: of the replay.
        info: of the step; None: the caller gave none.
        done: environments [E] whose episode ended.

    Returns:
        Arrays ``[n, *shape]`` by column, for the n environments that are done.

    Raises:
        ReplayError: the final observation of one of them is missing, or does not fit its column.
    """
    done_envs = np.flatnonzero(done)
    observations = None if info is None else info.get("final_obs")
    if observations is None:
        raise ReplayError(
            f"environment {done_envs[0]} ended and autoreset is same_step, but info has no "
            "final_obs; pass info= as the environment gave it"
        )
    mask = info.get("_final_obs") if info is not None else None
    if mask is not None and not np.asarray(mask)[done_envs].all():
        missing = done_envs[~np.asarray(mask)[done_envs]][0]
        raise ReplayError(
            f"environment {missing} ended, but info['_final_obs'] says that it gave no final "
            "observation; pass the info of the same step"
        )

    # Sort the observations by column: a list of one value per environment that is done.
    if isinstance(observations, np.ndarray) and observations.dtype == object:
        parts = [_leaves(layout.obs, observations[env]) for env in done_envs]
        columns = {name: [part[name] for part in parts] for name in parts[0]}
    else:
        columns = {}
        for name, array in _leaves(layout.obs, observations).items():
            columns[name] = [np.asarray(array)[env] for env in done_envs]

    leaves = {o.name: o.leaf for o in layout.observations}
    finals = {}
    for name, values in columns.items():
        rows = [validated(leaves[name], value, 1, f"final_{name}") for value in values]
        finals[name] = np.concatenate(rows)
    return finals


def refuse_finals(info: Mapping[str, Any] | None, autoreset: str) -> None:
    """Refuse final observations where an episode did not end in SAME_STEP."""
    if info is not None and info.get("final_obs") is not None:
        raise ReplayError(
            f"info has final_obs, which environments give that reset in the same step, but "
            f"autoreset is {autoreset}; make the replay with autoreset='same_step'"
        )


def _leaves(nest: Nest, value: Any) -> dict[str, Any]:
    """The leaves of a final observation, by column."""
    leaves: dict[str, Any] = {}
    flatten(nest, value, "final_obs", leaves)
    return leaves

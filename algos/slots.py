"""Slots of all algorithms: their common columns, the check of values, rewards for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core.draws import NO_DRAW
from penstock.core.observations import Spaces, views
from penstock.core.rewards import Rewards, adjust_rewards
from penstock.core.specs import GIVEN, Column
from penstock.envs import find_bad_reward
from penstock.league.results import GameCounts
from penstock.models.fitting import parts_of

MOST_RETURN = 1e12  # largest discounted return that is accepted
FLAGS = ("terminated", "truncated", "alive")
OPPONENT = "opponent"  # column: number of the draw that plays against the row (`core.draws`)
OUTCOME = "outcome"  # column: result of an episode in its last row; -1 lost, 0 drawn, 1 won
RETURN = "discounted_return"  # column: discounted sum of raw rewards since the episode began
CORE_STATE = "core_state"  # column: the recurrent state before the first row of an unroll
STATE = "state"  # column: the recurrent state before each row, of which replay's sequences begin
OLDER = "older"  # column: the frames of an unroll's first stack except the newest
BEGINS = "begins"  # column: at row t, whether and how an episode begins with obs[t + 1]
# Values of the column `BEGINS`. At 0 no episode begins, and the stack moves on by one frame. An
# episode that begins fills its first stack with its first frame, repeated, or with zeros.
REPEATS = 1
AFTER_ZEROS = 2


class RecordedSum(NamedTuple):
    """Sum and number of the values that environments reported for one key of `env.record`."""

    total: float
    number: int

    @classmethod
    def of(
        cls, columns: Mapping[str, npt.NDArray[Any]], key: str, rows: npt.NDArray[np.bool_]
    ) -> RecordedSum:
        """Sums the values of a column over those ``rows`` (bool ``[T, E]``) that have one."""
        has_value = columns.get(GIVEN.format(key))
        if has_value is not None:
            rows = rows & has_value

        values = columns[key][rows]
        return cls(float(values.sum(dtype=np.float64)), values.size)


class UnrollSummary(NamedTuple):
    """What metrics need of the unrolls of E environments: steps by policy version, finished
    episodes, and recorded values.

    The thread that gathers a batch makes it: the columns are in its core's cache, while the
    learner's thread would read them from memory.
    """

    versions: npt.NDArray[np.int64]
    """Policy versions ``[E]``; ``[T, E]`` where an unroll spans two of them."""
    steps: npt.NDArray[np.integer[Any]]
    """Agent steps by each of ``versions``, in the same shape."""
    returns: list[float]
    """Raw returns of the episodes that ended."""
    lengths: list[int]
    """Agent steps of the same episodes."""
    least_exploring: list[bool] | None = None
    """Whether the same episodes were of environments that explore least; None where all explore
    alike."""
    recorded: Mapping[str, tuple[RecordedSum, RecordedSum]] = MappingProxyType({})
    """For each key of `env.record`, the sum over all agent steps, and the sum over those that ended
    an episode."""
    results: Mapping[int, GameCounts] = MappingProxyType({})
    """Games that ended, by the number of the draw or scripted player that they were played against.
    """

    @classmethod
    def of(
        cls,
        columns: Mapping[str, npt.NDArray[Any]],
        record: Sequence[str] = (),
        least_exploring: npt.NDArray[np.bool_] | None = None,
    ) -> UnrollSummary:
        """Summarises a slot or a batch of unrolls; the result shares no memory with it.

        Args:
            columns: arrays ``[T, E]`` by name.
            record: keys of `env.record`.
            least_exploring: which environments explore least, ``[E]``; None if all explore alike.
        """
        alive = columns["alive"]
        versions = columns["policy_version"]
        steps: npt.NDArray[np.integer[Any]] = alive.astype(np.int64)
        if (versions == versions[0]).all():
            versions = versions[0]
            steps = np.count_nonzero(alive, axis=0)

        # The length is 0 where a life ends and the episode goes on.
        ends_episode = alive & (columns["terminated"] | columns["truncated"])
        ends_episode &= columns["episode_length"] > 0
        returns: list[float] = []
        lengths: list[int] = []
        of_least = None if least_exploring is None else list[bool]()
        if ends_episode.any():
            returns = columns["episode_return"][ends_episode].tolist()
            lengths = columns["episode_length"][ends_episode].tolist()
            if least_exploring is not None:
                of_least = np.broadcast_to(least_exploring, alive.shape)[ends_episode].tolist()

        recorded = {
            key: (RecordedSum.of(columns, key, alive), RecordedSum.of(columns, key, ends_episode))
            for key in record
        }
        results = {} if OPPONENT not in columns else _results(columns, ends_episode)
        return cls(
            versions=versions.astype(np.int64),
            steps=steps,
            returns=returns,
            lengths=lengths,
            least_exploring=of_least,
            recorded=recorded,
            results=results,
        )


def _results(
    columns: Mapping[str, npt.NDArray[Any]], ends_episode: npt.NDArray[np.bool_]
) -> dict[int, GameCounts]:
    """Returns the games that ended in rows of a batch, by the number of the opponent.

    ``ends_episode`` is bool ``[T, E]``. A row without a draw is in no match game, or is not the
    first of its team.
    """
    rows = ends_episode & (columns[OPPONENT] != NO_DRAW)
    outcomes = columns[OUTCOME][rows]

    # A hostile actor may name another opponent in each row, so each number is counted in one pass.
    numbers, index = np.unique(columns[OPPONENT][rows], return_inverse=True)
    kinds = (outcomes > 0, outcomes == 0, outcomes < 0)
    counts = [np.bincount(index[kind], minlength=len(numbers)).tolist() for kind in kinds]
    return {
        number: GameCounts(wins=wins, draws=draws, losses=losses)
        for number, wins, draws, losses in zip(numbers.tolist(), *counts, strict=True)
    }


def columns(observation_space: Any, action: Column, *recorded: Column) -> tuple[Column, ...]:
    """Returns the columns of a slot.

    Args:
        observation_space: its observations are stored in their own dtype, or as float32 if they are
            of any float type.
        action: the column of the actions.
        recorded: the columns that a policy records beside its actions.
    """
    is_float = np.issubdtype(observation_space.dtype, np.floating)
    dtype = "<f4" if is_float else np.dtype(observation_space.dtype).str

    return (
        Column("obs", dtype, tuple(observation_space.shape), rows="unroll+1"),
        action,
        Column("reward", "<f4"),
        *recorded,
        Column("terminated", "|b1"),
        Column("truncated", "|b1"),
        Column("alive", "|b1"),
        Column("policy_version", "<u4"),
        Column("episode_return", "<f4"),
        Column("episode_length", "<i4"),
        Column("seat", "|u1", rows="slot"),
        Column("policy_id", "<u2", rows="slot"),
    )


def newest_frames(columns: tuple[Column, ...], stack: int) -> tuple[Column, ...]:
    """Returns the columns of a slot that stores only the newest frame of each observation.

    By the further columns ``age`` and ``pad`` a replay finds the older frames, in whichever slots
    they are. Raises UserError where observations are no stacks of ``stack`` frames.
    """
    return (*_with_single_frames(columns, stack), Column("age", "|u1"), Column("pad", "<i2"))


def frames_of_unroll(columns: tuple[Column, ...], stack: int) -> tuple[Column, ...]:
    """Returns the columns of a slot that stores the first stack and then one frame a step.

    Such a slot needs no other: `penstock.algos.ops.frame_stacks` makes stacks of its frames. Raises
    UserError where observations are no stacks of ``stack`` frames.
    """
    frame, *other_columns = _with_single_frames(columns, stack)
    older = replace(frame, name=OLDER, shape=(stack - 1, *frame.shape), rows="slot")
    return (frame, *other_columns, Column(BEGINS, "|u1"), older)


def _with_single_frames(columns: tuple[Column, ...], stack: int) -> tuple[Column, ...]:
    """Returns ``columns`` with one frame instead of a stack in the first, the observations."""
    obs, *other_columns = columns
    if len(obs.shape) < 2 or obs.shape[0] != stack:
        raise UserError(
            f"transport.frame_stack is {stack} and observations have shape {list(obs.shape)}; it "
            "must be the extent of their first axis, or null"
        )
    return (replace(obs, shape=obs.shape[1:]), *other_columns)


def check(columns: dict[str, npt.NDArray[Any]]) -> None:
    """Check the columns of a slot that came over the network.

    Raises:
        ValueError: for values that no sound actor records: numbers that would end the learner, or
            flags that are neither 0 nor 1.
    """
    # Numbers are finite, and returns bounded.
    if bad := find_bad_reward(columns["reward"]):
        raise ValueError(bad)
    for name, array in columns.items():
        if array.dtype.kind != "f" or name == "reward":
            continue
        if np.count_nonzero(np.isfinite(array)) != array.size:
            raise ValueError(f"column {name} holds numbers that are not finite")
    if RETURN in columns and abs(columns[RETURN]).max() > MOST_RETURN:
        raise ValueError(f"a discounted return beyond {MOST_RETURN:g}")

    # Flags are 0 or 1. Their copies lie side by side in memory, and one pass checks all of them.
    flags = {name: columns[name].view(np.uint8).copy() for name in FLAGS}
    if (flags["terminated"] | flags["truncated"] | flags["alive"]).max() > 1:
        name = next(name for name in FLAGS if flags[name].max() > 1)
        raise ValueError(f"column {name} holds bytes other than 0 and 1")

    # The columns of frame stacks, which only some runs have, are in their ranges.
    pad = columns.get("pad")
    if pad is not None and (pad.min() < 0 or pad.max() > 1):
        raise ValueError(f"column pad holds {pad.min()} to {pad.max()}, and it is 0 or 1")
    begins = columns.get(BEGINS)
    if begins is not None and begins.max() > AFTER_ZEROS:
        raise ValueError(f"column {BEGINS} holds {begins.max()}, and is at most {AFTER_ZEROS}")


def check_numbers(obs: npt.NDArray[Any], spaces: Spaces) -> None:
    """Raise ValueError if an observation of several parts contains a number that is not finite, or
    that is none of the choices that it is to name."""
    numbers = [part for part in parts_of(spaces) if part.dtype == "<f4"]
    for part, array in zip(numbers, views(numbers, obs).values(), strict=True):
        if not np.isfinite(array).all():
            raise ValueError("column obs holds numbers that are not finite")
        if part.choices and not ((array >= 0) & (array < part.choices)).all():
            raise ValueError(f"column obs holds choices of {part.name} that there are not")


def check_choices(action: npt.NDArray[Any], counts: tuple[int, ...]) -> None:
    """Raise ValueError for an action that is none of those to choose from.

    Args:
        action: integers ``[T, E, *shape]``.
        counts: number of choices for each entry of an action, in the order of its flat shape.
    """
    if (action.reshape(-1, len(counts)) >= counts).any() or action.min() < 0:
        counts_text = ", ".join(map(str, counts))
        raise ValueError(f"actions from {action.min()} to {action.max()}, there are {counts_text}")


def process(cfg: Rewards, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Clip and scale the rewards of a filled slot, in place; `episode_return` stays raw."""
    adjust_rewards(cfg, columns["reward"])

"""What the slots of all algorithms have in common: columns, their check, rewards for training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.core.specs import Column

MOST_REWARD = 1e6  # of a sound actor


class Rewards(Protocol):
    """The settings of an algorithm that change rewards."""

    @property
    def reward_clip(self) -> float | None: ...
    @property
    def reward_scale(self) -> float: ...


def columns(observation_space: Any, action: Column, *recorded: Column) -> tuple[Column, ...]:
    """A slot with what a policy records beside its actions; observations of any float type are kept
    as float32."""
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
    """The same slot with the newest frame of each observation alone, and what tells the others.

    Raises UserError where observations are no stacks of ``stack`` frames.
    """
    obs, *rest = columns
    if len(obs.shape) < 2 or obs.shape[0] != stack:
        raise UserError(
            f"replay.frame_stack is {stack} and observations have shape {list(obs.shape)}; it must "
            "be the extent of their first axis, or null"
        )
    frame = replace(obs, shape=obs.shape[1:])
    return (frame, *rest, Column("age", "|u1"), Column("pad", "<i2"))


def check(columns: dict[str, npt.NDArray[Any]]) -> None:
    """Raise ValueError for values that no sound actor records: numbers that would end the learner,
    or flags that are neither 0 nor 1."""
    for name, array in columns.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError(f"column {name} holds numbers that are not finite")
    if abs(columns["reward"]).max() > MOST_REWARD:
        raise ValueError(f"a reward beyond {MOST_REWARD:g}")
    for name in ("terminated", "truncated", "alive"):
        if columns[name].view(np.uint8).max() > 1:
            raise ValueError(f"column {name} holds bytes other than 0 and 1")
    pad = columns.get("pad")
    if pad is not None and (pad.min() < 0 or pad.max() > 1):
        raise ValueError(f"column pad holds {pad.min()} to {pad.max()}, and it is 0 or 1")


def check_choices(action: npt.NDArray[Any], actions: int) -> None:
    """Raise ValueError for an action that is none of ``actions``."""
    if action.min() < 0 or action.max() >= actions:
        raise ValueError(f"actions from {action.min()} to {action.max()}, there are {actions}")


def adjust_rewards(cfg: Rewards, reward: npt.NDArray[np.float32]) -> None:
    """Clip and scale raw rewards for training, in place."""
    if cfg.reward_clip is not None:
        np.clip(reward, -cfg.reward_clip, cfg.reward_clip, out=reward)
    if cfg.reward_scale != 1:
        np.multiply(reward, np.float32(cfg.reward_scale), out=reward)

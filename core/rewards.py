"""Rewards as algorithms train on them, and as a core reads them: clipped, then scaled."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Rewards(Protocol):
    """The options of an algorithm that change rewards."""

    @property
    def reward_clip(self) -> float | None: ...
    @property
    def reward_scale(self) -> float: ...


def adjust_rewards(cfg: Rewards, reward: npt.NDArray[np.float32]) -> None:
    """Clip and scale raw rewards for training, in place."""
    if cfg.reward_clip is not None:
        np.clip(reward, -cfg.reward_clip, cfg.reward_clip, out=reward)
    if cfg.reward_scale != 1:
        np.multiply(reward, np.float32(cfg.reward_scale), out=reward)

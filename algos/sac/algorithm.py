"""SAC: a squashed Gaussian actor and twin critics, learnt from replay.

Haarnoja et al. 2018, arXiv 1812.05905: soft actor-critic with a temperature that is tuned towards a
target entropy. Each value of an action is from -1 to 1, as policies choose it.

The learner's half is `penstock.algos.sac.update`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.algos import slots
from penstock.algos.base import ReplayAlgorithm
from penstock.algos.sac.config import SacConfig
from penstock.algos.slots import process
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.core.specs import Column
from penstock.models.acting.gaussian import SquashedGaussianSampler
from penstock.models.fitting import gaussian_shape

if TYPE_CHECKING:
    from penstock.algos.replay_update import ReplayUpdate, UpdateContext

MOST_ACTION = 1 + 1e-6  # largest value in an action, 1 apart from rounding


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """Returns the columns of a slot."""
    return slots.columns(observation_space, Column("action", "<f4", tuple(action_space.shape)))


def check(columns: dict[str, npt.NDArray[Any]], spaces: Spaces) -> None:
    """Raise ValueError for values that no sound actor records."""
    slots.check(columns)
    slots.check_numbers(columns["obs"], spaces)
    largest = np.abs(columns["action"]).max()
    if largest > MOST_ACTION:
        raise ValueError(f"an action of {largest}, which goes from -1 to 1")


def action_sampler(
    config: Config, spaces: Spaces, seed: int, actor: int
) -> SquashedGaussianSampler:
    """Returns the sampler of an actor's actions, numbers between -1 and 1.

    They are drawn by the policy's own deviations, and uniformly until its first update.
    """
    cfg = config.algo
    assert isinstance(cfg, SacConfig), cfg
    bounds = (cfg.log_std_min, cfg.log_std_max)
    rng = np.random.default_rng(seed)
    return SquashedGaussianSampler(spaces.action_space.shape, config.actor_envs, bounds, rng)


def make_update(cfg: SacConfig, ctx: UpdateContext) -> ReplayUpdate:
    """Makes the update on a learner, where torch is imported."""
    from penstock.algos.sac.update import SacUpdate

    return SacUpdate(cfg, ctx)


SAC = ReplayAlgorithm[SacConfig](
    columns=columns,
    check=check,
    process=process,
    network=gaussian_shape,
    action_sampler=action_sampler,
    make_update=make_update,
)

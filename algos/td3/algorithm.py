"""TD3: a deterministic actor with noise that explores, and twin critics.

Fujimoto et al. 2018, arXiv 1802.09477: clipped double Q-learning, delayed updates of the actor, and
targets that are smoothed over similar actions. Each value of an action is from -1 to 1, as policies
choose it.

Slots are those of SAC; the learner's half is `penstock.algos.td3.update`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.algos.base import ReplayAlgorithm
from penstock.algos.sac.algorithm import check, columns
from penstock.algos.slots import process
from penstock.algos.td3.config import Td3Config
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.models.acting.gaussian import NoisySampler
from penstock.models.fitting import numbers_shape

if TYPE_CHECKING:
    from penstock.algos.replay_update import ReplayUpdate, UpdateContext


def action_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> NoisySampler:
    """Returns the sampler of an actor's actions, numbers between -1 and 1.

    They are drawn uniformly until the first update.
    """
    cfg = config.algo
    assert isinstance(cfg, Td3Config), cfg
    rng = np.random.default_rng(seed)
    shape = spaces.action_space.shape
    return NoisySampler(shape, config.actor_envs, cfg.exploration_noise, rng)


def make_update(cfg: Td3Config, ctx: UpdateContext) -> ReplayUpdate:
    """Makes the update on a learner, where torch is imported."""
    from penstock.algos.td3.update import Td3Update

    return Td3Update(cfg, ctx)


TD3 = ReplayAlgorithm[Td3Config](
    columns=columns,
    check=check,
    process=process,
    network=numbers_shape,
    action_sampler=action_sampler,
    make_update=make_update,
)

"""DQN: Q-values learnt from replay; double, duelling, n-step, with initial priorities by the actor.

van Hasselt et al. 2016, arXiv 1509.06461 (double); Wang et al. 2016, arXiv 1511.06581 (duelling);
Horgan et al. 2018, arXiv 1803.00933 (n-step, exploration and priorities of many actors); Dabney et
al. 2017, arXiv 1710.10044 (quantiles); Fortunato et al. 2017, arXiv 1706.10295 (noise); Tavakoli et
al. 2018, arXiv 1711.08946 (several choices).

The learner's half is `penstock.algos.dqn.update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.algos import slots
from penstock.algos.base import ReplayAlgorithm
from penstock.algos.dqn.config import DqnConfig, QLearningConfig
from penstock.algos.epsilon_greedy import epsilon_greedy, ladder_of
from penstock.configs.algorithms import AlgoConfig
from penstock.configs.schedules import LinearSchedule
from penstock.configs.schema import Config
from penstock.core.interfaces import Transitions
from penstock.core.observations import Spaces
from penstock.core.params import Float32
from penstock.core.rewards import adjust_rewards
from penstock.core.specs import Column
from penstock.envs.vector_env import counts_of
from penstock.models.acting.categorical import ExploringSampler
from penstock.models.actions import action_column
from penstock.models.fitting import HeadShape, q_shape

if TYPE_CHECKING:
    from penstock.algos.replay_update import ReplayUpdate, UpdateContext

Flags = npt.NDArray[np.bool_]


def columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """Returns the columns of a slot: `q_columns`, and ``priority``, which `process` writes."""
    return q_columns(observation_space, action_space, Column("priority", "<f4"))


def q_columns(observation_space: Any, action_space: Any, *others: Column) -> tuple[Column, ...]:
    """Returns the columns of a slot whose actions were chosen by Q-values, with ``others``.

    Actors record ``q_taken``, the Q-value of the action, and ``q_max``, the largest one.
    """
    recorded = (Column("q_taken", "<f4"), Column("q_max", "<f4"), *others)
    return slots.columns(observation_space, action_column(action_space), *recorded)


def check(columns: dict[str, npt.NDArray[Any]], spaces: Spaces) -> None:
    """Raise ValueError for values that no sound actor records."""
    slots.check_choices(columns["action"], counts_of(spaces.action_space))
    slots.check(columns)
    slots.check_numbers(columns["obs"], spaces)


def process(cfg: DqnConfig, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Clip and scale the rewards of a filled slot, and write its initial priorities, in place."""
    prioritize(cfg, cfg.n_step, columns)


def prioritize(cfg: AlgoConfig, n_step: int, columns: dict[str, npt.NDArray[Any]]) -> None:
    """Process a slot with these `columns`, in place, where transitions sum up ``n_step`` rewards.

    Rewards are clipped and scaled, and ``priority`` becomes the slot's `initial_priorities`.
    """
    adjust_rewards(cfg, columns["reward"])

    # Priorities depend on the rewards that are trained on.
    columns["priority"][...] = initial_priorities(columns, n_step=n_step, discount=cfg.discount)


def initial_priorities(
    columns: Mapping[str, npt.NDArray[Any]], *, n_step: int, discount: float
) -> Float32:
    """Returns the absolute n-step temporal differences of a slot by the Q-values of its actor.

    The return of a row sums up rewards until its episode ends, and never beyond the slot, whose
    last row stands for its own value, ``q_max``. A truncated episode is bootstrapped from the value
    of its final observation, which is that of the next row.

    Args:
        columns: those of `q_columns`; rewards are those of training.
        n_step: rewards in a return.
        discount: gamma.

    Returns:
        ``[T, E]``. The last row has no difference unless it terminated, and gets the largest of the
        slot. Rows that are not alive get 0.
    """
    terminated = columns["terminated"]
    truncated = columns["truncated"]
    alive = columns["alive"]
    q_max = columns["q_max"]

    # Where a return is cut, the value it is bootstrapped from is added to the reward.
    next_value = np.float32(discount) * q_max[1:]
    reward = columns["reward"].copy()
    reward[:-1] += next_value * (truncated & ~terminated)[:-1]
    reward[-1] = np.where(terminated[-1], reward[-1], q_max[-1])

    # Add up rewards. After round k, a return continues if none of its k + 1 rows was the last.
    continues = ~(terminated | truncated)
    continues[-1] = False
    is_last = ~continues
    returns = reward.copy()
    steps = len(reward)
    for k in range(1, min(n_step, steps)):
        returns[:-k] += np.float32(discount**k) * reward[k:] * continues[:-k]
        continues[:-k] &= ~is_last[k:]

    # Returns that continue after n steps are bootstrapped from the value of the row they reach.
    if n_step < steps:
        bootstrap = np.float32(discount**n_step) * q_max[n_step:]
        returns[:-n_step] += bootstrap * continues[:-n_step]

    differences = np.abs(returns - columns["q_taken"]) * alive
    has_difference = alive.copy()
    has_difference[-1] &= terminated[-1]
    largest = differences[has_difference].max() if has_difference.any() else np.float32(1)
    return np.where(alive & ~has_difference, largest, differences).astype(np.float32)


def network(config: Config, spaces: Spaces) -> HeadShape:
    """Returns the shape of a network with a Q-value for every action of every choice."""
    cfg = config.algo
    assert isinstance(cfg, QLearningConfig), cfg
    return q_shape(
        config,
        spaces,
        duelling=cfg.duelling,
        quantiles=cfg.quantiles,
        noisy=cfg.noisy,
        shows_epsilon=isinstance(cfg.epsilon, LinearSchedule),
    )


def action_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> ExploringSampler:
    """Returns the epsilon-greedy sampler of an actor.

    Each environment of all actors explores at a rate of its own, as in Ape-X. Where that is a
    schedule, weights bring the present rate.
    """
    cfg = config.algo
    assert isinstance(cfg, QLearningConfig), cfg
    return epsilon_greedy(
        config,
        spaces,
        epsilon=cfg.epsilon,
        alpha=cfg.epsilon_alpha,
        seed=seed,
        actor=actor,
    )


def least_exploring(config: Config, actor: int) -> Flags | None:
    """Returns which environments of an actor explore least, bool ``[envs]``.

    None where all explore alike, and where games play, whose seats are not known in advance.
    """
    cfg = config.algo
    assert isinstance(cfg, QLearningConfig), cfg

    ladder = ladder_of(config, epsilon=cfg.epsilon, alpha=cfg.epsilon_alpha, actor=actor)
    if not ladder.base or not ladder.alpha or ladder.total == 1 or config.actors.games:
        return None
    return ladder.explores_least()


def make_update(cfg: DqnConfig, ctx: UpdateContext) -> ReplayUpdate:
    """Makes the update on a learner, where torch is imported."""
    from penstock.algos.dqn.update import DqnUpdate

    return DqnUpdate(cfg, ctx)


DQN = ReplayAlgorithm[DqnConfig](
    columns=columns,
    check=check,
    process=process,
    network=network,
    action_sampler=action_sampler,
    least_exploring=least_exploring,
    make_update=make_update,
    data=lambda cfg: Transitions(cfg.n_step),
)

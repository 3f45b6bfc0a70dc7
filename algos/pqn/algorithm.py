"""PQN: parallelised Q-learning (Gallici et al. 2024, arXiv 2407.04811, algorithm 1).

Q-values learn the lambda-returns of fresh unrolls, each batch several times in minibatches, as PPO
does. There is no replay, and the targets are of the network itself: layer normalisation and many
environments keep that stable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.algos.base import WHOLE, AddOthers, UnrollAlgorithm
from penstock.algos.dqn.algorithm import check, q_columns
from penstock.algos.epsilon_greedy import epsilon_greedy
from penstock.algos.pqn.config import PqnConfig
from penstock.algos.slots import process
from penstock.configs.schedules import LinearSchedule, constant
from penstock.configs.schema import Config
from penstock.core.observations import Spaces
from penstock.models.acting.categorical import ExploringSampler
from penstock.models.fitting import HeadShape, q_shape
from penstock.models.layout import EPSILON_RATE

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.models.torch_heads import HeadNet

STATISTICS = ("q_loss", "td_error", "q_mean", "q_target_mean", "q_lag")


def network(config: Config, spaces: Spaces) -> HeadShape:
    """Returns the shape of a network with a Q-value for every action of every choice."""
    cfg = config.algo
    assert isinstance(cfg, PqnConfig), cfg
    return q_shape(config, spaces, shows_epsilon=isinstance(cfg.epsilon, LinearSchedule))


def action_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> ExploringSampler:
    """Returns the epsilon-greedy sampler of an actor, whose environments all explore alike."""
    cfg = config.algo
    assert isinstance(cfg, PqnConfig), cfg
    return epsilon_greedy(config, spaces, epsilon=cfg.epsilon, alpha=0.0, seed=seed, actor=actor)


def prepare(
    net: HeadNet,
    batch: Mapping[str, Tensor],
    cfg: PqnConfig,
    parts: Sequence[slice],
    add_others: AddOthers | None = None,
) -> dict[str, Tensor]:
    """Returns the targets of a batch's Q-values, by the network before its first update.

    They are the lambda-returns of max Q; no trace is cut where a random action was taken. The rate
    of exploration that the next weights bring is set too. The arguments are those of
    `UnrollAlgorithm`.

    Returns:
        Float32 ``[T, E]``: ``target``, and ``q_lag``, how far the value of each action is from that
        by the weights which chose it.
    """
    import torch

    from penstock.algos.dqn.losses import action_values, best_actions, over_choices
    from penstock.algos.ops.gae import lambda_returns
    from penstock.algos.unrolled import unrolled_q

    if net.head_shape.shows_epsilon:
        net.get_buffer(EPSILON_RATE).fill_(constant(cfg.epsilon))

    rows = len(batch["obs"])
    branches = net.head_shape.branches
    with torch.no_grad():
        # The values of the best and of the taken actions. Parts are joined along the environments.
        best_parts = []
        taken_parts = []
        for envs in parts:
            q, mask = unrolled_q(net, batch, envs)
            best = action_values(q, best_actions(q, mask, branches), branches)
            best_parts.append(over_choices(best).view(rows, -1))

            action = choices(batch, envs)
            taken = action_values(q[: len(action)], action, branches)
            taken_parts.append(over_choices(taken).view(rows - 1, -1))
        best_q = torch.cat(best_parts, 1)
        lag = (torch.cat(taken_parts, 1) - batch["q_taken"]).abs()
        target = lambda_returns(best_q, batch, discount=cfg.discount, gae_lambda=cfg.q_lambda)
    return {"target": target, "q_lag": lag}


def loss(
    net: HeadNet,
    batch: Mapping[str, Tensor],
    cfg: PqnConfig,
    envs: slice | Tensor = WHOLE,
    add_others: AddOthers | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and `STATISTICS` of some environments of a batch: `UnrollAlgorithm.loss`.

    The loss is half the squared error of the Q-value of each action that was taken.
    """
    import torch

    from penstock.algos.dqn.losses import action_values, over_choices
    from penstock.algos.unrolled import unrolled_q

    action = choices(batch, envs)
    target = batch["target"][:, envs].flatten()
    mask = batch["alive"][:, envs].flatten().to(target.dtype)

    q, _ = unrolled_q(net, batch, envs)
    values = action_values(q[: len(action)], action, net.head_shape.branches)
    differences = target[:, None] - values
    total = 0.5 * over_choices(differences.square()).dot(mask)

    with torch.no_grad():
        errors = over_choices(differences.abs())
        lag = batch["q_lag"][:, envs].flatten()
        of_rows = torch.stack((errors, over_choices(values), target, lag))
        sums = torch.cat((total[None], of_rows.mv(mask)))
    return total, sums


def choices(batch: Mapping[str, Tensor], envs: slice | Tensor) -> Tensor:
    """Returns the actions of some environments of a batch, int64 ``[T * E, choices]``."""
    action = batch["action"][:, envs].flatten(0, 1)
    return action.long().view(len(action), -1)


PQN = UnrollAlgorithm[PqnConfig](
    statistics=STATISTICS,
    columns=q_columns,
    check=check,
    process=process,
    loss=loss,
    network=network,
    action_sampler=action_sampler,
    prepare=prepare,
)

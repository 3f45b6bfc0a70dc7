"""PQN: parallelised Q-learning (Gallici et al. 2024, arXiv 2407.04811, algorithm 1).

Q-values learn the lambda-returns of fresh unrolls, each batch several times in minibatches, as PPO
does. There is no replay, and the targets are of the network itself: layer normalisation and many
environments keep that stable.

`columns` are what the actor records. `prepare` comes before the epochs of a batch, and `loss` is
what the learner minimises. Only these two import torch, and only when they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.algos.base import UnrollAlgorithm
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

    AddOthers = Callable[[Tensor], None]

STATISTICS = ("q_loss", "td_error", "q_mean", "q_target_mean", "q_lag")
WHOLE = slice(None)


def network(config: Config, spaces: Spaces) -> HeadShape:
    """Returns the shape of a network with a Q-value for every action of every choice."""
    shows_epsilon = isinstance(pqn_options(config).epsilon, LinearSchedule)
    return q_shape(config, spaces, shows_epsilon=shows_epsilon)


def action_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> ExploringSampler:
    """Returns the epsilon-greedy sampler of an actor, whose environments all explore alike."""
    epsilon = pqn_options(config).epsilon
    return epsilon_greedy(config, spaces, epsilon=epsilon, alpha=0.0, seed=seed, actor=actor)


def pqn_options(config: Config) -> PqnConfig:
    """Returns the section `algo` of a run of PQN."""
    assert isinstance(config.algo, PqnConfig), config.algo
    return config.algo


def prepare(
    net: HeadNet,
    batch: Mapping[str, Tensor],
    cfg: PqnConfig,
    parts: Sequence[slice],
    add_others: AddOthers | None = None,
) -> dict[str, Tensor]:
    """Returns the targets of a batch's Q-values, by the network before its first update.

    The target is the lambda-return ``G[t] = r[t] + discount * ((1 - lambda) * max Q[t+1] + lambda *
    G[t+1])`` within an episode; no trace is cut where a random action was taken. ``G[t+1]`` is
    ``max Q[t+1]`` after the last row and where the episode was truncated, and 0 where it
    terminated. The rate of exploration that the next weights bring is set too.

    Args:
        net: the network.
        batch: `columns` as tensors ``[T, E, ...]``; observations are ``[T + 1, E, ...]``.
        cfg: the options.
        parts: the environments, divided into as many as are to be computed at once.
        add_others: not used, as nothing depends on the other learners.

    Returns:
        Float32 ``[T, E]``: ``target``, and ``q_lag``, how far the value of each action is from that
        by the weights which chose it.
    """
    import torch

    from penstock.algos.dqn.losses import action_values, over_choices
    from penstock.algos.ops.gae import gae
    from penstock.models.torch_heads import of_allowed

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
            best = [
                part.amax(1) for part in of_allowed(q, mask, branches=branches).split(branches, 1)
            ]
            best_parts.append(torch.stack(best, 1).mean(1).view(rows, -1))

            action = choices(batch, envs)
            taken = over_choices(action_values(q[: len(action)], action, branches))
            taken_parts.append(taken.view(rows - 1, -1))
        best_q = torch.cat(best_parts, 1)
        lag = (torch.cat(taken_parts, 1) - batch["q_taken"]).abs()

        # A lambda-return is the generalised advantage over max Q, plus max Q.
        advantage = gae(
            values=best_q,
            rewards=batch["reward"],
            terminated=batch["terminated"],
            truncated=batch["truncated"],
            alive=batch["alive"],
            discount=cfg.discount,
            gae_lambda=cfg.q_lambda,
        )
    return {"target": advantage + best_q[:-1], "q_lag": lag}


def loss(
    net: HeadNet,
    batch: Mapping[str, Tensor],
    cfg: PqnConfig,
    envs: slice | Tensor = WHOLE,
    add_others: AddOthers | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the loss and `STATISTICS` of some environments of a batch, summed over alive rows.

    The loss is half the squared error of the Q-value of each action that was taken.

    Args:
        net: the network that is trained.
        batch: `columns` as tensors ``[T, E, ...]``, observations ``[T + 1, E, ...]``, and what
            `prepare` made of them.
        cfg: the options.
        envs: which environments.
        add_others: not used, as nothing depends on the other learners.

    Returns:
        The loss ``[]``, and float32 ``[len(STATISTICS)]`` without a gradient.
    """
    import torch

    from penstock.algos.dqn.losses import action_values, over_choices

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


def unrolled_q(
    net: HeadNet, batch: Mapping[str, Tensor], envs: slice | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns the Q-values ``[B, outputs]`` and the action mask of some environments of a batch.

    Rows are time-major, B = (T + 1) * E; the mask is None where all actions are allowed.
    """
    from penstock.algos.ops.frame_stacks import observations
    from penstock.algos.unrolled import memory_of

    obs = observations(batch, envs)
    if not net.state_size:
        return net(obs), net.mask(obs)
    q, _ = net.unroll(obs, *memory_of(net, batch, envs))
    return q, net.mask(obs)


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

"""Applies an actor-critic to the unrolls of a batch, with memory and action masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.algos.core_inputs import REWARD, unrolled_inputs
from penstock.algos.ops.frame_stacks import observations
from penstock.models.torch_heads import ActorCritic


class Unrolled(NamedTuple):
    """Outputs of an actor-critic for all ``T + 1`` rows of ``E`` environments.

    The rows are time-major: row t of environment e is at ``t * E + e`` of B = (T + 1) * E.
    """

    outputs: Tensor
    """Float32 ``[B, outputs]``, contiguous along B."""
    values: Tensor
    """Float32 ``[B]``."""
    mask: Tensor | None
    """Action mask ``[B, outputs]``, not 0 where a choice is allowed; None where all are."""


def unrolled(net: ActorCritic, batch: Mapping[str, Tensor], envs: slice | Tensor) -> Unrolled:
    """Apply an actor-critic to some environments of a batch of unrolls.

    A network with memory goes through the rows in their order. It starts from the state that the
    actor had before the first row, and forgets it where an episode begins: at the row after one
    that was not alive. It also reads the last action and reward, if it is to. Stacks
    of frames that were written once are made here.

    Args:
        net: the network.
        batch: columns by name, ``[T, E, ...]`` or, for observations, ``[T + 1, E, ...]``.
        envs: which environments of the batch, by slice or by index.
    """
    obs = observations(batch, envs)
    if not net.state_size:
        outputs, values = net(obs)
        return Unrolled(outputs, values, net.mask(obs))

    begins_episode = episode_begins(batch, envs)
    state = batch["core_state"][envs]
    inputs = None
    if net.core_inputs is not None:
        rewards = batch[REWARD] if REWARD in batch else batch["reward"]
        inputs = unrolled_inputs(
            net.core_inputs,
            state,
            actions=batch["action"][:, envs],
            rewards=rewards[:, envs],
            first=begins_episode,
        )
    outputs, values = net(obs, state, begins_episode, inputs)
    return Unrolled(outputs, values, net.mask(obs))


def episode_begins(batch: Mapping[str, Tensor], envs: slice | Tensor) -> Tensor:
    """Returns before which rows of some environments an episode begins, bool ``[T + 1, E]``.

    It begins at the row after one that was not alive.
    """
    alive = batch["alive"][:, envs]
    begins = torch.zeros(len(alive) + 1, alive.shape[1], dtype=torch.bool, device=alive.device)
    torch.logical_not(alive, out=begins[1:])
    return begins

"""Applies a network to the unrolls of a batch, with memory and action masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.algos.core_inputs import REWARD, unrolled_inputs
from penstock.algos.ops.frame_stacks import observations
from penstock.models.actions import ActionSpec
from penstock.models.distributions import Distribution, distribution
from penstock.models.torch_heads import ActorCritic, HeadNet


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

    def policy(self, actions: ActionSpec, steps: int) -> Distribution:
        """Returns the policy in the first ``steps`` rows."""
        mask = None if self.mask is None else self.mask[:steps]
        return distribution(actions, self.outputs[:steps], mask)


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
    memory = memory_of(net, batch, envs) if net.state_size else ()
    outputs, values = net(obs, *memory)
    return Unrolled(outputs, values, net.mask(obs))


def unrolled_q(
    net: HeadNet, batch: Mapping[str, Tensor], envs: slice | Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns Q-values ``[B, outputs]``, in rows as those of `Unrolled`, and the action mask.

    The arguments are those of `unrolled`.
    """
    obs = observations(batch, envs)
    if not net.state_size:
        return net(obs), net.mask(obs)
    q, _ = net.unroll(obs, *memory_of(net, batch, envs))
    return q, net.mask(obs)


class UnrolledMemory(NamedTuple):
    """What a network with memory needs besides the observations of ``T + 1`` rows."""

    state: Tensor
    """Before the first row, float32 ``[E, state_size]``."""
    first: Tensor
    """The rows with which an episode begins, bool ``[T + 1, E]``."""
    inputs: Tensor | None
    """What the core reads besides the features, float32 ``[T + 1, E, width]``."""


def memory_of(
    net: ActorCritic | HeadNet,
    batch: Mapping[str, Tensor],
    envs: slice | Tensor,
    state: Tensor | None = None,
) -> UnrolledMemory:
    """Returns what a network with memory needs of some environments of a batch of unrolls.

    The arguments are those of `unrolled`, and the ``state`` of these environments before the first
    row, ``[E, state_size]``; by default the actor's.
    """
    alive = batch["alive"][:, envs]
    first = torch.zeros(len(alive) + 1, alive.shape[1], dtype=torch.bool, device=alive.device)
    torch.logical_not(alive, out=first[1:])

    if state is None:
        state = batch["core_state"][envs]
    inputs = None
    if net.core_inputs is not None:
        rewards = batch[REWARD] if REWARD in batch else batch["reward"]
        inputs = unrolled_inputs(
            net.core_inputs,
            state,
            actions=batch["action"][:, envs],
            rewards=rewards[:, envs],
            first=first,
        )
    return UnrolledMemory(state, first, inputs)

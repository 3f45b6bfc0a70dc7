"""What a core reads besides the features, for the rows of a batch.

It is what actors write into the tail of the recurrent state (`penstock.models.core_inputs`),
computed of the actions and rewards that were recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from penstock.models.actions import Choices, Numbers
from penstock.models.core_inputs import CoreInputs

REWARD = "input_reward"
"""The column of rewards that are clipped and scaled, where those that are trained on are also
normalised."""


def unrolled_inputs(
    core_inputs: CoreInputs, state: Tensor, actions: Tensor, rewards: Tensor, first: Tensor
) -> Tensor:
    """Returns the inputs of the core in T rows of E environments, float32 ``[T, E, width]``.

    Row t reads action and reward of row t - 1; row 0 reads the end of the state.

    Args:
        core_inputs: those of the network.
        state: float32 ``[E, state_size]``, before row 0.
        actions: as they are recorded, ``[T - 1 or more, E, *shape]``.
        rewards: clipped and scaled, but not normalised, float32 ``[T - 1 or more, E]``.
        first: bool ``[T, E]``, the rows with which an episode begins. Their inputs are 0.
    """
    steps = len(first) - 1
    columns = []
    if core_inputs.actions is not None:
        # Numbers are recorded before they are squashed.
        spec = core_inputs.actions
        is_squashed = isinstance(spec, Numbers) and spec.squashed
        played = actions[:steps].tanh() if is_squashed else actions[:steps]
        columns.append(encoded_actions(core_inputs, played))
    if core_inputs.reads_reward:
        columns.append(rewards[:steps, :, None])

    tail = state[:, -core_inputs.width :]
    inputs = torch.cat((tail[None], torch.cat(columns, 2)))
    return inputs.masked_fill(first[..., None], 0.0)


def encoded_actions(core_inputs: CoreInputs, actions: Tensor) -> Tensor:
    """Returns a policy's actions ``[..., *shape]`` as a core reads them, ``[..., width]``."""
    spec = core_inputs.actions
    assert spec is not None
    flat = actions.flatten(-len(spec.shape)) if spec.shape else actions[..., None]
    if not isinstance(spec, Choices):
        return flat.clamp(-1, 1)
    choices = flat.long().unbind(-1)
    hot = [one_hot(choice, n) for choice, n in zip(choices, spec.counts, strict=True)]
    return torch.cat(hot, -1).float()

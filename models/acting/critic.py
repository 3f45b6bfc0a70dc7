"""The value that an actor-critic gives a state, for displays. Actors do not compute it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.params import Float32
from penstock.models.acting.categorical import Explanation
from penstock.models.acting.numpy_mlp import NumpyMlp
from penstock.models.fitting import AnyShape
from penstock.models.general import ActorCriticHeads, GeneralShape
from penstock.models.layout import CnnShape, MlpShape


class Critic(Protocol):
    """Values states by a network's own value head."""

    def __call__(self, obs: npt.NDArray[Any], state: Float32) -> Float32:
        """Returns the discounted return that is expected from observations ``[envs, *shape]`` on.

        It is float32 ``[envs]``, in the units that the network is trained with.

        ``state`` float32 ``[envs, size]`` is the policy's recurrent state before the observation.
        """


def make_critic(shape: AnyShape, weights: Float32) -> Critic | None:
    """Returns the value head of a network, None if it has none.

    ``weights`` is the network's flat vector. torch is imported only if it is needed.
    """
    if isinstance(shape, MlpShape):
        return _mlp_critic(shape, weights)
    if isinstance(shape, CnnShape):
        return _torch_critic(shape, weights)
    if isinstance(shape, GeneralShape) and isinstance(shape.heads, ActorCriticHeads):
        return _torch_critic(shape, weights)
    return None


def state_values(
    critic: Critic | None, explanation: Explanation, obs: npt.NDArray[Any], state: Float32
) -> Float32 | None:
    """Returns the values of states that actions were decided in, float32 ``[envs]``.

    They are the ``critic``'s, whose arguments the last two are, or those of the best actions. They
    are None if the network estimates neither.
    """
    if critic is not None:
        return critic(obs, state)
    if explanation.q_max is not None or explanation.q is None:
        return explanation.q_max
    # A user's sampler need not tell the highest value.
    highest: Float32 = explanation.q.max(axis=1)
    return highest


def _mlp_critic(shape: MlpShape, weights: Float32) -> Critic:
    """Returns a critic that computes the value's tower in numpy, with a copy of ``weights``."""
    weights = weights.copy()

    def values(obs: npt.NDArray[Any], state: Float32) -> Float32:
        """Returns the values of the observations, as `Critic` says."""
        values_of_rows = np.empty(len(obs), np.float32)
        tower = NumpyMlp(shape, values_of_rows[None])
        tower.load(weights, of_value=True)
        tower.forward(obs)
        return values_of_rows

    return values


def _torch_critic(shape: CnnShape | GeneralShape[ActorCriticHeads], weights: Float32) -> Critic:
    """Returns a critic that computes the whole network in torch, with a copy of ``weights``."""
    import torch

    from penstock.models.torch_nets import filled_net

    net = filled_net(shape, weights)

    def values(obs: npt.NDArray[Any], state: Float32) -> Float32:
        """Returns the values of the observations, as `Critic` says."""
        rows = torch.from_numpy(obs.copy())
        recurrent_state = torch.from_numpy(state.copy()) if state.size else None
        if recurrent_state is not None:
            # A recurrent network takes unrolls: the observations are one of a single step.
            rows = rows[None]
        with torch.inference_mode():
            state_values = net(rows, recurrent_state)[1]
        return np.asarray(state_values.reshape(-1).numpy(), np.float32)

    return values

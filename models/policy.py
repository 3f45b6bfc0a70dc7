"""Choosing what computes an actor's policy: numpy for an MLP, torch for the rest."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.configs.schema import ActorsConfig, ModelConfig
from penstock.models.layout import CnnShape, MlpShape, NetShape, Spaces, net_shape
from penstock.models.precision import cpu_gains_by_bf16


class Policy(Protocol):
    """Decides for ``envs`` environments at once; what it returns is reused by the next call.

    Log-probabilities belong to the weights and the precision that chose the action.
    """

    def load(self, flat: npt.NDArray[np.float32]) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``; needed before all else."""

    def act(self, obs: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Sampled actions and their log-probabilities, both ``[envs]``."""

    def greedy(self, obs: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """The likeliest actions ``[envs]``."""

    def logits(self, obs: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        """Logits ``[envs, actions]``."""

    def state_dict(self) -> dict[str, Any]:
        """State of the random generator, JSON-ready."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_policy(model: ModelConfig, actors: ActorsConfig, spaces: Spaces, seed: int) -> Policy:
    """The policy of an actor over ``actors.envs`` environments; imports torch only if needed."""
    shape = net_shape(model, spaces.observation_space, spaces.action_space)
    precision = _precision(actors, shape)
    if actors.inference != "torch" and precision == "fp32" and isinstance(shape, MlpShape):
        from penstock.models.numpy_mlp import NumpyMlp

        return NumpyMlp(shape, actors.envs, seed)
    if actors.inference == "numpy":
        raise UserError(
            "actors.inference numpy computes only an mlp in fp32, and this game's network is "
            f"{'an mlp' if isinstance(shape, MlpShape) else 'a nature_cnn'} in {precision}; "
            "set actors.inference=auto"
        )
    import torch

    from penstock.models.torch_policy import TorchPolicy
    from penstock.models.torch_setup import set_up_torch

    set_up_torch(actors.threads)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return TorchPolicy(shape, actors.envs, seed, dtype)


def _precision(actors: ActorsConfig, shape: NetShape) -> str:
    if actors.precision != "auto":
        return actors.precision
    return "bf16" if isinstance(shape, CnnShape) and cpu_gains_by_bf16() else "fp32"

"""An actor's policy: a network that computes outputs, and a decider that makes actions of them.

The network is computed in numpy for an MLP, in torch for the rest. How it is decided is the
algorithm's: drawn from logits, epsilon-greedy by Q-values, a squashed Gaussian.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.configs.algorithms import DqnConfig, ImpalaConfig, SacConfig
from penstock.configs.errors import UserError
from penstock.configs.schema import ActorsConfig, Config
from penstock.core.params import Float32
from penstock.models.fitting import Spaces, net_shape
from penstock.models.layout import CnnShape, DenseShape, MlpShape, NetShape, QCnnShape
from penstock.models.precision import cpu_gains_by_bf16
from penstock.models.sampling import Categorical, Decider, EpsilonGreedy, SquashedGaussian, ladder


class Network(Protocol):
    """Fills the outputs of a decider."""

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``."""

    def forward(self, obs: npt.NDArray[Any]) -> None:
        """Compute the outputs of observations ``[envs, *shape]``."""


class Policy:
    """Decides for ``envs`` environments at once; what it returns is reused by the next call.

    What is recorded belongs to the weights and the precision that chose the action.
    """

    def __init__(self, network: Network, decider: Decider) -> None:
        self.network = network
        self.decider = decider

    @property
    def recorded(self) -> Mapping[str, npt.NDArray[Any]]:
        """What the last `act` knows beside its actions, by the column that it belongs to, each
        ``[envs]``. The same arrays every time."""
        return self.decider.recorded

    def load(self, flat: Float32) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``; needed before all else."""
        self.network.load(flat)

    def act(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Actions as in training: int32 ``[envs]``, or float32 ``[envs, *shape]`` for a Box."""
        self.network.forward(obs)
        return self.decider.sample()

    def greedy(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The best actions that it knows, as those of `act`."""
        self.network.forward(obs)
        return self.decider.greedy()

    def outputs(self, obs: npt.NDArray[Any]) -> Float32:
        """What the network says, float32 ``[envs, outputs]``."""
        self.network.forward(obs)
        return self.decider.outputs.T

    def state_dict(self) -> dict[str, Any]:
        """State of the random generator, JSON-ready."""
        return self.decider.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decider.load_state_dict(state)


def make_policy(config: Config, game: Spaces, seed: int, actor: int = 0) -> Policy:
    """The policy of actor number ``actor`` over ``actors.envs`` environments.

    Imports torch only if needed.
    """
    shape = net_shape(config, game)
    decider = make_decider(config, game, seed, actor)
    return Policy(_make_network(config.actors, shape, decider.outputs), decider)


def make_decider(config: Config, game: Spaces, seed: int, actor: int) -> Decider:
    """How the algorithm makes actions of a network's outputs."""
    envs, rng = config.actors.envs, np.random.default_rng(seed)
    match config.algo:
        case ImpalaConfig():
            return Categorical(int(game.action_space.n), envs, rng)
        case DqnConfig(epsilon=base, epsilon_alpha=alpha):
            total = config.actors.count * envs
            epsilon = ladder(base, alpha, actor * envs, envs, total)
            return EpsilonGreedy(int(game.action_space.n), epsilon, rng)
        case SacConfig(log_std_min=low, log_std_max=high):
            return SquashedGaussian(game.action_space.shape, envs, (low, high), rng)


def _make_network(actors: ActorsConfig, shape: NetShape, outputs: Float32) -> Network:
    precision = _precision(actors, shape)
    is_numpy = actors.inference != "torch" and precision == "fp32"
    if is_numpy and isinstance(shape, MlpShape | DenseShape):
        from penstock.models.numpy_mlp import NumpyMlp

        return NumpyMlp(shape, outputs)
    if actors.inference == "numpy":
        raise UserError(
            "actors.inference numpy computes only an mlp in fp32, and this game's network is "
            f"{'a nature_cnn' if isinstance(shape, CnnShape | QCnnShape) else 'an mlp'} in "
            f"{precision}; set actors.inference=auto"
        )
    import torch

    from penstock.models.torch_policy import TorchNetwork
    from penstock.models.torch_setup import set_up_torch

    set_up_torch(actors.threads)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return TorchNetwork(shape, outputs, dtype)


def _precision(actors: ActorsConfig, shape: NetShape) -> str:
    if actors.precision != "auto":
        return actors.precision
    return "bf16" if isinstance(shape, CnnShape | QCnnShape) and cpu_gains_by_bf16() else "fp32"

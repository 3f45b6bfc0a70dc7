"""An actor's policy: a network that computes outputs, and a decider that makes actions of them.

The network is computed in numpy for an MLP, in torch for the rest. The algorithm chooses the
decider: actions are drawn from logits, epsilon-greedy by Q-values, or of a squashed Gaussian.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.configs.sections import ActorsConfig
from penstock.core.observations import ObservationPart, Spaces, views
from penstock.core.params import Float32
from penstock.models.acting.acting_network import ActingNetwork
from penstock.models.acting.categorical import ActionSampler, Explanation
from penstock.models.acting.exploration import ExploringWeights, exploring_weights
from penstock.models.compute_form import in_memory_format
from penstock.models.core_inputs import CoreInputs
from penstock.models.fitting import AnyShape, mask_of
from penstock.models.general import ActorCriticHeads, GeneralShape, PlainMlp, plain_mlp
from penstock.models.layout import DenseShape, MlpShape


class Policy:
    """Decides for ``envs`` environments at once. The arrays that it returns are written anew by the
    next call.

    What is recorded belongs to the weights and the precision that chose the action. A policy with
    memory takes an environment's observations in their order, each once.
    """

    state: Float32
    """What it remembers of each environment, float32 ``[envs, size]``; size 0 without memory. May
    be written to."""

    def __init__(
        self,
        network: ActingNetwork,
        decider: ActionSampler,
        state: Float32 | None = None,
        mask: ObservationPart | None = None,
        core_inputs: CoreInputs | None = None,
        weights: ExploringWeights | None = None,
    ) -> None:
        """Create a policy from a ``network`` that writes the outputs of the ``decider``.

        Args:
            network: fills `decider.outputs`.
            decider: makes actions of them.
            state: the recurrent state of the network, float32 ``[envs, size]``; None without one.
            mask: the action mask among the parts of an observation; None without one.
            core_inputs: what of the last action and reward the state has; None for nothing.
            weights: those that make the policy explore; None if they do not.
        """
        self.network = network
        self.decider = decider
        envs = decider.outputs.shape[1]
        self.state = np.zeros((envs, 0), np.float32) if state is None else state
        self._mask = mask
        self._core_inputs = core_inputs
        self._weights = weights

    def reset(self, first: npt.NDArray[np.bool_]) -> None:
        """Set `state` to 0 in the environments, bool ``[envs]``, where an episode begins."""
        self.state[first] = 0

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        """Take what the last actions were paid, raw ``[envs]``, before the next ones."""
        if self._core_inputs is not None:
            self._core_inputs.put_rewards(self.state, rewards)

    @property
    def recorded(self) -> Mapping[str, npt.NDArray[Any]]:
        """What the learner needs to know of the last actions of `act`, by the name of its column.

        The arrays, ``[envs, ...]``, are the same every time.
        """
        return self.decider.recorded

    def load(self, flat: Float32, *, untrained: bool = False, number: int = 0) -> None:
        """Copy parameters from the flat vector, float32 ``[size]``. Call it before all else.

        Args:
            flat: the parameters.
            untrained: whether they are those before the network's first update, for which some
                algorithms act at random.
            number: of these weights, on which the noise of noisy layers depends.
        """
        epsilon = None
        if self._weights is None:
            self.network.load(flat)
        else:
            epsilon = self._weights.take(self.network, flat, number)

        self.decider.on_new_weights(untrained=untrained)
        if epsilon is not None:
            self.decider.on_new_epsilon(epsilon)

    def act(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns actions as in training: int32 ``[envs]``; of a Box float32 ``[envs, *shape]``."""
        self._forward(obs, explores=True)
        return self._taken(self.decider.sample())

    def play(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the actions that `act` would return, for rows of which nothing is recorded."""
        self._forward(obs, explores=True)
        return self._taken(self.decider.draw())

    def greedy(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the best actions by the network, with the shape of those of `act`."""
        self._forward(obs)
        return self._taken(self.decider.greedy())

    def explain(self, obs: npt.NDArray[Any], *, sample: bool) -> Explanation:
        """Returns the actions of `act`, or of `greedy`, and what they were decided by."""
        self._forward(obs, explores=sample)
        explanation = self.decider.explain(sample=sample)
        self._taken(explanation.actions)
        return explanation

    def outputs(self, obs: npt.NDArray[Any]) -> Float32:
        """Returns what actions are decided by, float32 ``[envs, outputs]``.

        It advances the recurrent state as `act` does, but for the last action.
        """
        self._forward(obs)
        return self.decider.outputs.T

    def _taken(self, actions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns ``actions``, after they were written into the state if the network reads them."""
        if self._core_inputs is not None:
            self._core_inputs.put_actions(self.state, actions)
        return actions

    def _forward(self, obs: npt.NDArray[Any], *, explores: bool = False) -> None:
        """Compute the decider's outputs, and forbid the actions that ``obs`` masks.

        ``explores``: whether noisy layers have noise.
        """
        if self._weights is not None:
            self._weights.prepare(self.network, explores=explores)
        self.network.forward(obs)
        if self._mask is not None:
            (mask,) = views((self._mask,), obs).values()
            self.decider.forbid(mask.T == 0)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the random generators, JSON-ready."""
        noise = {} if self._weights is None else self._weights.state_dict()
        return self.decider.state_dict() | noise

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._weights is not None:
            state = self._weights.load_state_dict(state)
        self.decider.load_state_dict(state)


def make_policy(
    config: Config, spaces: Spaces, shape: AnyShape, sampler: ActionSampler, *, seed: int
) -> Policy:
    """Returns a policy of a network ``shape`` over ``actors.envs`` environments.

    ``sampler`` decides by the network's outputs, and ``seed`` is that of the noise of its layers.
    torch is imported only if it is needed.
    """
    state = np.zeros((config.actor_envs, state_size_of(shape)), np.float32)
    network = make_network(config.actors, shape, sampler.outputs, state)
    return Policy(
        network,
        sampler,
        state=state,
        mask=mask_of(spaces),
        core_inputs=core_inputs_of(shape),
        weights=exploring_weights(shape, seed),
    )


def make_network(
    actors: ActorsConfig, shape: AnyShape, outputs: Float32, state: Float32
) -> ActingNetwork:
    """Returns the network that `actors` ask for: in numpy if it can be, else in torch.

    It writes ``outputs``, and the recurrent ``state`` if it has one. Raises UserError if numpy is
    asked for and cannot compute it.
    """
    precision = "fp32" if actors.precision == "auto" else actors.precision
    shape = in_memory_format(shape, actors.memory_format)
    mlp = plain_mlp(shape) if isinstance(shape, GeneralShape) else shape
    allows_numpy = actors.inference != "torch" and precision == "fp32"
    if allows_numpy and isinstance(mlp, MlpShape | DenseShape | PlainMlp):
        from penstock.models.acting.numpy_mlp import NumpyMlp

        return NumpyMlp(mlp, outputs)
    if actors.inference == "numpy":
        raise UserError(
            "actors.inference numpy computes only an mlp over one array, with or without an action "
            "mask, in fp32, without core and with a critic of its own, and this game's network is "
            f"{_described(shape)} in {precision}; set actors.inference=auto"
        )

    import torch

    from penstock.models.acting.torch_network import GeneralNetwork, TorchNetwork
    from penstock.models.torch_setup import set_up_torch

    set_up_torch(actors.threads)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if isinstance(shape, GeneralShape):
        return GeneralNetwork(shape, outputs, state, dtype)
    return TorchNetwork(shape, outputs, dtype)


def state_size_of(shape: AnyShape) -> int:
    """Returns how many float32 values a network remembers of one environment; 0 without memory."""
    return shape.state_size if isinstance(shape, GeneralShape) else 0


def core_inputs_of(shape: AnyShape) -> CoreInputs | None:
    """Returns what of the last action and reward a network reads; None for nothing."""
    return shape.core_inputs if isinstance(shape, GeneralShape) else None


def _described(shape: AnyShape) -> str:
    """Returns a noun phrase for the network, such as "an mlp over 2 arrays"."""
    if not isinstance(shape, GeneralShape):
        return "a nature_cnn" if shape.convolutional else "an mlp"
    if shape.model.entry is not None:
        return f"model.entry {shape.model.entry}"

    if shape.has_large_images:
        name = "an impala_cnn" if shape.model.kind == "impala_cnn" else "a nature_cnn"
    elif shape.has_small_images:
        name = "a small_cnn"
    else:
        name = "an mlp"
    core = f" with core {shape.model.core}" if shape.state_size else ""
    if not isinstance(shape.heads, ActorCriticHeads):
        return f"{name}{core} over {len(shape.inputs)} arrays"

    critic = "a separate" if shape.is_separate else "a shared"
    return f"{name}{core} and {critic} critic over {len(shape.inputs)} arrays"

"""The network family in torch: several arrays, memory, custom networks, any heads.

    observation -> arrays by name -> body -> core -> policy head, or the one head
                                     (body -> core where the critic is separate) -> value head

A core may also read the last action and the last reward (`penstock.models.core_inputs`).

A body is an `Encoder`, or a custom network that returns features. A custom network that returns
outputs and values itself, for an actor-critic, has neither core nor heads after it.
`GeneralCritics` value the actions of a policy, for SAC.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from penstock.core.params import ParamLayout
from penstock.models.general import (
    ActorCriticHeads,
    GeneralShape,
    Input,
    is_small,
)
from penstock.models.layout import SingleHead
from penstock.models.normalizer import FrameNormalizer, Normalizer
from penstock.models.own_network import Body, make_own
from penstock.models.torch_cores import make_core
from penstock.models.torch_encoders import DenseLayers, Encoder, VectorReader
from penstock.models.torch_heads import ActorCritic, HeadNet, PolicyNetwork, orthogonal
from penstock.models.torch_norm import make_hidden
from penstock.models.torch_trunks import activate


class GeneralNet(PolicyNetwork):
    """The network of a `GeneralShape` up to the heads.

    Bodies compute in ``dtype``, the rest in float32.
    """

    bodies: nn.ModuleList
    """One body, or two where the critic is separate: the policy's first."""
    cores: nn.ModuleList
    """The memory after each body; none without memory."""
    is_whole: bool
    """Whether the body is a custom network that returns outputs and values itself."""

    def __init__(self, shape: GeneralShape[Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.state_size = shape.state_size
        self._shape = shape
        self._dtype = dtype

        count = 2 if shape.is_separate else 1
        bodies = [_make_body(shape) for _ in range(count)]
        self.bodies = nn.ModuleList(body.module for body in bodies)
        width = bodies[0].width
        self.is_whole = width is None

        model = shape.model
        self.core_inputs = shape.core_inputs
        self._inputs_width = self.core_inputs.width if self.core_inputs else 0
        self._width = width
        """Width of the features that heads read."""
        self.cores = nn.ModuleList()
        if width is not None and model.core != "none":
            inputs = width + self._inputs_width
            self.cores.extend(make_core(model.core, inputs, model.core_size) for _ in range(count))
            self._width = model.core_size

    @abstractmethod
    def outputs_of(self, features: Tensor) -> Tensor:
        """Returns what actions are decided by, float32 ``[B, outputs]``.

        ``features`` ``[B, width]`` are those of the first body, or of its core.
        """

    def features(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Returns the features ``[B, width]`` of each body, or its core, and the state afterwards.

        The arguments are those of `ActorCritic.forward`. The tail of the state, what a core reads
        besides the features, is the caller's to write.
        """
        if self.cores and first is None:
            first = torch.zeros(obs.shape[:2], dtype=torch.bool, device=obs.device)
        return self.features_of(recorded_arrays(self._shape, obs), state, first, inputs)

    def features_of(
        self,
        recorded: dict[str, Tensor],
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """Returns what `features` does, of the arrays of observations instead of packed rows.

        Args:
            recorded: the arrays, as those of `recorded_arrays`.
            state: float32 ``[E, state_size]``; zeros by default.
            first: bool ``[T, E]``; needed where there is a memory, as T * E are the arrays' rows.
            inputs: as those of `ActorCritic.forward`.
        """
        arrays = self._scaled(recorded)
        features = [apply_body(body, arrays, self._dtype) for body in self.bodies]
        if not self.cores:
            return features, state

        assert first is not None
        if state is None:
            state = torch.zeros(first.shape[1], self.state_size, device=first.device)
        return self._apply_cores(features, state, first, inputs)

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns outputs ``[B, outputs]`` alone, and the state afterwards, as `features`."""
        if self.cores:
            features, state = self.features(obs, state)
            return self.outputs_of(features[0]), state

        arrays = self._scaled(recorded_arrays(self._shape, obs))
        result = apply_body(self.bodies[0], arrays, self._dtype)
        outputs = result[0] if self.is_whole else self.outputs_of(result)
        return outputs, state

    def mask(self, obs: Tensor) -> Tensor | None:
        part = self._shape.mask
        if part is None:
            return None
        return obs[..., part.offset : part.offset + part.nbytes].flatten(0, -2)

    def numbers(self, obs: Tensor) -> Tensor:
        return numbers_of(self._shape, recorded_arrays(self._shape, obs))

    def _scaled(self, recorded: dict[str, Tensor]) -> dict[str, Tensor]:
        return scaled_arrays(self._shape, recorded, self.normalizer, self._dtype)

    def _apply_cores(
        self, features: list[Tensor], state: Tensor, first: Tensor, inputs: Tensor | None
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the outputs ``[T * E, size]`` of each core, and the state after the last row.

        Args:
            features: of each body, ``[T * E, width]``.
            state: of all cores side by side, ``[E, state_size]``.
            first: bool ``[T, E]``, where the state is forgotten before a row.
            inputs: what the cores read besides the features, ``[T, E, width]``; by default of a
                single row that at the end of the state.
        """
        rows, envs = first.shape
        core_outputs = []
        next_states = []
        tails = []
        if self._inputs_width:
            width = self._inputs_width
            state, tail = state.split([self.state_size - width, width], 1)
            tails = [tail]
            if inputs is None:
                assert rows == 1, "the inputs of further rows are not in the state"
                inputs = torch.where(first[..., None], 0.0, tail[None])
            inputs = self._read_inputs(inputs)

        states = state.chunk(len(self.cores), 1)
        for core, body_features, core_state in zip(self.cores, features, states, strict=True):
            core_features = body_features.view(rows, envs, -1)
            if inputs is not None:
                core_features = torch.cat((core_features, inputs), 2)
            outputs, next_state = core(core_features, core_state, first)
            core_outputs.append(outputs.flatten(0, 1))
            next_states.append(next_state)

        return core_outputs, torch.cat((*next_states, *tails), 1)

    def _read_inputs(self, inputs: Tensor) -> Tensor:
        """Returns a core's inputs ``[T, E, width]`` with rewards compressed.

        A reward of any size becomes a number of few digits: symlog of Hafner et al. 2023, arXiv
        2301.04104, equation 9.
        """
        assert self.core_inputs is not None
        if not self.core_inputs.reads_reward:
            return inputs
        rewards = inputs[..., -1:]
        return torch.cat((inputs[..., :-1], rewards.sign() * rewards.abs().log1p()), -1)


class GeneralActorCritic(GeneralNet, ActorCritic):
    """A `GeneralNet` with heads for policy and value."""

    def __init__(
        self, shape: GeneralShape[ActorCriticHeads], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(shape, dtype)
        self.actions = shape.heads.actions
        if self._width is not None:
            self._make_heads(self._width, shape.model.log_std_init)
        self.normalizer = normalizer_of(shape)

    def forward(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns outputs and values, as every `ActorCritic`."""
        outputs, values, _ = self.step(obs, state, first, inputs)
        return outputs, values

    def step(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what `forward` does, and the state after the last row, as `features`."""
        if self.cores and first is None:
            first = torch.zeros(obs.shape[:2], dtype=torch.bool, device=obs.device)
        return self.step_of(recorded_arrays(self._shape, obs), state, first, inputs)

    def step_of(
        self,
        recorded: dict[str, Tensor],
        state: Tensor | None = None,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what `step` does; the arguments are those of `features_of`."""
        if self.is_whole:
            arrays = self._scaled(recorded)
            outputs, values = apply_body(self.bodies[0], arrays, self._dtype)
            return outputs, values, None

        features, state = self.features_of(recorded, state, first, inputs)
        values = torch.addmv(self.value.bias, features[-1], self.value.weight[0])
        return self.logits(features[0]), values, state

    def outputs_of(self, features: Tensor) -> Tensor:
        return self.logits(features)


class GeneralHeadNet(GeneralNet, HeadNet):
    """A `GeneralNet` with one head.

    A duelling head has a further layer of two halves before it, as that of `DenseShape`.
    """

    def __init__(self, shape: GeneralShape[SingleHead], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype)
        head = shape.heads
        width = self._width
        assert width is not None, shape

        self.halves = None
        if head.duelling:
            layer_norm = shape.model.layer_norm
            halves = make_hidden(width, 2 * width, noisy=head.noisy, layer_norm=layer_norm)
            self.halves = orthogonal(halves, math.sqrt(2))
            is_mlp = not shape.convolutional and shape.model.entry is None
            self._activate = activate(shape.model.activation if is_mlp else "relu")
        self._make_head(width, head)
        self.normalizer = normalizer_of(shape)

    def _body_weights(self) -> Sequence[Tensor]:
        return ()

    def acting_outputs(self, obs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        features, _ = self.features(obs)
        return self._apply_head(features[0], *weights)

    def unroll(
        self,
        obs: Tensor,
        state: Tensor,
        first: Tensor | None = None,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        features, next_state = self.features(obs, state, first, inputs)
        assert next_state is not None
        rows = self._apply_head(features[0], *self.training_weights())
        return self.by_quantile(rows), next_state

    def outputs_of(self, features: Tensor) -> Tensor:
        return self._apply_head(features, *self.acting_weights())

    def _apply_head(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.halves is not None:
            features = self._activate(self.halves(features))
        return linear(features, weight, bias)


class GeneralCritics(nn.Module):
    """Two separate Q-functions over an observation of any kind and an action; never published.

    Each has a body of its own, which reads images, or with a custom network the whole observation.
    The body's features, the other numbers of the observation and the action are put side by side,
    and go through layers.

    Args:
        actor: the shape of the policy whose actions they value.
        normalizer: that of the policy.
        dtype: precision of the bodies.
        action_size: number of values in an action.
    """

    def __init__(
        self,
        actor: GeneralShape[SingleHead],
        normalizer: Normalizer | None,
        dtype: torch.dtype = torch.float32,
        *,
        action_size: int,
    ) -> None:
        super().__init__()
        self._shape = actor
        self._dtype = dtype
        self.normalizer = normalizer
        self.critics = nn.ModuleList(_Critic(actor, action_size, dtype) for _ in range(2))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns Q-values ``[2, B]`` of observations ``[B, ...]`` and actions ``[B, ...]``, -1 to
        1."""
        return self._values(obs, action, count=2)

    def of_action(self, obs: Tensor, action: Tensor, count: int = 2) -> Tensor:
        """Returns the Q-values of the first ``count``, ``[count, B]``.

        The gradient reaches the action alone.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            return self._values(obs, action, count)
        finally:
            for parameter in trained:
                parameter.requires_grad_()

    def _values(self, obs: Tensor, action: Tensor, count: int) -> Tensor:
        """Returns the Q-values of the first ``count``, ``[count, B]``."""
        recorded = recorded_arrays(self._shape, obs)
        arrays = scaled_arrays(self._shape, recorded, self.normalizer, self._dtype)
        actions = action.reshape(len(action), -1)
        return torch.stack([critic(arrays, actions) for critic in self.critics[:count]])


class _Critic(VectorReader):
    """One Q-function of `GeneralCritics`."""

    def __init__(
        self, actor: GeneralShape[SingleHead], action_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._dtype = dtype
        model = actor.model
        images = [array for array in actor.inputs if array.is_image]

        # A custom network reads all arrays, an encoder here only the images.
        self.body: nn.Module | None = None
        width: int | None = 0
        if model.entry is not None:
            body = make_own(actor)
            self.body = body.module
            width = body.width
        elif images:
            self.body = encoder = Encoder(images, model, actor.memory_format)
            width = encoder.width
        assert width is not None, actor

        vectors_width = self._add_vectors(() if model.entry else actor.inputs, model)
        inputs = width + vectors_width + action_size
        self.layers = DenseLayers((inputs, *model.hidden), model)
        self.value = orthogonal(nn.Linear(model.hidden[-1], 1), 1.0)

    def forward(self, arrays: dict[str, Tensor], action: Tensor) -> Tensor:
        """Returns Q-values ``[B]`` of arrays ``[B, *shape]`` and actions ``[B, size]``."""
        features = [] if self.body is None else [apply_body(self.body, arrays, self._dtype)]
        inputs = torch.cat([*features, *self._vectors(arrays), action], 1)
        values: Tensor = self.value(self.layers(inputs))
        return values[:, 0]


def general_net(
    shape: GeneralShape[Any], dtype: torch.dtype = torch.float32
) -> GeneralActorCritic | GeneralHeadNet:
    """Makes the network of a shape, by its heads."""
    if isinstance(shape.heads, SingleHead):
        return GeneralHeadNet(shape, dtype)
    return GeneralActorCritic(shape, dtype)


def layout(shape: GeneralShape[Any]) -> ParamLayout:
    """Returns the layout of the network's parameters, then its buffers.

    The network is built without memory, on torch's device "meta". A custom network may need
    numbers, which that device does not have; it is then built on the CPU.
    """
    # The random state is restored, so that the weights of the network that is trained are the same.
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                net = general_net(shape)
        except Exception:
            if shape.model.entry is None:
                raise
            net = general_net(shape)

    tensors = (*net.named_parameters(), *net.named_buffers())
    return ParamLayout(tuple((name, tuple(tensor.shape)) for name, tensor in tensors))


def recorded_arrays(shape: GeneralShape[Any], obs: Tensor) -> dict[str, Tensor]:
    """Returns the arrays of observations ``[..., *shape]`` as they are recorded.

    They are ``[B, *shape]`` by name, without the action mask.
    """
    arrays = {}
    for array in shape.inputs:
        part = array.part
        values = obs
        if part is not None:
            values = obs[..., part.offset : part.offset + part.nbytes]
            if array.dtype == "<f4":
                values = values.view(torch.float32)
        arrays[array.name] = values.reshape(-1, *array.shape)
    return arrays


def scaled_arrays(
    shape: GeneralShape[Any],
    recorded: dict[str, Tensor],
    normalizer: Normalizer | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Returns the arrays of observations as bodies read them, scaled or normalised.

    Args:
        shape: of the network.
        recorded: the arrays, as those of `recorded_arrays`.
        normalizer: of the network, if it normalises.
        dtype: precision of the bodies.

    Returns:
        Arrays ``[B, *shape]`` by name. Images are in ``dtype``, others in float32.
    """
    arrays = {}
    if isinstance(normalizer, FrameNormalizer):
        first = 0
        for array in shape.inputs:
            frames = recorded[array.name]
            if array.choices:
                arrays[array.name] = frames
                continue
            arrays[array.name] = normalizer.frames(frames, dtype, first, shape.memory_format)
            first += math.prod(array.shape)
        return arrays

    # Arrays that are not normalised are scaled. A custom network gets all of them in float32.
    normalized = [] if normalizer is None else normalized_inputs(shape)
    is_custom = shape.model.entry is not None
    for array in shape.inputs:
        if array not in normalized:
            array_dtype = dtype if array.is_image and not is_custom else torch.float32
            arrays[array.name] = _scaled(array, recorded[array.name], array_dtype)

    if normalizer is not None:
        rows = normalizer(numbers_of(shape, recorded))
        sizes = [math.prod(array.shape) for array in normalized]
        for array, columns in zip(normalized, rows.split(sizes, 1), strict=True):
            values = columns.reshape(-1, *array.shape)
            arrays[array.name] = values.to(dtype) if array.is_image else values
    return arrays


def _scaled(array: Input, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns ``(x - low) / span`` of the recorded values of one array, in ``dtype``."""
    # The lower bound is subtracted before values are rounded, since they may differ by little.
    if array.low:
        values = values.float() - array.low
    values = values.to(dtype)
    return values if array.span == 1 else values / array.span


def normalized_inputs(shape: GeneralShape[Any]) -> list[Input]:
    """Returns the inputs that `model.normalize_observations` concerns.

    These are numbers, which cells of small images are as well, or frames where there are no
    numbers. Numbers of choices are not normalised.
    """
    arrays = [array for array in shape.inputs if not array.choices]
    return [array for array in arrays if not _is_frame(shape, array)] or arrays


def normalizer_of(shape: GeneralShape[Any]) -> Normalizer | None:
    """Makes the normaliser of a network; None if its observations are not normalised."""
    if not shape.model.normalize_observations:
        return None
    inputs = normalized_inputs(shape)
    if not inputs:
        return None
    size = sum(math.prod(array.shape) for array in inputs)
    return FrameNormalizer(size) if _is_frame(shape, inputs[0]) else Normalizer(size)


def numbers_of(shape: GeneralShape[Any], recorded: dict[str, Tensor]) -> Tensor:
    """Returns all numbers that are normalised, as they are recorded, float32 ``[B, inputs]``."""
    arrays = [recorded[array.name].flatten(1) for array in normalized_inputs(shape)]
    return torch.cat([array.float() for array in arrays], 1)


def apply_body(body: nn.Module, arrays: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """Returns the result of a body that computes in ``dtype``, converted to float32.

    It is a tensor of features, or a tuple of outputs and values.
    """
    device = next(iter(arrays.values())).device.type
    is_bf16 = dtype == torch.bfloat16 and device != "meta"

    # Without bf16 the context changes nothing.
    with torch.autocast(device if is_bf16 else "cpu", torch.bfloat16, enabled=is_bf16):
        result = body(arrays)

    if isinstance(result, tuple):
        return tuple(tensor.float() for tensor in result)
    return result.float()


def _make_body(shape: GeneralShape[Any]) -> Body:
    """Makes a body: a custom network, or an encoder of all arrays."""
    if shape.model.entry is not None:
        return make_own(shape)
    noisy = isinstance(shape.heads, SingleHead) and shape.heads.noisy
    encoder = Encoder(shape.inputs, shape.model, shape.memory_format, noisy=noisy)
    return Body(encoder, encoder.width)


def _is_frame(shape: GeneralShape[Any], array: Input) -> bool:
    return array.is_image and not is_small(shape.model, array.shape)

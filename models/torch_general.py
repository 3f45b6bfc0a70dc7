"""The network family in torch: several arrays, memory, custom networks, any heads.

    observation -> arrays by name -> body -> core -> policy head, or the one head
                                     (body -> core where the critic is separate) -> value head

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
    SingleHead,
    is_small,
)
from penstock.models.normalizer import FrameNormalizer, Normalizer
from penstock.models.own_network import make_own
from penstock.models.torch_cores import make_core
from penstock.models.torch_encoders import DenseLayers, Encoder
from penstock.models.torch_heads import ActorCritic, HeadNet, PolicyNetwork, orthogonal
from penstock.models.torch_trunks import activate


class GeneralNet(PolicyNetwork):
    """The network of a `GeneralShape` up to the heads.

    Bodies compute in ``dtype``, the rest in float32.
    """

    state_size: int

    def __init__(self, shape: GeneralShape[Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.state_size = shape.state_size
        self._shape, self._dtype = shape, dtype
        model = shape.model
        count = 1 + shape.is_separate
        made = [_body(shape) for _ in range(count)]
        self.bodies = nn.ModuleList(body for body, _ in made)
        width = made[0][1]
        self.is_whole = width is None
        cores = [make_core(model.core, width, model.core_size) for _ in range(count) if width]
        self.cores = nn.ModuleList(core for core in cores if core is not None)
        self._width = model.core_size if self.cores else width

    @abstractmethod
    def outputs_of(self, features: Tensor) -> Tensor:
        """Returns what actions are decided by, float32 ``[B, outputs]``.

        ``features`` ``[B, width]`` are those of the first body, or of its core.
        """

    def features(
        self, obs: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Returns the features ``[B, width]`` of each body, or its core, and the state afterwards.

        ``obs``, ``state`` and ``first`` are those of `ActorCritic.forward`.
        """
        arrays = self._arrays(obs)
        features = [through(body, arrays, self._dtype) for body in self.bodies]
        if not self.cores:
            return features, state
        return self._remember(features, tuple(obs.shape), state, first)

    def act(self, obs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns outputs ``[B, outputs]`` alone, and the state afterwards, as `features`."""
        if self.cores:
            features, state = self.features(obs, state)
            return self.outputs_of(features[0]), state
        first = through(self.bodies[0], self._arrays(obs), self._dtype)
        return first[0] if self.is_whole else self.outputs_of(first), state

    def mask(self, obs: Tensor) -> Tensor | None:
        part = self._shape.mask
        if part is None:
            return None
        return obs[..., part.offset : part.offset + part.nbytes].flatten(0, -2)

    def numbers(self, obs: Tensor) -> Tensor:
        return numbers_of(self._shape, obs)

    def _arrays(self, obs: Tensor) -> dict[str, Tensor]:
        return arrays_of(self._shape, obs, self.normalizer, self._dtype)

    def _remember(
        self,
        features: list[Tensor],
        lead: tuple[int, ...],
        state: Tensor | None,
        first: Tensor | None,
    ) -> tuple[list[Tensor], Tensor]:
        rows, envs = lead[:2]
        device = features[0].device
        if state is None:
            state = torch.zeros(envs, self.state_size, device=device)
        if first is None:
            first = torch.zeros(rows, envs, dtype=torch.bool, device=device)
        found, after = [], []
        states = state.chunk(len(self.cores), 1)
        for core, rows_of, before in zip(self.cores, features, states, strict=True):
            outputs, last = core(rows_of.view(rows, envs, -1), before, first)
            found.append(outputs.flatten(0, 1))
            after.append(last)
        return found, torch.cat(after, 1)


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
        self, obs: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns outputs and values, as every `ActorCritic`."""
        return self.step(obs, state, first)[:2]

    def step(
        self, obs: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns what `forward` does, and the state after the last row."""
        if self.is_whole:
            outputs, values = through(self.bodies[0], self._arrays(obs), self._dtype)
            return outputs, values, None
        features, state = self.features(obs, state, first)
        value = torch.addmv(self.value.bias, features[-1], self.value.weight[0])
        return self.logits(features[0]), value, state

    def outputs_of(self, features: Tensor) -> Tensor:
        return self.logits(features)


class GeneralHeadNet(GeneralNet, HeadNet):
    """A `GeneralNet` with one head.

    A duelling head has a further layer of two halves before it, as that of `DenseShape`.
    """

    def __init__(self, shape: GeneralShape[SingleHead], dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype)
        head, width = shape.heads, self._width
        assert width is not None, shape
        self.halves = None
        if head.duelling:
            self.halves = orthogonal(nn.Linear(width, 2 * width), math.sqrt(2))
            plain = not shape.convolutional and shape.model.entry is None
            self._activate = activate(shape.model.activation if plain else "relu")
        self._make_head(width, head.outputs, head.duelling)
        self.normalizer = normalizer_of(shape)

    def acting_weights(self) -> list[Tensor]:
        return [*self._head_weights()]

    def acting_outputs(self, obs: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return self._through_head(self.features(obs)[0][0], *weights)

    def outputs_of(self, features: Tensor) -> Tensor:
        return self._through_head(features, *self._head_weights())

    def _through_head(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
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
    """

    def __init__(
        self,
        actor: GeneralShape[SingleHead],
        normalizer: Normalizer | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._shape, self._dtype = actor, dtype
        self.normalizer = normalizer
        self.critics = nn.ModuleList(_Critic(actor, dtype) for _ in range(2))

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns Q-values ``[2, B]`` of observations ``[B, ...]`` and actions ``[B, ...]``, -1 to
        1."""
        arrays = arrays_of(self._shape, obs, self.normalizer, self._dtype)
        actions = action.reshape(len(action), -1)
        return torch.stack([critic(arrays, actions) for critic in self.critics])

    def of_action(self, obs: Tensor, action: Tensor) -> Tensor:
        """Returns what `forward` does; the gradient reaches the action alone."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            values: Tensor = self(obs, action)
        finally:
            for parameter in trained:
                parameter.requires_grad_()
        return values


class _Critic(nn.Module):
    def __init__(self, actor: GeneralShape[SingleHead], dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, model = dtype, actor.model
        images = {given.name: given.shape for given in actor.inputs if given.is_image}
        beside = [given for given in actor.inputs if not given.is_image]
        self.body: nn.Module | None = None
        width: int | None = 0
        if model.entry is not None:
            self.body, width = make_own(actor)
            beside = []
        elif images:
            self.body = encoder = Encoder(images, {}, model, actor.memory_format)
            width = encoder.width
        assert width is not None, actor
        self._beside = [given.name for given in beside]
        inputs = width + sum(math.prod(given.shape) for given in beside) + actor.outputs // 2
        self.layers = DenseLayers((inputs, *model.hidden), model)
        self.value = orthogonal(nn.Linear(model.hidden[-1], 1), 1.0)

    def forward(self, arrays: dict[str, Tensor], action: Tensor) -> Tensor:
        found = [] if self.body is None else [through(self.body, arrays, self._dtype)]
        found += [arrays[name].flatten(1) for name in self._beside]
        values: Tensor = self.value(self.layers(torch.cat([*found, action], 1)))
        return values[:, 0]


def general_net(
    shape: GeneralShape[Any], dtype: torch.dtype = torch.float32
) -> GeneralActorCritic | GeneralHeadNet:
    """Makes the network of a shape, by its heads."""
    is_single = isinstance(shape.heads, SingleHead)
    return (GeneralHeadNet if is_single else GeneralActorCritic)(shape, dtype)


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


def arrays_of(
    shape: GeneralShape[Any], obs: Tensor, normalizer: Normalizer | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Returns the arrays of observations as bodies read them, scaled or normalised.

    Args:
        shape: of the network.
        obs: ``[..., *shape]``, as recorded.
        normalizer: of the network, if it normalises.
        dtype: precision of the bodies.

    Returns:
        Arrays ``[B, *shape]`` by name. Images are in ``dtype``, others in float32.
    """
    arrays = {}
    if isinstance(normalizer, FrameNormalizer):
        first = 0
        for given in shape.inputs:
            frames = _array(given, obs)
            arrays[given.name] = normalizer.frames(frames, dtype, first, shape.memory_format)
            first += math.prod(given.shape)
        return arrays

    numbers = [] if normalizer is None else normalized_inputs(shape)
    for given in shape.inputs:
        if given not in numbers:
            own = shape.model.entry is not None
            kind = dtype if given.is_image and not own else torch.float32
            array = _array(given, obs)
            if given.low:  # subtracted before it is rounded, as the numbers may differ by little
                array = array.float() - given.low
            array = array.to(kind)
            arrays[given.name] = array if given.span == 1 else array / given.span

    if normalizer is not None:
        rows = normalizer(numbers_of(shape, obs))
        sizes = [math.prod(given.shape) for given in numbers]
        for given, columns in zip(numbers, rows.split(sizes, 1), strict=True):
            array = columns.reshape(-1, *given.shape)
            arrays[given.name] = array.to(dtype) if given.is_image else array
    return arrays


def normalized_inputs(shape: GeneralShape[Any]) -> list[Input]:
    """Returns the inputs that `model.normalize_observations` concerns.

    These are numbers, which cells of small images are as well, or frames where there are no
    numbers.
    """
    return [given for given in shape.inputs if not _is_frame(shape, given)] or list(shape.inputs)


def normalizer_of(shape: GeneralShape[Any]) -> Normalizer | None:
    """Makes the normaliser of a network; None if its observations are not normalised."""
    if not shape.model.normalize_observations:
        return None
    inputs = normalized_inputs(shape)
    size = sum(math.prod(given.shape) for given in inputs)
    return FrameNormalizer(size) if _is_frame(shape, inputs[0]) else Normalizer(size)


def numbers_of(shape: GeneralShape[Any], obs: Tensor) -> Tensor:
    """Returns all numbers that are normalised, as they are recorded, float32 ``[B, inputs]``."""
    arrays = [_array(given, obs).flatten(1) for given in normalized_inputs(shape)]
    return torch.cat([array.float() for array in arrays], 1)


def through(body: nn.Module, arrays: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """What a body gives, in float32."""
    device = next(iter(arrays.values())).device.type
    low = dtype == torch.bfloat16 and device != "meta"
    with torch.autocast(device if low else "cpu", torch.bfloat16, low):
        found = body(arrays)
    return tuple(t.float() for t in found) if isinstance(found, tuple) else found.float()


def _body(shape: GeneralShape[Any]) -> tuple[nn.Module, int | None]:
    """A body, and the width of its features."""
    if shape.model.entry is not None:
        return make_own(shape)
    images = {given.name: given.shape for given in shape.inputs if given.is_image}
    numbers = {given.name: given.shape for given in shape.inputs if not given.is_image}
    encoder = Encoder(images, numbers, shape.model, shape.memory_format)
    return encoder, encoder.width


def _is_frame(shape: GeneralShape[Any], given: Input) -> bool:
    return given.is_image and not is_small(shape.model, given.shape)


def _array(given: Input, obs: Tensor) -> Tensor:
    """One array ``[B, *shape]`` of observations, as it is recorded."""
    if given.part is not None:
        obs = obs[..., given.part.offset : given.part.offset + given.part.nbytes]
        obs = obs.view(torch.float32) if given.dtype == "<f4" else obs
    return obs.reshape(-1, *given.shape)

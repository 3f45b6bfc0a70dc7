"""Actor-critics of any make, in torch: several arrays, memory, a network of one's own.

    observation -> arrays by name -> body -> core -> policy head
                                     (body -> core where the critic is separate) -> value head

A body is an `Encoder`, or a network of one's own that gives features; one that gives outputs and
values itself has neither core nor heads after it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from penstock.core.params import ParamLayout
from penstock.models.general import GeneralShape, Input
from penstock.models.own_network import make_own
from penstock.models.torch_actor_critic import ActorCritic, Marks
from penstock.models.torch_cores import make_core
from penstock.models.torch_encoders import Encoder


class GeneralNet(ActorCritic):
    """As `GeneralShape` says; bodies compute in ``dtype``, the rest in float32."""

    def __init__(self, shape: GeneralShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.actions = shape.actions
        self.state_size = shape.state_size
        self._shape, self._dtype = shape, dtype
        self._numbers = [given for given in shape.inputs if not given.is_image]
        model = shape.model
        count = 1 + shape.is_separate
        made = [_body(shape) for _ in range(count)]
        self.bodies = nn.ModuleList(body for body, _ in made)
        width = made[0][1]
        self.is_whole = width is None
        cores = [make_core(model.core, width, model.core_size) for _ in range(count) if width]
        self.cores = nn.ModuleList(core for core in cores if core is not None)
        if width is not None:
            self._make_heads(model.core_size if self.cores else width, model.log_std_init)
        floats = [given.part for given in shape.inputs if given.part and given.dtype == "<f4"]
        self.floats = Marks((0, part.offset, part.nbytes) for part in floats)
        inputs = sum(math.prod(given.shape) for given in self._numbers)
        self._make_buffers(inputs if model.normalize_observations else 0, not self.is_whole)

    def forward(
        self, obs: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As of every `ActorCritic`."""
        return self.step(obs, state, first)[:2]

    def step(
        self, obs: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """`forward`, and the state after the last row."""
        arrays = self._arrays(obs)
        if self.is_whole:
            outputs, values = self._through(self.bodies[0], arrays)
            return outputs, values, None
        features = [self._through(body, arrays) for body in self.bodies]
        if self.cores:
            features, state = self._remember(features, tuple(obs.shape), state, first)
        value = torch.addmv(self.value.bias, features[-1], self.value.weight[0])
        return self.logits(features[0]), value, state

    def acting_outputs(self, obs: Tensor) -> Tensor:
        """Outputs ``[B, outputs]`` alone, without memory."""
        arrays = self._arrays(obs)
        first = self._through(self.bodies[0], arrays)
        return first[0] if self.is_whole else self.logits(first)

    def mask(self, obs: Tensor) -> Tensor | None:
        part = self._shape.mask
        if part is None:
            return None
        return obs[..., part.offset : part.offset + part.nbytes].flatten(0, -2)

    def numbers(self, obs: Tensor) -> Tensor:
        arrays = [_array(given, obs).flatten(1).float() for given in self._numbers]
        return torch.cat(arrays, 1)

    def _arrays(self, obs: Tensor) -> dict[str, Tensor]:
        """By name ``[B, *shape]``, float32 but for images, which are in the body's dtype."""
        arrays = {}
        for given in self._shape.inputs:
            if given.is_image or self.normalizer is None:
                own = self._shape.model.entry is not None
                dtype = self._dtype if given.is_image and not own else torch.float32
                array = _array(given, obs).to(dtype)
                arrays[given.name] = array / 255 if given.dtype == "|u1" else array
        if self.normalizer is not None:
            rows = self.normalizer(self.numbers(obs))
            sizes = [math.prod(given.shape) for given in self._numbers]
            for given, columns in zip(self._numbers, rows.split(sizes, 1), strict=True):
                arrays[given.name] = columns.reshape(-1, *given.shape)
        return arrays

    def _through(self, body: nn.Module, arrays: dict[str, Tensor]) -> Any:
        device = next(iter(arrays.values())).device.type
        low = self._dtype == torch.bfloat16 and device != "meta"
        with torch.autocast(device if low else "cpu", torch.bfloat16, low):
            found = body(arrays)
        return tuple(t.float() for t in found) if isinstance(found, tuple) else found.float()

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


def layout(shape: GeneralShape) -> ParamLayout:
    """Of the network's parameters, then its buffers."""
    with torch.random.fork_rng(devices=[]):  # what is trained begins with the same weights
        try:
            with torch.device("meta"):
                net = GeneralNet(shape)
        except Exception:  # one's own network may compute with numbers, which there are none of
            net = GeneralNet(shape)
    tensors = (*net.named_parameters(), *net.named_buffers())
    return ParamLayout(tuple((name, tuple(tensor.shape)) for name, tensor in tensors))


def _body(shape: GeneralShape) -> tuple[nn.Module, int | None]:
    """A body, and the width of its features."""
    if shape.model.entry is not None:
        return make_own(shape)
    images = {given.name: given.shape for given in shape.inputs if given.is_image}
    numbers = {given.name: given.shape for given in shape.inputs if not given.is_image}
    encoder = Encoder(images, numbers, shape.model)
    return encoder, encoder.width


def _array(given: Input, obs: Tensor) -> Tensor:
    """One array ``[B, *shape]`` of observations, as it is recorded."""
    if given.part is not None:
        obs = obs[..., given.part.offset : given.part.offset + given.part.nbytes]
        obs = obs.view(torch.float32) if given.dtype == "<f4" else obs
    return obs.reshape(-1, *given.shape)

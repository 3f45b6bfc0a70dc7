"""A policy as one torch module: from an environment's own observations to its own actions.

It joins what Python computes around a network elsewhere, so that all of it can be exported:

    observation   packed as by `penstock.envs.packing`
    network       that which learners train
    outputs       without what a mask forbids
    action        the most probable one, and one drawn as by `penstock.models.acting`,
                  in the environment's own bounds (`penstock.envs.vector_env.action_map`)

Random numbers are an input. Rows are independent of each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.func import functional_call

from penstock.algos.action_rule import action_rule
from penstock.algos.core_inputs import encoded_actions
from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.observations import MASK
from penstock.core.params import Float32, ParamLayout
from penstock.envs import EnvInfo
from penstock.envs.packing import leaves_of
from penstock.models.acting.policy import core_inputs_of, state_size_of
from penstock.models.actions import Choices, Numbers
from penstock.models.compute_form import in_memory_format
from penstock.models.core_inputs import CoreInputs
from penstock.models.distributions import FORBIDDEN, distribution
from penstock.models.general import GeneralShape
from penstock.models.torch_general import GeneralActorCritic, GeneralNet
from penstock.models.torch_heads import ActorCritic, PolicyNetwork, of_allowed
from penstock.models.torch_nets import filled_net

MEANINGS = {
    "state": "what the network remembers of an episode: 0 where it begins, then state_out",
    "reward": "what the last action was paid, as the environment says; not used where state is 0",
    "weights": "the network's flat vector of parameters, as `layout` says",
    "action": "the most probable action, as the environment takes it",
    "logits": "logits of the choices, those of the first component first; -1e9 where forbidden",
    "q": "value of each action; -1e9 where forbidden",
    "mean": "means of the numbers that decide an action, before they are clipped or squashed",
    "log_std": "logarithms of their standard deviations",
    "value": "the discounted return that the network expects, in the units of its training",
    "state_out": "the next state, after `action`",
    "sampled_action": "the action that the noise draws, as the environment takes it",
    "sampled_state_out": "the next state, after `sampled_action`",
    "log_prob": "its log-probability, or the log-density of the numbers that decide it",
}
"""What each array of the module means; those of observations and noise are beside them."""


class GraphArray(NamedTuple):
    """One input or output of the module."""

    name: str
    dtype: str
    """As numpy names it."""
    shape: tuple[int, ...]
    """Of one row; of "weights", of all."""
    meaning: str

    @property
    def has_batch(self) -> bool:
        """Whether its first axis is that of the rows, in front of ``shape``."""
        return self.name != "weights"

    def __str__(self) -> str:
        axes = ["batch"] if self.has_batch else []
        axes += map(str, self.shape)
        return f"{self.name} {self.dtype}[{', '.join(axes)}]"

    def zeros(self, rows: int) -> Tensor:
        """Returns the array for as many rows, full of zeros."""
        leading = (rows,) if self.has_batch else ()
        return torch.from_numpy(np.zeros((*leading, *self.shape), self.dtype))


class _Decision(NamedTuple):
    """What was decided of outputs."""

    own_action: Tensor
    """Choices from 0, or numbers from -1 to 1, ``[B, *shape]``."""
    arrays: dict[str, Tensor]
    """The outputs of the module that say it, by name."""


class PolicyModule(nn.Module):
    """Decides for a batch: ``module(*arrays of inputs) -> arrays of outputs``.

    `inputs` and `outputs` say which, in their order.
    """

    inputs: tuple[GraphArray, ...]
    outputs: tuple[GraphArray, ...]
    layout: ParamLayout
    """Of the network's parameters."""
    state_size: int
    """Number of float32 values that it remembers of an episode; 0 without memory."""

    def __init__(
        self,
        config: Config,
        info: EnvInfo,
        weights: Float32,
        *,
        sampled: bool = False,
        program: bool = False,
    ) -> None:
        """Make the module of a policy.

        Args:
            config: the config of its run.
            info: the environment as Penstock packs its observations and actions.
            weights: flat vector of the network's parameters.
            sampled: whether it also draws an action, by an input "noise".
            program: whether the flat vector is an input, "weights".

        Raises:
            UserError: if actions are decided in a way that it cannot compute.
        """
        super().__init__()
        observation_space, action_space = info.spaces
        self._rule = action_rule(config, info)
        self._draws = sampled
        if sampled and self._rule.has_values:
            raise UserError(
                f"algo.name {config.algo.name} draws no action from probabilities: it takes the "
                "action of the highest q, or with a small probability any; leave out --sampled, "
                "and draw in your program"
            )
        if sampled and self._rule.deterministic:
            raise UserError(
                f"algo.name {config.algo.name} draws no action from probabilities: it takes that "
                "of its network, to which training adds noise; leave out --sampled, and add noise "
                "in your program"
            )

        # Frames in another order would only add copies to the graph.
        shape = in_memory_format(network_shape(config, info), "contiguous")
        self.layout = shape.layout
        self.state_size = state_size_of(shape)
        self._core_inputs = core_inputs_of(shape)
        self.network = _Network(filled_net(shape, weights))
        self._input_shapes: dict[str, tuple[int, ...]] = {}
        if isinstance(shape, GeneralShape):
            self._input_shapes = {array.name: array.shape for array in shape.inputs}

        self.packings = nn.ModuleList(_packings(observation_space, info))
        self.to_env = _EnvActions(action_space)
        self.inputs = self._all_inputs(program)
        with torch.no_grad():
            results = self.results(*(array.zeros(rows=1) for array in self.inputs))
        self.outputs = tuple(
            GraphArray(name, _numpy_name(tensor.dtype), tuple(tensor.shape[1:]), MEANINGS[name])
            for name, tensor in results.items()
        )
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.results(*inputs).values())

    def results(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Returns the outputs by name; ``inputs`` are those of `inputs`."""
        named = dict(zip((array.name for array in self.inputs), inputs, strict=True))

        # The arrays of the observation, and the mask among them.
        arrays = {}
        mask = None
        for packing in self.packings:
            assert isinstance(packing, _Packing)
            packed = packing(named[packing.input_name])
            if packing.is_mask:
                mask = packed
            else:
                input_shape = self._input_shapes.get(packing.part_name, packed.shape[1:])
                arrays[packing.part_name] = packed.reshape(-1, *input_shape)

        # The network, of its own parameters or of those that are an input.
        state = named.get("state")
        if self._core_inputs is not None and self._core_inputs.reads_reward:
            state = _with_reward(self._core_inputs, named["state"], named["reward"])
        if "weights" in named:
            parameters = self._parameters_in(named["weights"])
            outputs, value, next_state = functional_call(self.network, parameters, (arrays, state))
        else:
            outputs, value, next_state = self.network(arrays, state)

        decision = self._decide(outputs, mask)
        sample = self._sample(decision, named["noise"]) if self._draws else None
        results = dict(decision.arrays)
        if value is not None:
            results["value"] = value
        if next_state is not None:
            results["state_out"] = next_state
        if sample is not None:
            results |= sample.arrays

        # Only with the action among its inputs the state depends on what was decided.
        if self._core_inputs is not None and self._core_inputs.actions is not None:
            results["state_out"] = _with_action(self._core_inputs, next_state, decision)
            if sample is not None:
                results["sampled_state_out"] = _with_action(self._core_inputs, next_state, sample)
        return results

    def _all_inputs(self, program: bool) -> tuple[GraphArray, ...]:
        """Returns the arrays that the module takes; with "weights" if it is a ``program``."""
        arrays = []
        for packing in self.packings:
            assert isinstance(packing, _Packing)
            arrays.append(packing.graph_array)

        if self.state_size:
            arrays.append(GraphArray("state", "float32", (self.state_size,), MEANINGS["state"]))
        if self._core_inputs is not None and self._core_inputs.reads_reward:
            arrays.append(GraphArray("reward", "float32", (), MEANINGS["reward"]))
        if self._draws:
            arrays.append(self._noise())
        if program:
            size = self.layout.size
            arrays.append(GraphArray("weights", "float32", (size,), MEANINGS["weights"]))
        return tuple(arrays)

    def _noise(self) -> GraphArray:
        """Returns the input that draws an action."""
        match self._rule.actions:
            case Choices(counts=counts):
                count = len(counts)
                meaning = "uniform random numbers, at least 0 and below 1, one for each component"
            case Numbers(size=size):
                count = size
                meaning = "random numbers of the standard normal distribution"
        return GraphArray("noise", "float32", (count,), meaning)

    def _parameters_in(self, weights: Tensor) -> dict[str, Tensor]:
        """Returns the network's parameters in a flat vector, by their names in `network`."""
        entries = self.layout.entries
        parts = weights.split([int(np.prod(shape)) for _, shape in entries])
        return {
            f"net.{name}": part.view(shape)
            for (name, shape), part in zip(entries, parts, strict=True)
        }

    def _decide(self, outputs: Tensor, mask: Tensor | None) -> _Decision:
        """Returns the most probable action, and what the network's outputs mean."""
        actions = self._rule.actions
        if isinstance(actions, Numbers):
            arrays = {"mean": outputs}
            if not self._rule.deterministic:
                mean, log_std = outputs.chunk(2, 1)
                if self._rule.log_std is not None:
                    log_std = log_std.clamp(*self._rule.log_std)
                arrays = {"mean": mean, "log_std": log_std}
            numbers = _bounded(arrays["mean"], actions)
            return _Decision(numbers, {"action": self.to_env(numbers), **arrays})

        if self._rule.has_values:
            name = "q"
            allowed_outputs = of_allowed(outputs, mask, FORBIDDEN, actions.counts)
        else:
            name = "logits"
            allowed_outputs = outputs
            if mask is not None:
                allowed_outputs = torch.where(mask != 0, outputs, FORBIDDEN)

        parts = allowed_outputs.split(actions.counts, 1)
        best = torch.stack([part.argmax(1) for part in parts], 1)
        choices = best.reshape(-1, *actions.shape)
        return _Decision(choices, {"action": self.to_env(choices), name: allowed_outputs})

    def _sample(self, decision: _Decision, noise: Tensor) -> _Decision:
        """Returns an action that the noise draws, and its log-probability, given that of
        `_decide`."""
        actions = self._rule.actions
        decided = decision.arrays
        if isinstance(actions, Numbers):
            mean = decided["mean"]
            log_std = decided["log_std"]
            numbers = mean + noise * log_std.exp()
            log_prob = distribution(actions, torch.cat([mean, log_std], 1)).logp(numbers)
            bounded = _bounded(numbers, actions)
            arrays = {"sampled_action": self.to_env(bounded), "log_prob": log_prob}
            return _Decision(bounded, arrays)

        logits = decided["logits"]
        parts = logits.split(actions.counts, 1)
        drawn = [_draw(part, noise[:, i]) for i, part in enumerate(parts)]
        choices = torch.stack(drawn, 1).reshape(-1, *actions.shape)
        log_prob = distribution(actions, logits).logp(choices)
        arrays = {"sampled_action": self.to_env(choices), "log_prob": log_prob}
        return _Decision(choices, arrays)


class _Network(nn.Module):
    """The network, called alike whatever its kind is."""

    def __init__(self, net: PolicyNetwork) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, arrays: dict[str, Tensor], state: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns outputs ``[B, outputs]``, values ``[B]`` and the next state ``[B, size]``.

        Where the network has no values or no state, these are None. ``arrays`` are those of the
        observations by name, as recorded.
        """
        # Rows are those of as many environments, one step of each. The exporter takes `len` of a
        # tensor for a constant.
        first = None if state is None else torch.zeros(1, state.shape[0], dtype=torch.bool)
        net = self.net
        if isinstance(net, GeneralActorCritic):
            return net.step_of(arrays, state, first)
        if isinstance(net, GeneralNet):
            features, next_state = net.features_of(arrays, state, first)
            return net.outputs_of(features[0]), None, next_state

        # Of a single array.
        (obs,) = arrays.values()
        if isinstance(net, ActorCritic):
            outputs, values = net(obs)
            return outputs, values, None
        return net(obs), None, None


class _Packing(nn.Module):
    """Packs one array of an observation, as `penstock.envs.packing.Packer` does."""

    def __init__(
        self,
        part_name: str,
        input_name: str,
        space: spaces.Space[Any],
        packed_dtype: np.dtype[Any],
        *,
        is_numbered: bool,
    ) -> None:
        """Create the packing of one array.

        Args:
            part_name: by which the network knows the array.
            input_name: of the input of the graph.
            space: of the array.
            packed_dtype: of the packed array.
            is_numbered: whether its choices are packed as numbers from 0, instead of one-hot.
        """
        super().__init__()
        assert space.shape is not None
        assert space.dtype is not None
        self.part_name = part_name
        self.is_mask = part_name == MASK
        self.input_name = input_name
        self._packed_dtype = _torch_dtype(packed_dtype)
        self._is_flags = space.dtype == np.bool_ and packed_dtype == np.uint8 and not self.is_mask

        # Choices that are numbers: the first and the last of each.
        self._start: Tensor | None = None
        self._last: Tensor | None = None
        # Choices that are one-hot: of each packed number the component and the choice.
        self._component: Tensor | None = None
        self._choices: Tensor | None = None
        meaning = "the observation" if part_name == "obs" else f"{part_name} of the observation"
        meaning += ", as the environment returns it"
        if self.is_mask:
            meaning += ": not 0 where a choice is allowed"
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
            counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
            start = np.ravel(space.start)
            if is_numbered:
                self._start = torch.from_numpy(start.astype(np.int64))
                self._last = torch.from_numpy(counts.astype(np.int64) - 1)
                meaning += ": choices, and the nearest one for any other number"
            else:
                component = np.repeat(np.arange(len(counts)), counts)
                choices = np.concatenate([np.arange(count) for count in counts])
                choices += start[component]
                self._component = torch.from_numpy(component)
                self._choices = torch.from_numpy(choices.astype(space.dtype))
                meaning += ": choices, which are made one-hot"
        dtype = np.dtype(space.dtype).newbyteorder("=").name
        self.graph_array = GraphArray(input_name, dtype, tuple(space.shape), meaning)

    def forward(self, values: Tensor) -> Tensor:
        """Returns packed values ``[B, ...]`` of the space's own ones."""
        if self._component is not None:
            assert self._choices is not None
            rows = values.reshape(values.shape[0], -1)
            return torch.eq(rows[:, self._component], self._choices).to(self._packed_dtype)
        if self._start is not None:
            assert self._last is not None
            rows = values.reshape(values.shape[0], -1).to(torch.int64)
            numbers = (rows - self._start).clamp(min=0)
            return torch.minimum(numbers, self._last).to(self._packed_dtype)
        if self.is_mask:
            return values
        if self._is_flags:
            return values.to(torch.uint8) * 255
        return values.to(self._packed_dtype)


class _EnvActions(nn.Module):
    """The map of `penstock.envs.vector_env.action_map` in torch."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        assert space.dtype is not None
        self._dtype = _torch_dtype(space.dtype)
        self._start: Tensor | None = None
        self._low: Tensor | None = None

        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and np.any(space.start):
            self._start = torch.from_numpy(np.array(space.start, np.int64))
        elif isinstance(space, spaces.Box):
            # Twice a bound of float16 may be beyond its largest number.
            computed_dtype = np.promote_types(space.low.dtype, np.float32)
            low = space.low.astype(computed_dtype)
            high = space.high.astype(computed_dtype)
            self._low = torch.from_numpy(low)
            self._high = torch.from_numpy(high)
            self._half_range = torch.from_numpy(np.asarray(high / 2 - low / 2))

    def forward(self, actions: Tensor) -> Tensor:
        """Returns the environment's actions for those of a policy, ``[B, *shape]``."""
        if self._low is not None:
            env_actions = (actions + 1).to(self._low.dtype) * self._half_range + self._low
            # Rounding must not leave the bounds, which environments check.
            actions = torch.minimum(torch.maximum(env_actions, self._low), self._high)
        elif self._start is not None:
            actions = actions + self._start
        return actions.to(self._dtype)


def _packings(space: spaces.Space[Any], info: EnvInfo) -> list[_Packing]:
    """Returns the packing of each array of an observation that holds anything."""
    part_dtypes = {part.name: np.dtype(part.dtype) for part in info.parts}
    numbered = {part.name for part in info.parts if part.choices}
    input_names: set[str] = set()
    packings = []
    for keys, leaf_space in leaves_of(space):
        if leaf_space.shape is not None and 0 in leaf_space.shape:
            continue
        part_name = ".".join(map(str, keys)) or "obs"

        # The names of other inputs, and of outputs, are not those of a part.
        input_name = part_name
        while input_name in MEANINGS or input_name == "noise" or input_name in input_names:
            input_name = f"obs.{input_name}"
        input_names.add(input_name)
        packed_dtype = part_dtypes.get(part_name, info.observation_space.dtype)
        packings.append(
            _Packing(
                part_name,
                input_name,
                leaf_space,
                packed_dtype,
                is_numbered=part_name in numbered,
            )
        )
    return packings


def _with_reward(core_inputs: CoreInputs, state: Tensor, reward: Tensor) -> Tensor:
    """Returns states ``[B, size]`` with the last rewards ``[B]``, as `LoadedPolicy` does."""
    if core_inputs.reward_clip is not None:
        reward = reward.clamp(-core_inputs.reward_clip, core_inputs.reward_clip)
    reward = reward * core_inputs.reward_scale
    has_begun = (state == 0).all(1)
    return torch.cat((state[:, :-1], torch.where(has_begun, 0.0, reward)[:, None]), 1)


def _with_action(core_inputs: CoreInputs, state: Tensor, decision: _Decision) -> Tensor:
    """Returns the states ``[B, size]`` after a decision, with its action."""
    encoded = encoded_actions(core_inputs, decision.own_action)
    first = state.shape[1] - core_inputs.width
    last = first + core_inputs.action_width
    return torch.cat((state[:, :first], encoded, state[:, last:]), 1)


def _bounded(numbers: Tensor, actions: Numbers) -> Tensor:
    """Returns a policy's actions ``[B, *shape]``, given the numbers ``[B, size]`` that decide
    them; unless they are squashed, the environment clips them."""
    if actions.squashed:
        numbers = numbers.tanh()
    return numbers.reshape(-1, *actions.shape)


def _draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Returns choices ``[B]`` as `penstock.models.acting.categorical.CategoricalSampler` does.

    ``logits`` are ``[B, choices]``, and the random numbers ``uniform`` ``[B]``.
    """
    sums = (logits - logits.amax(1, keepdim=True)).exp().cumsum(1)
    is_below = sums[:, :-1] <= uniform[:, None] * sums[:, -1:]
    return is_below.sum(1)


def _torch_dtype(dtype: npt.DTypeLike) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, np.dtype(dtype).newbyteorder("="))).dtype


def _numpy_name(dtype: torch.dtype) -> str:
    return str(torch.zeros(0, dtype=dtype).numpy().dtype)

"""The forward pass of every built-in network in numpy, written from docs/forward-pass.md alone.

It takes what a foreign actor has: config, spaces and layout of a WELCOME, and the flat vector of a
WEIGHTS message. It shares nothing with Penstock; where it and the page disagree, the page is to be
mended first. It is for comparison and slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Space = dict[str, Any]
"""A space as the WELCOME describes it: its kind, and what makes it."""

CLIP = 10.0
EPSILON = 1e-8
NORM_EPSILON = 1e-6
LEAST_BYTE_VARIANCE = 16.0
FORBIDDEN = -1e9
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
LSTM_GATES = "ifgo"
GRU_GATES = "rzn"
LARGE = 36
SMALLEST = 5
LEAST_SIDE = {"small_cnn": SMALLEST, "nature_cnn": LARGE, "impala_cnn": 8}


@dataclass
class PlainOutputs:
    """What a network computes of B rows."""

    decided_by: Array
    """Logits, Q-values, or means and then logarithms of standard deviations, ``[B, outputs]``."""
    value: Array | None
    """``[B]``, of an actor-critic."""
    state: Array
    """``[B, state_size]``, after the rows."""


@dataclass
class PlainLeaf:
    """One array of an observation."""

    keys: tuple[Any, ...]
    space: Space
    embed_above: float = math.inf

    @property
    def is_embedded(self) -> bool:
        """Whether its choices are numbers, which are embedded."""
        if self.kind not in ("Discrete", "MultiDiscrete"):
            return False
        return bool(np.max(self.space[self.kind][0]) > self.embed_above)

    @property
    def kind(self) -> str:
        return next(iter(self.space))

    @property
    def dtype(self) -> str:
        """As it is in a slot: bytes, or else numbers."""
        is_part = bool(self.keys)
        if self.keys == ("action_mask",):
            return "|u1"
        if self.kind != "Box":
            return "<f4"
        own = np.dtype(self.space["Box"][3])
        return "|u1" if own == np.uint8 or (is_part and own == np.bool_) else "<f4"

    @property
    def shape(self) -> tuple[int, ...]:
        content = self.space[self.kind]
        if self.is_embedded:
            return (np.size(content[0]),)
        match self.kind:
            case "Box":
                return tuple(content[2])
            case "MultiBinary":
                return (content,) if isinstance(content, int) else tuple(content)
            case "Discrete":
                return (content[0],)
        return (int(np.sum(content[0])),)

    def values(self, observation: Any) -> Array:
        """Returns its values ``[B, *shape]`` within observations, choices one-hot."""
        for key in self.keys:
            observation = observation[key]
        array = np.asarray(observation)
        content = self.space[self.kind]
        if self.is_embedded:
            return array.reshape(len(array), -1) - np.ravel(content[1])
        match self.kind:
            case "Discrete":
                return np.asarray(array[:, None] - content[1] == np.arange(content[0]), np.float32)
            case "MultiDiscrete":
                counts = np.ravel(content[0])
                choices = array.reshape(len(array), -1) - np.ravel(content[1])
                columns = [choices[:, i, None] == np.arange(n) for i, n in enumerate(counts)]
                return np.concatenate(columns, 1).astype(np.float32)
        if self.keys and array.dtype == np.bool_:
            return array * np.uint8(255)
        return array


def leaves(
    space: Space, embed_above: float = math.inf, keys: tuple[Any, ...] = ()
) -> Iterator[PlainLeaf]:
    """Yield the arrays of an observation, in the order of its space."""
    kind, content = next(iter(space.items()))
    if kind == "Dict":
        for key, inner in content:
            yield from leaves(inner, embed_above, (*keys, key))
    elif kind == "Tuple":
        for index, inner in enumerate(content):
            yield from leaves(inner, embed_above, (*keys, index))
    else:
        yield PlainLeaf(keys, space, embed_above)


class PlainInput:
    """How a network reads one array."""

    def __init__(self, leaf: PlainLeaf, model: dict[str, Any]) -> None:
        self.leaf = leaf
        self.is_bytes = leaf.dtype == "|u1"
        self.shape = self._shape(leaf.shape or (1,))
        self.is_image, self.is_small = self._image(model)
        self.low, self.span = self._scale(model)

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) == 2 and (self.is_bytes or shape[0] == shape[1] < LARGE):
            return (1, *shape)
        return shape

    @property
    def has_channels_last(self) -> bool:
        first, middle, last = self.shape
        if middle < LARGE and (first == middle) != (last == middle):
            return first == middle
        return last < first

    def _image(self, model: dict[str, Any]) -> tuple[bool, bool]:
        kind = model["kind"]
        if len(self.shape) != 3 or kind == "mlp":
            return False, False
        sides = self.shape[:2] if self.has_channels_last else self.shape[1:]
        if kind != "auto":
            return min(sides) >= LEAST_SIDE[kind], kind == "small_cnn"
        if min(sides) >= LARGE:
            return True, False
        is_small = min(sides) >= SMALLEST and max(sides) < LARGE and bool(model.get("filters"))
        return is_small, is_small

    def _scale(self, model: dict[str, Any]) -> tuple[float, float]:
        shape = self.leaf.shape
        is_frame_like = self.is_image or self.is_bytes or len(shape) > 2
        is_frame_like |= sum(extent >= LARGE for extent in shape) >= 2
        unscaled = 0.0, 255.0 if self.is_bytes else 1.0
        is_box = self.leaf.kind == "Box" and np.dtype(self.leaf.space["Box"][3]) != np.bool_
        if model.get("scale") != "bounds" or not is_frame_like or not is_box:
            return unscaled

        low = float(np.min(self.leaf.space["Box"][0]))
        high = float(np.max(self.leaf.space["Box"][1]))
        if not max(-low, high, low, -high) < 2**24:
            return unscaled
        if low <= 0 <= high:
            return 0.0, max(-low, high) or 1.0
        return low, (high - low) or 1.0


class PlainNetwork:
    """One network with the weights that it was given.

    Args:
        config: sections `algo` and `model` of the WELCOME's config.
        spaces: of observations and of actions.
        layout: names and shapes of the arrays in the flat vector.
        flat: float32 ``[size]``.
    """

    def __init__(
        self,
        config: dict[str, Any],
        spaces: list[Space],
        layout: list[tuple[str, list[int]]],
        flat: Array,
    ) -> None:
        self.algo = config["algo"]
        self.model = config["model"]
        self.action_space = spaces[1]
        self.arrays: dict[str, Array] = {}
        offset = 0
        for name, shape in layout:
            size = math.prod(shape)
            self.arrays[name] = flat[offset : offset + size].reshape(shape)
            offset += size
        assert offset == len(flat)

        embed_above = config.get("env", {}).get("embed_above", math.inf)
        all_leaves = list(leaves(spaces[0], embed_above))
        self.mask_leaf = next((leaf for leaf in all_leaves if leaf.keys == ("action_mask",)), None)
        visible = [leaf for leaf in all_leaves if leaf is not self.mask_leaf]
        self.inputs = [PlainInput(leaf, self.model) for leaf in visible if math.prod(leaf.shape)]
        self.cores = sum(name.endswith("input.weight") for name in self.arrays)

    @property
    def state_size(self) -> int:
        """Number of values that it remembers of an environment."""
        if not self.cores:
            return 0
        size: int = self.arrays["cores.0.recurrent.weight"].shape[1]
        vectors = 2 if self.model["core"] == "lstm" else 1
        return size * self.cores * vectors + self._inputs_width

    @property
    def _inputs_width(self) -> int:
        """Number of values of the last action and reward in the state."""
        names = self.model.get("core_inputs", [])
        kind, content = next(iter(self.action_space.items()))
        width = int("reward" in names)
        if "action" not in names:
            return width
        if kind == "Box":
            return width + int(np.prod(content[2]))
        if kind == "MultiBinary":
            return width + 2 * int(np.prod(content))
        return width + int(np.sum(content[0]))

    def __call__(self, observation: Any, state: Array, reward: Array | None = None) -> PlainOutputs:
        """Compute B rows.

        Args:
            observation: of all rows.
            state: ``[B, state_size]``, 0 where an episode begins.
            reward: of the last action, ``[B]``, where the network reads it.
        """
        features = self._features(self._read(observation))
        inputs = np.zeros((len(state), 0))
        if self.cores:
            width = self._inputs_width
            state, inputs = np.split(state, [state.shape[1] - width], 1)
            if reward is not None:
                inputs = self._with_reward(inputs, np.where(state.any(1), reward, 0))
            read = self._as_read(inputs)
            parts = np.split(state, self.cores, 1)
            pairs = [
                self._core(b, np.concatenate([features[b], read], 1), part)
                for b, part in enumerate(parts)
            ]
            features = [h for h, _ in pairs]
            state = np.concatenate([part for _, part in pairs], 1)

        outputs, value = self._heads(features)
        if self.mask_leaf is not None:
            allowed = self.mask_leaf.values(observation).reshape(outputs.shape) != 0
            if "head.weight" in self.arrays:
                for choice in self._choices(allowed):
                    choice |= ~choice.any(1, keepdims=True)
            outputs = np.where(allowed, outputs, np.float32(FORBIDDEN))
        if "action" in self.model.get("core_inputs", []):
            encoded = self._encoded(outputs)
            inputs = np.concatenate([encoded, inputs[:, encoded.shape[1] :]], 1)
        if self.cores:
            state = np.concatenate([state, inputs], 1)
        return PlainOutputs(outputs, value, state)

    def _with_reward(self, inputs: Array, reward: Array) -> Array:
        """Returns the inputs of a core with the last rewards at their end."""
        clip = self.algo.get("reward_clip")
        if clip is not None:
            reward = np.clip(reward, -clip, clip)
        reward = reward * self.algo.get("reward_scale", 1.0)
        return np.concatenate([inputs[:, :-1], reward[:, None]], 1)

    def _as_read(self, inputs: Array) -> Array:
        """Returns the inputs of a core as it reads them, rewards compressed."""
        if "reward" not in self.model.get("core_inputs", []):
            return inputs
        reward = inputs[:, -1:]
        return np.concatenate([inputs[:, :-1], np.sign(reward) * np.log1p(np.abs(reward))], 1)

    def _encoded(self, outputs: Array) -> Array:
        """Returns the most probable actions as a core reads them."""
        if "Box" in self.action_space:
            mean = np.split(outputs, 2, 1)[0]
            return np.asarray(np.tanh(mean) if self.squashes else np.clip(mean, -1, 1))
        parts = self._choices(outputs)
        hot = [part.argmax(1)[:, None] == np.arange(part.shape[1]) for part in parts]
        return np.concatenate(hot, 1).astype(np.float32)

    def greedy(self, outputs: Array) -> Array:
        """Returns the most probable actions of B rows of outputs, as the environment gets them."""
        if "Box" in self.action_space:
            return self._played(outputs if self.is_deterministic else np.split(outputs, 2, 1)[0])
        return self._played(np.stack([part.argmax(1) for part in self._choices(outputs)], 1))

    def drawn(self, outputs: Array, noise: Array) -> tuple[Array, Array]:
        """Returns actions of an actor-critic or of SAC, and their log-probabilities ``[B]``.

        ``noise`` is ``[B, numbers]``, normal for a Box, uniform for each of several choices.
        """
        if "Box" in self.action_space:
            mean, log_std = np.split(outputs, 2, 1)
            number = mean + np.exp(log_std) * noise
            logp = (-0.5 * noise**2 - log_std - HALF_LOG_2PI).sum(1)
            if self.squashes:
                slope = 2 * (math.log(2) - number - np.log1p(np.exp(-2 * number)))
                logp -= slope.sum(1)
            return self._played(number), logp

        chosen = []
        logp = np.zeros(len(outputs))
        for part, uniform in zip(self._choices(outputs), noise.T, strict=True):
            share = np.exp(part - part.max(1, keepdims=True))
            share /= share.sum(1, keepdims=True)
            choice = (share.cumsum(1)[:, :-1] <= uniform[:, None]).sum(1)
            chosen.append(choice)
            logp += np.log(share[np.arange(len(part)), choice])
        return self._played(np.stack(chosen, 1)), logp

    @property
    def is_deterministic(self) -> bool:
        """Whether the outputs are numbers without deviations."""
        return bool(self.algo["name"] == "td3")

    @property
    def squashes(self) -> bool:
        """Whether numbers are kept within their bounds by tanh."""
        return "head.weight" in self.arrays or self.model["gaussian"] == "squashed"

    def _choices(self, outputs: Array) -> list[Array]:
        """Returns the outputs of each choice, ``[B, n, ...]``, as views."""
        return np.split(outputs, np.cumsum(self._counts())[:-1], 1)

    def _counts(self) -> list[int]:
        """Returns the number of actions of each choice."""
        kind, content = next(iter(self.action_space.items()))
        counts = np.full(content, 2) if kind == "MultiBinary" else np.ravel(content[0])
        return [int(count) for count in counts.ravel()]

    def _played(self, actions: Array) -> Array:
        """Returns actions ``[B, ...]`` as the environment gets them, of numbers or choices."""
        kind, content = next(iter(self.action_space.items()))
        if kind == "Box":
            low, high, shape, _ = content
            numbers = actions.reshape(-1, *shape)
            numbers = np.tanh(numbers) if self.squashes else np.clip(numbers, -1, 1)
            return np.asarray(low + (numbers + 1) * (np.asarray(high) - np.asarray(low)) / 2)
        if kind == "Discrete":
            return np.asarray(actions[:, 0] + content[1])
        if kind == "MultiBinary":
            return actions.reshape(-1, *np.full(content, 2).shape)
        return np.asarray(actions.reshape(-1, *np.shape(content[0])) + np.asarray(content[1]))

    def _read(self, observation: Any) -> list[Array]:
        """Returns the inputs ``[B, *shape]``, scaled or normalised, images with channels first."""
        large = [part for part in self.inputs if part.is_image and not part.is_small]
        normalized: list[PlainInput] = []
        if "normalizer.mean" in self.arrays:
            numbers = [part for part in self.inputs if not part.leaf.is_embedded]
            normalized = [part for part in numbers if part not in large] or large

        read = []
        first = 0
        for part in self.inputs:
            x = flat(part.leaf.values(observation)).astype(np.float32)
            if part in normalized:
                x = self._normalized(x, first, is_frame_of_bytes=part in large and part.is_bytes)
                first += x.shape[1]
            else:
                x = (x - np.float32(part.low)) / np.float32(part.span)

            x = x.reshape(-1, *part.shape)
            read.append(x.transpose(0, 3, 1, 2) if part.is_image and part.has_channels_last else x)
        return read

    def _normalized(self, x: Array, first: int, *, is_frame_of_bytes: bool) -> Array:
        """Returns x ``[B, size]`` by the statistics from number ``first`` on."""
        mean = self.arrays["normalizer.mean"][first : first + x.shape[1]]
        var = self.arrays["normalizer.var"][first : first + x.shape[1]]
        if not is_frame_of_bytes:
            return np.clip((x - mean) / np.sqrt(var + np.float32(EPSILON)), -CLIP, CLIP)

        has_seen = self.arrays["normalizer.count"][0] > 0
        divisor = var + np.float32(LEAST_BYTE_VARIANCE) if has_seen else np.float32(255**2)
        return np.clip((x - np.round(mean)) / np.sqrt(divisor), -CLIP, CLIP)

    def _features(self, inputs: list[Array]) -> list[Array]:
        """Returns the features of each body, or of each tower."""
        if "hidden.0.weight" in self.arrays:
            towers = len(self.arrays["hidden.0.weight"])
            return [self._tower(flat(inputs[0]), t) for t in range(towers)]
        if "convs.0.weight" in self.arrays:
            return [self._nature(inputs[0], "")]
        bodies = {name.split(".")[1] for name in self.arrays if name.startswith("bodies.")}
        return [self._body(inputs, f"bodies.{b}.") for b in sorted(bodies, key=int)]

    def _tower(self, x: Array, tower: int) -> Array:
        for layer in range(self._count("hidden.{}.weight")):
            weight = self.arrays[f"hidden.{layer}.weight"][tower]
            x = x @ weight + self.arrays[f"hidden.{layer}.bias"][tower]
            x = self._act(self._normalized_layer(x, f"hidden.{layer}", tower))
        return x

    def _body(self, inputs: list[Array], prefix: str) -> Array:
        large: list[Array] = []
        small: list[Array] = []
        numbers: list[Array] = []
        embedded: list[Array] = []
        arrays = 0
        for part, x in zip(self.inputs, inputs, strict=True):
            if part.leaf.is_embedded:
                for i, choice in enumerate(x.astype(int).T):
                    table = self.arrays[f"{prefix}embeddings.{arrays}.tables.{i}.weight"]
                    embedded.append(table[choice])
                arrays += 1
                continue
            if not part.is_image:
                numbers.append(flat(x))
                continue
            name = f"{prefix}images.{len(small) + len(large)}."
            if part.is_small:
                small.append(self._small(x, name))
            elif self.model["kind"] == "impala_cnn":
                large.append(self._impala(x, name))
            else:
                large.append(self._nature(x, name))

        if numbers or embedded or small:
            y = np.concatenate([*numbers, *embedded, *small], 1)
            for layer in range(self._count(prefix + "layers.linears.{}.weight")):
                y = self._act(self._linear(y, f"{prefix}layers.linears.{layer}"))
            large.append(y)
        return np.concatenate(large, 1)

    def _nature(self, x: Array, prefix: str) -> Array:
        for index, stride in enumerate((4, 2, 1)):
            x = relu(self._conv(x, f"{prefix}convs.{index}", stride, 0))
        return relu(self._linear(flat(x), f"{prefix}linear"))

    def _small(self, x: Array, prefix: str) -> Array:
        for index in range(self._count(prefix + "convs.{}.weight")):
            x = relu(self._conv(x, f"{prefix}convs.{index}", 2 if index else 1, 1))
        return flat(x)

    def _impala(self, x: Array, prefix: str) -> Array:
        for section in range(3):
            name = f"{prefix}sections.{section}."
            x = max_pool(self._conv(x, f"{name}conv", 1, 1))
            for block in ("blocks.0.", "blocks.1."):
                first = self._conv(relu(x), f"{name}{block}first", 1, 1)
                x = x + self._conv(relu(first), f"{name}{block}second", 1, 1)
        return relu(self._linear(flat(relu(x)), f"{prefix}linear"))

    def _core(self, body: int, x: Array, state: Array) -> tuple[Array, Array]:
        """Returns the features of one core, and its next state."""
        name = f"cores.{body}."
        if self.model["core"] == "lstm":
            h, c = np.split(state, 2, 1)
            products = self._linear(x, f"{name}input") + self._linear(h, f"{name}recurrent")
            gate = dict(zip(LSTM_GATES, np.split(products, 4, 1), strict=True))
            c = sigmoid(gate["f"]) * c + sigmoid(gate["i"]) * np.tanh(gate["g"])
            h = sigmoid(gate["o"]) * np.tanh(c)
            return h, np.concatenate([h, c], 1)

        of_x = dict(zip(GRU_GATES, np.split(self._linear(x, f"{name}input"), 3, 1), strict=True))
        products_of_h = np.split(self._linear(state, f"{name}recurrent"), 3, 1)
        of_h = dict(zip(GRU_GATES, products_of_h, strict=True))
        r = sigmoid(of_x["r"] + of_h["r"])
        z = sigmoid(of_x["z"] + of_h["z"])
        h = (1 - z) * np.tanh(of_x["n"] + r * of_h["n"]) + z * state
        return h, h

    def _heads(self, features: list[Array]) -> tuple[Array, Array | None]:
        """Returns what actions are decided by, and the value of an actor-critic."""
        if "policy.weight" in self.arrays:
            outputs = self._linear(features[0], "policy")
            if "log_std" in self.arrays:
                log_std = np.broadcast_to(self.arrays["log_std"], outputs.shape)
                outputs = np.concatenate([outputs, log_std], 1)
            return outputs, self._linear(features[-1], "value")[:, 0]

        x = features[0]
        if "halves.weight" in self.arrays:
            has_image = any(part.is_image for part in self.inputs)
            x = self._linear(x, "halves")
            x = relu(x) if has_image else self._act(x)
        if "value.weight" in self.arrays:
            of_value, of_advantage = np.split(x, 2, 1)
            value = self._linear(of_value, "value")
            advantage = self._linear(of_advantage, "head").reshape(len(x), -1, value.shape[1])
            parts = self._choices(advantage)
            centred = [part - part.mean(1, keepdims=True) for part in parts]
            return (value[:, None] + np.concatenate(centred, 1)).mean(2), None

        outputs = self._linear(x, "head")
        if "Box" not in self.action_space:
            actions = sum(self._counts())
            return outputs.reshape(len(x), actions, -1).mean(2), None
        if "Box" in self.action_space and not self.is_deterministic:
            mean, log_std = np.split(outputs, 2, 1)
            log_std = np.clip(log_std, self.algo["log_std_min"], self.algo["log_std_max"])
            outputs = np.concatenate([mean, log_std], 1)
        return outputs, None

    def _linear(self, x: Array, name: str) -> Array:
        y = np.asarray(x @ self.arrays[f"{name}.weight"].T + self.arrays[f"{name}.bias"])
        return self._normalized_layer(y, name)

    def _normalized_layer(self, y: Array, name: str, tower: int | None = None) -> Array:
        """Returns the outputs ``[B, units]`` or ``[B, channels, h, w]`` of a layer as they go on.

        They are normalised if the layer has a gain and a bias for that.
        """
        if f"{name}.norm.weight" not in self.arrays:
            return y
        gain = self.arrays[f"{name}.norm.weight"]
        bias = self.arrays[f"{name}.norm.bias"]
        if tower is not None:
            gain = gain[tower]
            bias = bias[tower]

        axes = tuple(range(1, y.ndim))
        per_channel = (-1, *(1 for _ in axes[1:]))
        deviation = np.sqrt(y.var(axes, keepdims=True) + np.float32(NORM_EPSILON))
        centred = (y - y.mean(axes, keepdims=True)) / deviation
        return np.asarray(centred * gain.reshape(per_channel) + bias.reshape(per_channel))

    def _conv(self, x: Array, name: str, stride: int, pad: int) -> Array:
        weight = self.arrays[f"{name}.weight"]
        windows = windows_of(x, weight.shape[2], stride, pad, 0.0)
        y = np.einsum("bcijuv,ocuv->boij", windows, weight)
        y = np.asarray(y + self.arrays[f"{name}.bias"][:, None, None])
        return self._normalized_layer(y, name)

    def _act(self, x: Array) -> Array:
        return np.tanh(x) if self.model["activation"] == "tanh" else relu(x)

    def _count(self, name: str) -> int:
        """Returns how many arrays have this name with a number counted from 0."""
        count = 0
        while name.format(count) in self.arrays:
            count += 1
        return count


def max_pool(x: Array) -> Array:
    """Returns the largest of 3 x 3 pixels, of every second one."""
    return np.asarray(windows_of(x, 3, 2, 1, -np.inf).max((4, 5)))


def windows_of(x: Array, size: int, stride: int, pad: int, outside: float) -> Array:
    """Returns ``[B, C, i, j, u, v]``: the pixels of each place of a window, within an edge."""
    x = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=outside)
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))
    return windows[:, :, ::stride, ::stride]


def flat(x: Array) -> Array:
    """Returns rows ``[B, size]``."""
    return x.reshape(len(x), -1)


def relu(x: Array) -> Array:
    """Returns x, or 0 where it is negative."""
    return np.maximum(x, 0)


def sigmoid(x: Array) -> Array:
    """Returns the logistic function."""
    with np.errstate(over="ignore"):  # It is 0 there.
        return np.asarray(1 / (1 + np.exp(-x)))

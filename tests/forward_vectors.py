"""The test vectors of docs/forward-pass.md: the networks, the rules, and the blocks of the page.

python tests/forward_vectors.py     writes the blocks anew, from exported programs
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.algos.samples import has_small_images, network_shape, scales
from penstock.configs.for_actors import for_actors
from penstock.configs.schema import Config
from penstock.core.params import Float32
from penstock.envs import EnvInfo
from penstock.envs.space_json import brief_spaces

PAGE = Path(__file__).parents[1] / "docs" / "forward-pass.md"
DEFAULTS = {
    "activation": "tanh",
    "kind": "auto",
    "core": "none",
    "normalize_observations": False,
    "gaussian": "clipped",
}
"""The options of `config.model` that a block names only where they differ."""
READ = (*DEFAULTS, "scale", "filters")
LINE = 118

Array = npt.NDArray[Any]
Vector = dict[str, Any]
"""A block of the page: config, spaces, layout and outputs of one network."""


def box(low: float, high: float, *shape: int, dtype: Any = np.float32) -> spaces.Box:
    """Returns a Box with equal bounds of all values."""
    return spaces.Box(low, high, shape, dtype)


@dataclass(frozen=True)
class Network:
    """One network of the page."""

    algo: dict[str, Any]
    observation: spaces.Space[Any]
    action: spaces.Space[Any]
    model: dict[str, Any] = field(default_factory=dict)
    divisor: int = 60
    """Divisor of its weights; larger for many inputs, so that outputs are about 1."""

    @property
    def config(self) -> Config:
        sections = {"env": {"id": "Test-v0"}, "algo": self.algo, "model": self.model}
        return Config.model_validate(sections)

    @property
    def info(self) -> EnvInfo:
        return EnvInfo.of_spaces("Test-v0", (self.observation, self.action), 1, "")

    @property
    def rows(self) -> int:
        """Observations in its vector; with memory one of them begins an episode in between."""
        return 3 if "core" in self.model else 2

    def welcome(self) -> Vector:
        """Returns what a WELCOME says of it, of the config what the page's formulas need."""
        config, info = self.config, self.info
        sent = for_actors(
            config, bool(scales(config, info)), filtered=has_small_images(config, info)
        )
        model = {
            key: sent["model"][key]
            for key in READ
            if key in sent["model"] and sent["model"][key] != DEFAULTS.get(key)
        }
        algo = {key: sent["algo"][key] for key in sent["algo"] if key in ("name", *self.algo)}
        algo.pop("duelling", None)
        return {
            "config": {"algo": algo, "model": model},
            "divisor": self.divisor,
            "spaces": brief_spaces(self.observation, self.action),
            "layout": network_shape(config, info).layout.to_list(),
        }


PPO = {"name": "ppo"}
DUELLING = {"name": "dqn", "duelling": True}
SCREEN = box(0, 255, 1, 36, 36, dtype=np.uint8)
THREE = spaces.Discrete(3)
PADDLES = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))

NETWORKS = {
    "mlp": Network(PPO, box(-2, 2, 3), spaces.Discrete(3, start=1), {"hidden": [5, 4]}),
    "normalized_mlp": Network(
        PPO,
        box(-20, 20, 3),
        PADDLES,
        {
            "hidden": [4],
            "activation": "relu",
            "normalize_observations": True,
            "gaussian": "squashed",
        },
    ),
    "nature_cnn": Network(PPO, SCREEN, THREE, divisor=500),
    "small_cnn": Network(
        PPO, box(0, 3, 6, 5, 2, dtype=np.uint8), THREE, {"filters": [3, 4], "hidden": [5]}
    ),
    "impala_cnn": Network(PPO, box(2, 5, 9, 10, 3), THREE, {"kind": "impala_cnn"}, divisor=500),
    "parts": Network(
        PPO,
        spaces.Dict(
            {
                "speed": box(-2, 2, 2, 2),
                "action_mask": spaces.MultiBinary(5),
                "screen": box(0, 255, 40, 36, 3, dtype=np.uint8),
                "board": box(0, 2, 5, 5, dtype=np.uint8),
                "held": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 3])]),
            }
        ),
        spaces.MultiDiscrete([2, 3]),
        {
            "hidden": [6],
            "filters": [3],
            "normalize_observations": True,
            "critic": "separate",
        },
        divisor=500,
    ),
    "lstm": Network(
        PPO,
        box(-2, 2, 3),
        PADDLES,
        {"hidden": [4], "core": "lstm", "core_size": 3, "critic": "separate"},
    ),
    "gru": Network(PPO, spaces.Discrete(4), THREE, {"hidden": [4], "core": "gru", "core_size": 3}),
    "dqn": Network(DUELLING, box(-2, 2, 3), THREE, {"hidden": [5, 4]}),
    "dqn_cnn": Network(DUELLING, SCREEN, THREE, {"normalize_observations": True}, divisor=500),
    "dqn_parts": Network(
        DUELLING,
        spaces.Dict(
            {
                "board": box(0, 1, 3, 5, 5),
                "speed": box(-2, 2, 2),
                "action_mask": spaces.MultiBinary(4),
            }
        ),
        spaces.Discrete(4),
        {"filters": [3], "hidden": [4]},
    ),
    "sac": Network(
        {"name": "sac", "log_std_min": -0.05, "log_std_max": 0.05},
        box(-2, 2, 3),
        PADDLES,
        {"hidden": [5, 4]},
    ),
}


def weights_by_rule(layout: list[tuple[str, list[int]]], divisor: int) -> Float32:
    """Returns the flat vector of the page's rule."""
    sizes = [int(np.prod(shape)) for _, shape in layout]
    u = (np.arange(sum(sizes)) * 37) % 101 - 50
    weights = u / divisor
    for (name, _), (first, end) in zip(layout, pairwise(np.cumsum([0, *sizes])), strict=True):
        if name == "normalizer.mean":
            weights[first:end] = u[first:end] / 25
        if name == "normalizer.var":
            weights[first:end] = (u[first:end] / 20) ** 2
        if name == "normalizer.count":
            weights[first:end] = 1
    return weights.astype(np.float32)


def observations_by_rule(space: dict[str, Any], rows: int, name: str = "") -> Any:
    """Returns observations ``[rows, ...]`` of a space of the WELCOME, by the page's rule."""
    kind, content = next(iter(space.items()))
    if kind == "Dict":
        return {key: observations_by_rule(inner, rows, key) for key, inner in content}
    if kind == "Tuple":
        return tuple(observations_by_rule(inner, rows) for inner in content)

    shape: tuple[int, ...] = ()
    match kind:
        case "Box":
            shape = tuple(content[2])
        case "MultiDiscrete":
            shape = np.shape(content[0])
        case "MultiBinary":
            shape = (content,) if isinstance(content, int) else tuple(content)
    size = int(np.prod(shape))
    j = (np.arange(size) + 7 * np.arange(rows)[:, None]).reshape(rows, *shape)

    match kind:
        case "Box":
            low, high, _, dtype = content
            if np.dtype(dtype).kind == "f":
                return (low + (high - low) * ((j * 53) % 97) / 96).astype(dtype)
            return (low + (j * 53) % (high - low + 1)).astype(dtype)
        case "Discrete":
            return content[1] + j % content[0]
        case "MultiDiscrete":
            return np.asarray(content[1]) + j % np.asarray(content[0])
    return (j % 3 != 1).astype(np.int8)


def blocks() -> Iterator[tuple[str, Vector]]:
    """Yield the name and the content of each vector of the page."""
    pattern = re.compile(r"<!-- vector (\w+) -->\n\n```json\n(.*?)```", re.DOTALL)
    for name, text in pattern.findall(PAGE.read_text(encoding="utf-8")):
        yield name, json.loads(text)


def as_block(vector: Vector) -> str:
    """Returns the text of a block, with long values on several lines."""
    lines = [f'"{key}": {_wrapped(value, indent=2)}' for key, value in vector.items()]
    return "```json\n{\n  " + ",\n  ".join(lines) + "\n}\n```"


def _wrapped(value: Any, indent: int) -> str:
    """Returns JSON; what does not fit on a line has as many entries on each as fit."""
    text = json.dumps(value)
    if len(text) + indent <= LINE or not isinstance(value, list | dict):
        return text

    inner = indent + 2
    if isinstance(value, dict):
        entries = [f'"{key}": {_wrapped(entry, inner)}' for key, entry in value.items()]
        brackets = "{}"
    else:
        entries = [_wrapped(entry, inner) for entry in value]
        brackets = "[]"

    lines = [entries[0]]
    for entry in entries[1:]:
        if len(lines[-1]) + len(entry) + inner < LINE:
            lines[-1] += f", {entry}"
        else:
            lines.append(entry)
    separator = ",\n" + " " * inner
    return brackets[0] + "\n" + " " * inner + separator.join(lines) + brackets[1]


def rounded(values: Array) -> Any:
    """Returns an array as nested lists, numbers with six digits."""
    if values.dtype.kind == "i":
        return values.tolist()
    digits = [float(f"{value:.6g}") for value in np.ravel(values)]
    return np.reshape(digits, np.shape(values)).tolist()

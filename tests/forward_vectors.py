"""The test vectors of docs/forward-pass.md: the networks, the rules, and the blocks of the page.

python tests/forward_vectors.py     writes the blocks anew, from exported programs
"""

from __future__ import annotations

import json
import re
import tempfile
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
from penstock.envs.packing import leaves_of, value_at
from penstock.envs.space_json import brief_spaces
from penstock.evaluation import onnx_export
from penstock.evaluation.exported import Exported

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
class PageNetwork:
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
    "mlp": PageNetwork(PPO, box(-2, 2, 3), spaces.Discrete(3, start=1), {"hidden": [5, 4]}),
    "normalized_mlp": PageNetwork(
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
    "nature_cnn": PageNetwork(PPO, SCREEN, THREE, divisor=500),
    "small_cnn": PageNetwork(
        PPO, box(0, 3, 6, 5, 2, dtype=np.uint8), THREE, {"filters": [3, 4], "hidden": [5]}
    ),
    "impala_cnn": PageNetwork(PPO, box(2, 5, 9, 10, 3), THREE, {"kind": "impala_cnn"}, divisor=500),
    "parts": PageNetwork(
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
    "lstm": PageNetwork(
        PPO,
        box(-2, 2, 3),
        PADDLES,
        {"hidden": [4], "core": "lstm", "core_size": 3, "critic": "separate"},
    ),
    "gru": PageNetwork(
        PPO, spaces.Discrete(4), THREE, {"hidden": [4], "core": "gru", "core_size": 3}
    ),
    "dqn": PageNetwork(DUELLING, box(-2, 2, 3), THREE, {"hidden": [5, 4]}),
    "dqn_cnn": PageNetwork(DUELLING, SCREEN, THREE, {"normalize_observations": True}, divisor=500),
    "dqn_parts": PageNetwork(
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
    "sac": PageNetwork(
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


def noise_by_rule(action_space: dict[str, Any], rows: int) -> Float32:
    """Returns the noise of actions ``[rows, numbers]``, by the page's rule.

    Numbers of a Box are of the normal distribution, one for each choice is uniform.
    """
    kind, content = next(iter(action_space.items()))
    size = 1
    if kind == "Box":
        size = int(np.prod(content[2]))
    elif kind == "MultiDiscrete":
        size = np.size(content[0])
    j = np.arange(size) + 7 * np.arange(rows)[:, None]
    number = (j * 29) % 31
    noise = (number - 15) / 8 if kind == "Box" else number / 31
    return noise.astype(np.float32)


def forgets_before(row: int) -> bool:
    """Returns whether the state of a network with memory is zero before a row."""
    return row in (0, 2)


def program_outputs(network: PageNetwork) -> dict[str, Array]:
    """Returns what ONNX Runtime computes of the rows of a network's vector.

    The program is exported of other weights than those that it is fed with.
    """
    import onnxruntime

    welcome = network.welcome()
    weights = weights_by_rule(welcome["layout"], network.divisor)
    policy = Exported(
        network.config, (network.observation, network.action), network.info, 0 * weights, play=None
    )
    is_drawn = network.algo["name"] != "dqn"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "actor.onnx"
        written = onnx_export.write(path, policy, sampled=is_drawn, program=True)
        session = onnxruntime.InferenceSession(path.read_bytes())

    # Names of inputs are those of the parts, as none of these networks has a part of another name.
    observations = observations_by_rule(welcome["spaces"][0], network.rows)
    feed: dict[str, Array] = {"weights": weights}
    for keys, _ in leaves_of(network.observation):
        feed[".".join(map(str, keys)) or "obs"] = value_at(keys, observations)
    if is_drawn:
        feed["noise"] = noise_by_rule(welcome["spaces"][1], network.rows)
    names = [array.name for array in written.outputs]
    dtypes = {array.name: array.dtype for array in written.inputs}
    feed = {name: array.astype(dtypes[name]) for name, array in feed.items()}

    if "core" not in network.model:
        return dict(zip(names, session.run(names, feed), strict=True))
    steps = []
    (state_shape,) = (array.shape for array in written.inputs if array.name == "state")
    state = np.zeros((1, *state_shape), np.float32)
    for row in range(network.rows):
        if forgets_before(row):
            state = np.zeros_like(state)
        row_feed = {
            name: array if name == "weights" else array[row : row + 1]
            for name, array in feed.items()
        }
        step = dict(zip(names, session.run(names, row_feed | {"state": state}), strict=True))
        state = step["state_out"]
        steps.append(step)
    joined = {name: np.concatenate([step[name] for step in steps]) for name in names}
    return joined | {"state_out": state}


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


def write_page() -> None:
    """Write the vectors into the page, from exported programs."""
    text = PAGE.read_text(encoding="utf-8")
    for name, network in NETWORKS.items():
        outputs = program_outputs(network)
        vector = network.welcome() | {key: rounded(values) for key, values in outputs.items()}
        before, marker, after = text.partition(f"<!-- vector {name} -->\n")
        assert marker, name
        rest = re.sub(r"\A\n```json\n.*?```\n", "", after, flags=re.DOTALL)
        text = f"{before}{marker}\n{as_block(vector)}\n{rest}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_page()

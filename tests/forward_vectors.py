"""The test vectors of docs/forward-pass.md: the networks, the rules, and the blocks of the page.

python tests/forward_vectors.py     writes the blocks anew, from exported programs
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from onnx_cells import Cell, feeds_of, written
from penstock.algos.samples import has_small_images, network_shape, scales
from penstock.configs.for_actors import for_actors
from penstock.core.params import Float32
from penstock.envs.space_json import brief_spaces

PAGE = Path(__file__).parents[1] / "docs" / "forward-pass.md"
DEFAULTS = {
    "activation": "tanh",
    "kind": "auto",
    "core": "none",
    "core_inputs": [],
    "normalize_observations": False,
    "gaussian": "clipped",
    "layer_norm": False,
}
"""The options of `config.model` that a block names only where they differ."""
SOMETIMES = ("scale", "filters")
"""Those that a WELCOME has where they have an effect."""
ALGO = ("name", "log_std_min", "log_std_max")
REWARDS = ("reward_clip", "reward_scale")
"""Those of `config.algo` that a core which reads rewards needs."""
LINE = 118

Array = npt.NDArray[Any]
Vector = dict[str, Any]
"""A block of the page: config, spaces, layout and outputs of one network."""


def box(low: float, high: float, *shape: int, dtype: Any = np.float32) -> spaces.Box:
    """Returns a Box with equal bounds of all values."""
    return spaces.Box(low, high, shape, dtype)


DUELLING = {"name": "dqn", "duelling": True}
SCREEN = box(0, 255, 1, 36, 36, dtype=np.uint8)
THREE = spaces.Discrete(3)
PADDLES = spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32))

NETWORKS = {
    "mlp": Cell(box(-2, 2, 3), spaces.Discrete(3, start=1), {"hidden": [5, 4]}),
    "normalized_mlp": Cell(
        box(-20, 20, 3),
        PADDLES,
        {
            "hidden": [4],
            "activation": "relu",
            "normalize_observations": True,
            "gaussian": "squashed",
        },
    ),
    "nature_cnn": Cell(SCREEN, THREE),
    "small_cnn": Cell(
        box(0, 3, 6, 5, 2, dtype=np.uint8), THREE, {"filters": [3, 4], "hidden": [5]}
    ),
    "impala_cnn": Cell(box(2, 5, 9, 10, 3), THREE, {"kind": "impala_cnn"}),
    "parts": Cell(
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
        {"hidden": [6], "filters": [3], "normalize_observations": True, "critic": "separate"},
    ),
    "layer_norm": Cell(box(-2, 2, 3), THREE, {"hidden": [5, 4], "layer_norm": True}),
    "layer_norm_parts": Cell(
        spaces.Dict({"board": box(0, 1, 3, 5, 5), "speed": box(-2, 2, 2)}),
        THREE,
        {"filters": [3], "hidden": [4], "layer_norm": True},
    ),
    "embeddings": Cell(
        spaces.Dict({"item": spaces.Discrete(1500, start=1), "speed": box(-2, 2, 2)}),
        THREE,
        {"hidden": [4], "critic": "shared"},
    ),
    "lstm": Cell(
        box(-2, 2, 3),
        PADDLES,
        {"hidden": [4], "core": "lstm", "core_size": 3, "critic": "separate"},
    ),
    "gru": Cell(spaces.Discrete(4), THREE, {"hidden": [4], "core": "gru", "core_size": 3}),
    "core_inputs": Cell(
        box(-2, 2, 3),
        spaces.MultiDiscrete([2, 3]),
        {"hidden": [4], "core": "gru", "core_size": 3, "core_inputs": ["action", "reward"]},
        {"name": "ppo", "reward_clip": 1.0, "reward_scale": 0.5},
    ),
    "dqn": Cell(box(-2, 2, 3), THREE, {"hidden": [5, 4]}, DUELLING),
    "dqn_cnn": Cell(SCREEN, THREE, {"normalize_observations": True}, DUELLING),
    "dqn_parts": Cell(
        spaces.Dict(
            {
                "board": box(0, 1, 3, 5, 5),
                "speed": box(-2, 2, 2),
                "action_mask": spaces.MultiBinary(4),
            }
        ),
        spaces.Discrete(4),
        {"filters": [3], "hidden": [4]},
        DUELLING,
    ),
    "r2d2": Cell(
        box(-2, 2, 3), THREE, {"hidden": [4], "core": "gru", "core_size": 3}, {"name": "r2d2"}
    ),
    "rainbow": Cell(
        spaces.Dict({"speed": box(-2, 2, 2), "action_mask": spaces.MultiBinary(5)}),
        spaces.MultiDiscrete([2, 3]),
        {"hidden": [3]},
        {**DUELLING, "quantiles": 2, "noisy": True, "epsilon": {"from": 1, "to": 0}},
    ),
    "sac": Cell(
        box(-2, 2, 3),
        PADDLES,
        {"hidden": [5, 4]},
        {"name": "sac", "log_std_min": -0.05, "log_std_max": 0.05},
    ),
}


def welcome_of(cell: Cell) -> Vector:
    """Returns what a WELCOME says of a network, of the config what the page's formulas need."""
    config = cell.config
    info = cell.policy().info
    sent = for_actors(
        config,
        scaled=bool(scales(config, info)),
        filtered=has_small_images(config, info),
        embedded=any(part.choices for part in info.parts),
    )
    options = (*ALGO, *REWARDS) if config.model.core_inputs else ALGO
    welcome: Vector = {
        "config": {
            "algo": {key: sent["algo"][key] for key in options if key in sent["algo"]},
            "model": {
                key: sent["model"][key]
                for key in (*DEFAULTS, *SOMETIMES)
                if key in sent["model"] and sent["model"][key] != DEFAULTS.get(key)
            },
        },
        "spaces": brief_spaces(*info.spaces),
        "layout": network_shape(config, info).layout.to_list(),
    }
    if "embed_above" in sent["env"]:
        welcome["config"]["env"] = {"embed_above": sent["env"]["embed_above"]}
    loaded: Vector = json.loads(json.dumps(welcome))
    return loaded


def divisor_of(layout: list[tuple[str, list[int]]]) -> int:
    """Returns the divisor of weights; larger ones have more inputs, and all outputs are near 1."""
    return 60 if sum(math.prod(shape) for _, shape in layout) < 1000 else 500


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


def observations_by_rule(space: dict[str, Any], rows: int) -> Any:
    """Returns observations ``[rows, ...]`` of a space of the WELCOME, by the page's rule."""
    kind, content = next(iter(space.items()))
    if kind == "Dict":
        return {key: observations_by_rule(inner, rows) for key, inner in content}
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
            return (content[1] + j % content[0]).astype(np.int64)
        case "MultiDiscrete":
            return (np.asarray(content[1]) + j % np.asarray(content[0])).astype(content[2])
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


def reward_by_rule(row: int) -> float:
    """Returns what the action before a row was paid, by the page's rule."""
    return ((row * 29) % 31 - 15) / 8


def forgets_before(row: int) -> bool:
    """Returns whether the state of a network with memory is zero before a row."""
    return row in (0, 2)


def program_outputs(cell: Cell) -> dict[str, Array]:
    """Returns what ONNX Runtime computes of the rows of a network's vector.

    The program is exported of other weights than those that it is fed with.
    """
    welcome = welcome_of(cell)
    is_drawn = cell.algo["name"] not in ("dqn", "r2d2")
    with tempfile.TemporaryDirectory() as folder:
        graph = written(cell.policy(), Path(folder), sampled=is_drawn, program=True)

    rows = 3 if "core" in cell.model else 2
    observations = observations_by_rule(welcome["spaces"][0], rows)
    feeds = feeds_of(graph, cell.observation_space, observations)
    if is_drawn:
        feeds["noise"] = noise_by_rule(welcome["spaces"][1], rows)
    weights = weights_by_rule(welcome["layout"], divisor_of(welcome["layout"]))
    if not graph.about["state_size"]:
        return graph.step(feeds | {"weights": weights})

    steps = []
    state = np.zeros((1, graph.about["state_size"]), np.float32)
    for row in range(rows):
        if forgets_before(row):
            state = np.zeros_like(state)
        row_feeds = {name: array[row : row + 1] for name, array in feeds.items()}
        if any(entry["name"] == "reward" for entry in graph.about["inputs"]):
            row_feeds["reward"] = np.array([reward_by_rule(row)], np.float32)
        step = graph.step(row_feeds | {"weights": weights, "state": state})
        state = step["state_out"]
        steps.append(step)
    joined = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    joined.pop("sampled_state_out", None)  # as state_out, with another action
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


def vector_of(cell: Cell) -> Vector:
    """Returns the vector of a network, from its exported program."""
    welcome = welcome_of(cell)
    return {
        "config": welcome["config"],
        "divisor": divisor_of(welcome["layout"]),
        "spaces": welcome["spaces"],
        "layout": welcome["layout"],
        **{key: rounded(values) for key, values in program_outputs(cell).items()},
    }


def write_page() -> None:
    """Write the vectors into the page."""
    vectors = {name: vector_of(cell) for name, cell in NETWORKS.items()}
    text = PAGE.read_text(encoding="utf-8")
    for name, vector in vectors.items():
        before, marker, after = text.partition(f"<!-- vector {name} -->\n")
        assert marker, name
        rest = re.sub(r"\A\n```json\n.*?```\n", "", after, flags=re.DOTALL)
        text = f"{before}{marker}\n{as_block(vector)}\n{rest}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_page()

"""docs/forward-pass.md: its numbers, by its text alone and by our own actors.

`plain_forward` is the page in numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces

import plain_forward
from forward_vectors import (
    DEFAULTS,
    NETWORKS,
    Vector,
    blocks,
    box,
    forgets_before,
    noise_by_rule,
    observations_by_rule,
    program_outputs,
    reward_by_rule,
    weights_by_rule,
    welcome_of,
)
from onnx_cells import Cell, Reference, every_cell, observations_of
from plain_forward import PlainNetwork

Array = npt.NDArray[Any]

VECTORS = dict(blocks())
FAST = ("normalized_mlp", "lstm")
"""Networks of which `make test` exports a program, which takes seconds."""


def test_every_network_of_the_page_has_a_vector() -> None:
    assert list(VECTORS) == list(NETWORKS)


@pytest.mark.parametrize("name", NETWORKS)
def test_vector_describes_the_network_of_this_release(name: str) -> None:
    welcome = welcome_of(NETWORKS[name])
    assert {key: VECTORS[name][key] for key in welcome} == welcome


def played_plainly(vector: Vector) -> dict[str, Array]:
    """Returns the outputs of a vector's rows by the page's text."""
    model = DEFAULTS | vector["config"]["model"]
    config = vector["config"] | {"model": model}
    flat = weights_by_rule(vector["layout"], vector["divisor"])
    network = PlainNetwork(config, vector["spaces"], vector["layout"], flat)

    rows = len(vector["action"])
    observations = observations_by_rule(vector["spaces"][0], rows)
    noise = noise_by_rule(vector["spaces"][1], rows)
    if not network.state_size:
        return outputs_of(network, network(observations, np.zeros((rows, 0))), noise)

    # The rows are steps of one environment.
    steps = []
    state = np.zeros((1, network.state_size), np.float32)
    for row in range(rows):
        if forgets_before(row):
            state = np.zeros_like(state)
        reward = np.array([reward_by_rule(row)])
        reads_reward = "reward" in model["core_inputs"]
        computed = network(observations[row : row + 1], state, reward if reads_reward else None)
        state = computed.state
        steps.append(outputs_of(network, computed, noise[row : row + 1]))
    joined = {key: np.concatenate([step[key] for step in steps]) for key in steps[0]}
    return joined | {"state_out": state}


def outputs_of(
    network: PlainNetwork, computed: plain_forward.PlainOutputs, noise: Array | None
) -> dict[str, Array]:
    """Returns outputs by the names of the page; without noise no action is drawn."""
    decided_by = computed.decided_by
    outputs = {"action": network.greedy(decided_by)}
    if computed.value is not None:
        outputs["value"] = computed.value

    if "Box" in network.action_space and network.is_deterministic:
        return outputs | {"mean": decided_by}
    if "Box" in network.action_space:
        outputs["mean"], outputs["log_std"] = np.split(decided_by, 2, 1)
    elif computed.value is None:
        return outputs | {"q": decided_by}
    else:
        outputs["logits"] = decided_by
    if noise is not None:
        outputs["sampled_action"], outputs["log_prob"] = network.drawn(decided_by, noise)
    return outputs


def differing(vector: Vector, outputs: dict[str, Array]) -> list[str]:
    """Returns the outputs that are not those of the page."""
    return [
        key
        for key, values in outputs.items()
        if not np.allclose(np.reshape(values, np.shape(vector[key])), vector[key], 1e-5, 1e-5)
    ]


@pytest.mark.parametrize("name", NETWORKS)
def test_page_in_numpy_computes_its_vector(name: str) -> None:
    vector = VECTORS[name]
    outputs = played_plainly(vector)
    assert vector.keys() == {"config", "divisor", "spaces", "layout", *outputs}
    assert differing(vector, outputs) == []


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS],
)
def test_exported_program_computes_the_vector_of_the_page(name: str) -> None:
    outputs = program_outputs(NETWORKS[name])
    assert differing(VECTORS[name], outputs) == []


@pytest.mark.parametrize(
    ("constant", "value", "name"),
    [
        ("CLIP", np.inf, "normalized_mlp"),
        ("CLIP", np.inf, "dqn_cnn"),
        ("CLIP", 9.9, "parts"),
        ("EPSILON", 1e-3, "normalized_mlp"),
        ("LEAST_BYTE_VARIANCE", 15.0, "dqn_cnn"),
        ("FORBIDDEN", 0.0, "parts"),
        ("FORBIDDEN", 0.0, "dqn_parts"),
        ("HALF_LOG_2PI", 0.0, "lstm"),
        ("HALF_LOG_2PI", 0.0, "sac"),
        ("NORM_EPSILON", 1e-2, "layer_norm"),
        ("LSTM_GATES", "figo", "lstm"),
        ("LSTM_GATES", "igfo", "lstm"),
        ("LSTM_GATES", "ifog", "lstm"),
        ("GRU_GATES", "zrn", "gru"),
        ("GRU_GATES", "rnz", "gru"),
    ],
)
def test_a_mutation_of_the_page_is_seen(
    monkeypatch: pytest.MonkeyPatch, constant: str, value: Any, name: str
) -> None:
    monkeypatch.setattr(plain_forward, constant, value)
    assert differing(VECTORS[name], played_plainly(VECTORS[name]))


# ------------------------------------------------------------------ networks beyond the vectors

THREE = spaces.Discrete(3)
PAIR = spaces.MultiDiscrete([2, 3])
SWITCHES = spaces.MultiBinary(4)
STARTS = spaces.MultiDiscrete(np.array([[2, 3], [4, 2]]), start=np.array([[1, 1], [0, 0]]))
NUMBERS = box(-2, 2, 2)
BYTES = np.uint8
DUELLING = {"name": "dqn", "duelling": True}
NORMALIZED = {"normalize_observations": True}
MIXED = spaces.Dict(
    {
        "board": box(0, 3, 6, 6, dtype=BYTES),
        "screen": box(0, 255, 40, 38, 3, dtype=BYTES),
        "speed": box(-1, 1, 2, 2),
        "flags": box(0, 1, 3, dtype=np.bool_),
        "action_mask": spaces.MultiBinary(5),
        "suit": spaces.Discrete(4, start=2),
        "dice": spaces.MultiDiscrete([2, 3]),
        "deep": spaces.Tuple([box(-1, 5, 1, 7, 7), spaces.MultiBinary(2)]),
    }
)
SCREENS = spaces.Dict({"a": box(0, 255, 40, 40, dtype=BYTES), "b": box(0, 9, 2, 40, 40)})
CELLS = every_cell()

# How an array is read depends on its shape, its dtype and its bounds.
OTHERS = {
    "bytes by bounds": Cell(box(0, 200, 3, dtype=BYTES), THREE),
    "bytes": Cell(box(0, 200, 3, dtype=BYTES), THREE, {"scale": "bytes"}),
    "a single number": Cell(box(-1, 1), THREE, {"critic": "shared"}),
    "normalised floats": Cell(box(-1, 3, 2, 36, 40), THREE, NORMALIZED),
    "floats above 0": Cell(box(2, 3, 2, 36, 40), NUMBERS),
    "channels last": Cell(box(2, 3, 36, 40, 2), THREE, {"kind": "impala_cnn", "core": "gru"}),
    "without filters": Cell(box(0, 255, 6, 5, 2, dtype=BYTES), THREE, {"filters": []}),
    "whole numbers": Cell(box(0, 1, 3, 6, 6, dtype=np.int64), THREE, NORMALIZED),
    "a square": Cell(box(-1, 1, 6, 6), THREE, {"filters": [3, 4, 5]}),
    "a large square": Cell(box(-1, 1, 40, 41), THREE),
    "a flat picture": Cell(box(0, 2, 40, 41), THREE, {"kind": "mlp"}),
    "a large small one": Cell(
        box(0, 2, 40, 41, 2), THREE, {"kind": "small_cnn", "filters": [3, 2]}
    ),
    "mixed": Cell(MIXED, PAIR, {"core": "gru", "critic": "separate"}),
    "mixed, flat": Cell(MIXED, PAIR, {**NORMALIZED, "kind": "mlp"}),
    "mixed, impala": Cell(MIXED, PAIR, {"kind": "impala_cnn"}),
    "mixed, bytes": Cell(MIXED, PAIR, {"kind": "nature_cnn", "scale": "bytes"}),
    "two screens": Cell(SCREENS, THREE, NORMALIZED),
    "switches": Cell(spaces.MultiDiscrete([2, 3]), SWITCHES),
    "choices with starts": Cell(SWITCHES, STARTS),
    "a board with halves": Cell(box(0, 9, 5, 5, dtype=np.int32), THREE, algo=DUELLING),
    "layer normalisation of one head": Cell(
        box(-2, 2, 3), THREE, {"layer_norm": True, "activation": "relu"}, DUELLING
    ),
    "layer normalisation of sac": Cell(
        box(-2, 2, 3), NUMBERS, {"layer_norm": True}, {"name": "sac"}
    ),
    "layer normalisation with halves": Cell(
        box(0, 9, 5, 5, dtype=np.int32), THREE, {"layer_norm": True}, DUELLING
    ),
    "layer normalisation of frames": Cell(
        box(0, 255, 1, 36, 36, dtype=BYTES), THREE, {"layer_norm": True}, DUELLING
    ),
    "layer normalisation of an impala_cnn": Cell(
        box(0, 255, 9, 10, 3, dtype=BYTES), THREE, {"kind": "impala_cnn", "layer_norm": True}
    ),
    "layer normalisation beside a mask": Cell(
        spaces.Dict({"action_mask": spaces.MultiBinary(3), "hand": box(-1, 1, 4)}),
        THREE,
        {"layer_norm": True},
    ),
    "td3": Cell(box(-2, 2, 3), NUMBERS, {"hidden": [5, 4]}, {"name": "td3"}),
    "sac with a camera": Cell(
        box(0, 255, 36, 36, 3, dtype=BYTES), NUMBERS, {"hidden": [4]}, {"name": "sac"}
    ),
}
FEW = [*CELLS][::9]


@pytest.mark.parametrize(
    "name",
    [
        *OTHERS,
        *FEW,
        *(pytest.param(name, marks=pytest.mark.slow) for name in CELLS if name not in FEW),
    ],
)
def test_page_in_numpy_computes_what_actors_compute(name: str) -> None:
    """Random weights and observations, and three steps where there is memory."""
    rows = 3
    cell = (OTHERS | CELLS)[name]
    policy = cell.policy()
    reference = Reference(policy, rows)
    welcome = welcome_of(cell)
    model = DEFAULTS | welcome["config"]["model"]
    network = PlainNetwork(
        welcome["config"] | {"model": model}, welcome["spaces"], welcome["layout"], policy.weights
    )

    rng = np.random.default_rng(0)
    state = np.zeros((rows, network.state_size), np.float32)
    for _ in range(3 if network.state_size else 1):
        observations = observations_of(cell.observation_space, rows, rng, farthest=300)
        reward = rng.normal(size=rows) if "reward" in model["core_inputs"] else None
        expected = reference.step(observations, state if network.state_size else None, reward)
        computed = network(observations, state, reward)
        outputs = outputs_of(network, computed, noise=None)
        if network.state_size:
            outputs["state_out"] = state = computed.state
        assert outputs.keys() == expected.keys()
        for key, values in outputs.items():
            np.testing.assert_allclose(values, expected[key], rtol=1e-4, atol=1e-4, err_msg=key)

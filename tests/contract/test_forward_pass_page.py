"""docs/forward-pass.md: its numbers, by its text alone and by our own actors.

`plain_forward` is the page in numpy.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

import plain_forward
from forward_vectors import (
    DEFAULTS,
    NETWORKS,
    PageNetwork,
    Vector,
    blocks,
    box,
    forgets_before,
    noise_by_rule,
    observations_by_rule,
    program_outputs,
    weights_by_rule,
)
from penstock.algos.acting import make_policy
from penstock.algos.samples import has_small_images, network_shape, scales
from penstock.configs.for_actors import for_actors
from penstock.envs.packing import Packer
from penstock.envs.space_json import brief_spaces
from penstock.models.acting.critic import make_critic
from plain_forward import PlainNetwork

Array = npt.NDArray[Any]

VECTORS = dict(blocks())
FAST = ("normalized_mlp", "lstm")
"""Networks of which `make test` exports a program, which takes seconds."""


def test_every_network_of_the_page_has_a_vector() -> None:
    assert list(VECTORS) == list(NETWORKS)


@pytest.mark.parametrize("name", NETWORKS)
def test_vector_describes_the_network_of_this_release(name: str) -> None:
    welcome = json.loads(json.dumps(NETWORKS[name].welcome()))
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
        computed = network(observations[row : row + 1], state)
        state = computed.state
        steps.append(outputs_of(network, computed, noise[row : row + 1]))
    joined = {key: np.concatenate([step[key] for step in steps]) for key in steps[0]}
    return joined | {"state_out": state}


def outputs_of(
    network: PlainNetwork, computed: plain_forward.PlainOutputs, noise: Array
) -> dict[str, Array]:
    """Returns outputs by the names of the page."""
    decided_by = computed.decided_by
    outputs = {"action": network.greedy(decided_by)}
    if computed.value is not None:
        outputs["value"] = computed.value

    if "Box" in network.action_space:
        outputs["mean"], outputs["log_std"] = np.split(decided_by, 2, 1)
    elif computed.value is None:
        return outputs | {"q": decided_by}
    else:
        outputs["logits"] = decided_by
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

PPO = {"name": "ppo"}
THREE = spaces.Discrete(3)
PAIR = spaces.MultiDiscrete([2, 3])
NUMBERS = box(-2, 2, 2)
BYTES = np.uint8
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
BOARD = spaces.Dict({"board": box(0, 3, 6, 6, dtype=BYTES), "action_mask": spaces.MultiBinary(3)})
STARTS = spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 1], [0, 0]])
SCREENS = spaces.Dict({"a": box(0, 255, 40, 40, dtype=BYTES), "b": box(0, 9, 2, 40, 40)})

OTHERS = [
    *NETWORKS.values(),
    PageNetwork(PPO, box(0, 200, 3, dtype=BYTES), THREE),
    PageNetwork(PPO, box(0, 200, 3, dtype=BYTES), THREE, {"scale": "bytes"}),
    PageNetwork(PPO, box(-np.inf, np.inf, 3, dtype=np.float64), THREE),
    PageNetwork(PPO, box(-1, 1), THREE, {"critic": "shared"}),
    PageNetwork(
        PPO, box(0, 255, 2, 36, 40, dtype=BYTES), NUMBERS, {"normalize_observations": True}
    ),
    PageNetwork(PPO, box(-1, 3, 2, 36, 40), THREE, {"normalize_observations": True}),
    PageNetwork(PPO, box(2, 3, 2, 36, 40), NUMBERS),
    PageNetwork(PPO, box(2, 3, 36, 40, 2), THREE, {"kind": "impala_cnn", "core": "gru"}),
    PageNetwork(PPO, box(0, 255, 6, 5, 2, dtype=BYTES), THREE, {"filters": []}),
    PageNetwork(PPO, box(0, 1, 3, 6, 6, dtype=np.int64), THREE, {"normalize_observations": True}),
    PageNetwork(PPO, box(-1, 1, 6, 6), THREE, {"filters": [3, 4, 5]}),
    PageNetwork(PPO, box(-1, 1, 40, 41), THREE),
    PageNetwork(PPO, box(0, 2, 40, 41), THREE, {"kind": "mlp"}),
    PageNetwork(PPO, box(0, 2, 40, 41, 2), THREE, {"kind": "small_cnn", "filters": [3, 2]}),
    PageNetwork(PPO, box(-2, 2, 3), THREE, {"core": "lstm", "core_size": 4}),
    PageNetwork(PPO, MIXED, PAIR, {"core": "gru", "core_size": 4, "critic": "separate"}),
    PageNetwork(PPO, MIXED, PAIR, {"normalize_observations": True, "kind": "mlp"}),
    PageNetwork(PPO, MIXED, PAIR, {"kind": "impala_cnn"}),
    PageNetwork(PPO, MIXED, PAIR, {"kind": "nature_cnn", "scale": "bytes"}),
    PageNetwork(PPO, SCREENS, THREE, {"normalize_observations": True}),
    PageNetwork(PPO, spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)),
    PageNetwork(PPO, spaces.MultiBinary(4), STARTS),
    PageNetwork({"name": "dqn", "duelling": False}, BOARD, THREE),
    PageNetwork({"name": "dqn", "duelling": True}, box(0, 9, 5, 5, dtype=np.int32), THREE),
    PageNetwork({"name": "sac"}, box(0, 255, 36, 36, 3, dtype=BYTES), NUMBERS, {"hidden": [4]}),
]


@pytest.mark.parametrize("network", OTHERS, ids=range(len(OTHERS)))
def test_page_in_numpy_computes_what_actors_compute(network: PageNetwork) -> None:
    """Random weights of a usual size, random observations, and a state where there is one."""
    rows = 3
    config = network.config
    actors = config.actors.model_copy(update={"envs": rows, "precision": "fp32"})
    config = config.model_copy(update={"actors": actors})
    info = network.info
    shape = network_shape(config, info)
    layout = shape.layout

    rng = np.random.default_rng(0)
    flat = rng.normal(size=layout.size).astype(np.float32)
    for name, array in layout.views(flat).items():
        if name == "normalizer.var":
            np.square(array, out=array)
        elif name == "normalizer.count":
            array[:] = 1
        elif array.ndim > 1:
            fan_in = array[0].size if not name.startswith("hidden") else array.shape[1]
            array *= 1.4 / np.sqrt(fan_in)

    network.observation.seed(1)
    samples = [network.observation.sample() for _ in range(rows)]
    space = network.observation
    observation = concatenate(space, samples, create_empty_array(space, rows))
    packer = Packer("Test-v0", space)
    packed = np.empty((rows, *packer.space.shape), packer.space.dtype)
    packer.write(observation, packed)

    policy = make_policy(config, info, 0)
    policy.load(flat)
    state = rng.normal(size=policy.state.shape).astype(np.float32)
    policy.state[:] = state
    outputs = policy.outputs(packed)
    critic = make_critic(shape, flat)

    sent = for_actors(config, bool(scales(config, info)), has_small_images(config, info))
    plain = PlainNetwork(
        sent, brief_spaces(*info.spaces), json.loads(json.dumps(layout.to_list())), flat
    )
    computed = plain(observation, state)
    if network.algo["name"] == "sac":
        numbers = outputs.shape[1] // 2
        bounds = config.algo.log_std_min, config.algo.log_std_max  # type: ignore[attr-defined]
        outputs[:, numbers:] = outputs[:, numbers:].clip(*bounds)
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(computed.decided_by, outputs, **close)
    np.testing.assert_allclose(computed.state, policy.state, **close)
    if critic is None:
        assert computed.value is None
    else:
        np.testing.assert_allclose(computed.value, critic(packed, state), **close)

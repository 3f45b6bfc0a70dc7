"""Policies of random weights with their ONNX files, and what Python computes of them.

The reference is what actors compute: packed observations, `algos.acting.make_policy`, the critic of
displays, the samplers and the map to the environment's actions. None of it is part of a graph.

    python tests/onnx_cells.py FOLDER     # three of them, for tests in other languages

writes FOLDER/NAME/policy.onnx and FOLDER/NAME/cases.json: five steps in a row, each with the arrays
that go into the graph and those that come out (`dtype`, `shape` and flat `data`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces

from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.configs.schema import Config
from penstock.core.params import Float32
from penstock.envs import EnvInfo
from penstock.envs.packing import Packer, leaves_of, value_at
from penstock.envs.vector_env import action_map, counts_of
from penstock.evaluation.onnx_export import write
from penstock.learner.checkpoints.exported import Exported
from penstock.models.acting.critic import make_critic
from penstock.models.torch_nets import build_net

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra dev")
pytest.importorskip("onnxscript", reason="needs the extra onnx")

Array = npt.NDArray[Any]
Results = dict[str, Array]
Space = spaces.Space[Any]

READS_BOTH = {"core": "lstm", "core_inputs": ["action", "reward"]}
TOLERANCE = 1e-5
"""Absolute, and relative to the reference."""
CHOICES = spaces.Discrete(4, start=2)
SEVERAL = spaces.MultiDiscrete([3, 2], start=[1, 0])
NUMBERS = spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)
OBSERVATIONS: dict[str, Space] = {
    "vector": spaces.Box(-np.inf, np.inf, (5,), np.float64),
    "choice": spaces.Discrete(6, start=3),
    "choices": spaces.MultiDiscrete([3, 4], start=[0, 2]),
    "switches": spaces.MultiBinary(5),
    "frames": spaces.Box(0, 255, (4, 44, 40), np.uint8),
    "colours": spaces.Box(0, 255, (40, 44, 3), np.uint8),
    "floats": spaces.Box(-1, 3, (2, 40, 40), np.float32),
    "board": spaces.Box(0, 1, (7, 7, 3), np.uint8),
    "item": spaces.Discrete(1500, start=3),
    "items": spaces.Dict(
        {
            "pair": spaces.MultiDiscrete([1200, 4], start=[2, 0]),
            "speed": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "item": spaces.Discrete(2000, start=1),
        }
    ),
    "parts": spaces.Dict(
        {
            "screen": spaces.Box(0, 255, (40, 44), np.uint8),
            "speed": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
            "held": spaces.Box(0, 1, (3,), np.bool_),
            "place": spaces.Discrete(4, start=1),
            "state": spaces.Tuple([spaces.MultiBinary(2), spaces.Box(0, 9, (1,), np.int32)]),
        }
    ),
}


class Cell(NamedTuple):
    """A policy by its spaces and its options."""

    observation_space: Space
    action_space: Space
    model: Mapping[str, Any] = {}
    algo: Mapping[str, Any] = {"name": "ppo"}

    @property
    def config(self) -> Config:
        small: dict[str, Any] = {"hidden": [16, 16]}
        if self.model.get("core", "none") != "none":
            small["core_size"] = 12
        sections = {"env": {"id": "x"}, "algo": self.algo, "model": {**small, **self.model}}
        return Config.model_validate(sections)

    def policy(self, seed: int = 0) -> Exported:
        """Returns a policy of random weights, about as spread as those after training."""
        own_spaces = self.observation_space, self.action_space
        above = self.config.env.embed_above
        info = EnvInfo.of_spaces("x", own_spaces, 1, "of a test", above)
        shape = network_shape(self.config, info)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = build_net(shape).requires_grad_(False)

        rng = np.random.default_rng(seed)
        observations = observations_of(self.observation_space, 64, rng)
        packed = torch.from_numpy(packed_rows(info, observations, 64))
        net.observe(packed, torch.ones(64, dtype=torch.bool))
        for name, parameter in net.named_parameters():
            spread = 0.3 * parameter.std() if parameter.ndim > 1 else 0.1
            parameter.add_(
                spread * torch.from_numpy(rng.standard_normal(parameter.shape, np.float32))
            )
            if name in ("policy.weight", "head.weight"):
                parameter.mul_(50)  # it begins near 0, where all choices are alike
        tensors = (*net.parameters(), *net.buffers())
        weights = torch.cat([tensor.flatten() for tensor in tensors]).numpy()
        return Exported(self.config, own_spaces, info, weights, play=None)


def packed_rows(info: EnvInfo, observations: Any, rows: int) -> Array:
    """Returns observations as actors pack them."""
    packed = np.empty((rows, *info.observation_space.shape), info.observation_space.dtype)
    Packer("x", info.spaces[0], info.embed_above).write(observations, packed)
    return packed


def masked(observations: Space, actions: Space) -> spaces.Dict:
    """Returns observations with a mask of the actions beside them."""
    mask = spaces.Box(0, 1, (sum(counts_of(actions)),), np.int8)
    parts = observations.spaces if isinstance(observations, spaces.Dict) else {"seen": observations}
    return spaces.Dict({**parts, "action_mask": mask})


class Reference:
    """What Python computes of a policy for ``rows`` environments, one step after another."""

    def __init__(self, policy: Exported, rows: int, seed: int = 0) -> None:
        actors = policy.config.actors.model_copy(update={"envs": rows})
        config = policy.config.model_copy(update={"actors": actors})
        self._info = policy.info
        self._to_env = action_map(policy.spaces[1])
        self._critic = make_critic(network_shape(config, policy.info), policy.weights)
        self._policy = make_policy(config, policy.info, seed)
        self._policy.load(policy.weights)
        self._log_std = getattr(self._policy.decider, "log_std_bounds", (-np.inf, np.inf))

    def step(
        self, observations: Any, state: Float32 | None, reward: Array | None = None
    ) -> Results:
        """Returns the outputs of the graph, but for a sampled action.

        ``reward`` is what the last actions were paid, which an episode that begins does not have.
        """
        packed = self._pack(observations, state)
        previous_state = self._policy.state
        if reward is not None:
            self._policy.take_rewards(np.where(previous_state.any(1), reward, 0))
        value = None if self._critic is None else self._critic(packed, previous_state)
        before = previous_state.copy()
        outputs = self._policy.outputs(packed).copy()
        self._policy.state[:] = before
        explanation = self._policy.explain(packed, sample=False)
        results = {"action": self._to_env(explanation.actions)}

        if explanation.mean is not None and explanation.std is None:
            results["mean"] = outputs
        elif explanation.mean is not None:
            results["mean"], log_std = np.split(outputs, 2, axis=1)
            results["log_std"] = np.clip(log_std, *self._log_std)
        elif explanation.q is not None:
            results["q"] = outputs
        else:
            results["logits"] = outputs
        if value is not None:
            results["value"] = value
        if self._policy.state.size:
            results["state_out"] = self._policy.state.copy()
        return results

    @property
    def state(self) -> Float32:
        """The recurrent state after the last step."""
        return self._policy.state

    def sample(self, observations: Any, state: Float32 | None) -> tuple[Array, Array | None]:
        """Returns actions drawn by the sampler's own random numbers, and their
        log-probabilities."""
        actions = self._policy.act(self._pack(observations, state))
        log_prob = self._policy.recorded.get("behaviour_logp")
        return self._to_env(actions), None if log_prob is None else log_prob.copy()

    def _pack(self, observations: Any, state: Float32 | None) -> Array:
        if state is not None:
            self._policy.state[:] = state
        return packed_rows(self._info, observations, len(self._policy.state))


class Graph:
    """An ONNX file in onnxruntime."""

    def __init__(self, file: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        self.about = json.loads(self.session.get_modelmeta().custom_metadata_map["penstock"])

    def step(self, feeds: Results) -> Results:
        """Returns all outputs by name."""
        names = [output["name"] for output in self.about["outputs"]]
        return dict(zip(names, self.session.run(names, feeds), strict=True))


def written(policy: Exported, folder: Path, **options: bool) -> Graph:
    """Writes a policy's file into a folder, and returns its graph."""
    file = folder / "policy.onnx"
    write(file, policy, **options)
    return Graph(file)


def observations_of(
    space: Space, rows: int, rng: np.random.Generator, farthest: float = 1.0
) -> Any:
    """Returns observations ``[rows, ...]`` in the form of their space.

    Numbers without bounds are standard normal, and one of eight is ``farthest`` times as large.
    Each third mask allows nothing, as the last one of an episode may do.
    """
    shape = (rows, *(space.shape or ()))
    match space:
        case spaces.Dict():
            parts = {
                key: observations_of(part, rows, rng, farthest)
                for key, part in space.spaces.items()
            }
            if "action_mask" in parts:
                parts["action_mask"][2::3] = 0
            return parts
        case spaces.Tuple():
            return tuple(observations_of(part, rows, rng, farthest) for part in space.spaces)
        case spaces.Discrete(n=n, start=start):
            return (start + rng.integers(n, size=shape)).astype(space.dtype)
        case spaces.MultiDiscrete(nvec=nvec, start=start):
            return (start + rng.integers(nvec, size=shape)).astype(space.dtype)
        case spaces.MultiBinary():
            return rng.integers(2, size=shape).astype(space.dtype)
        case spaces.Box(dtype=np.dtype(kind="b")):
            return rng.integers(2, size=shape).astype(space.dtype)
        case spaces.Box(low=low, high=high) if np.isfinite(low).all() and np.isfinite(high).all():
            numbers = rng.uniform(low.astype(float), high + 0.999, size=shape)
            return np.minimum(numbers, high.astype(float)).astype(space.dtype)
    scales = np.where(rng.random(shape) < 1 / 8, farthest, 1.0)
    return (scales * rng.normal(size=shape)).astype(space.dtype)


def feeds_of(graph: Graph, space: Space, observations: Any) -> Results:
    """Returns the arrays of observations by the names of the graph's inputs."""
    names = [entry["name"] for entry in graph.about["inputs"]]
    # An array that holds nothing is no input.
    leaves = [keys for keys, leaf in leaves_of(space) if 0 not in (leaf.shape or ())]
    arrays = [np.asarray(value_at(keys, observations)) for keys in leaves]
    return dict(zip(names, arrays, strict=False))


def compare(actual: Results, expected: Results) -> None:
    """Raises AssertionError unless results of a graph are those of the reference.

    Actions of choices may differ where the two best outputs differ by less than the tolerance.
    """
    assert actual.keys() >= expected.keys()
    for name, values in expected.items():
        assert actual[name].dtype == values.dtype, name
        assert actual[name].shape == values.shape, name
        if name != "action" or values.dtype.kind == "f":
            np.testing.assert_allclose(
                actual[name], values, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name
            )

    outputs = expected.get("logits", expected.get("q"))
    if outputs is not None:
        gaps = np.diff(np.sort(outputs, axis=1), axis=1)
        is_clear = (gaps > TOLERANCE).all(1) | (np.abs(gaps) == 0).all(1)
        np.testing.assert_array_equal(actual["action"][is_clear], expected["action"][is_clear])


def play(graph: Graph, policy: Exported, rows: int, steps: int, seed: int = 0) -> None:
    """Compare a graph with the reference over some steps, each with its own recurrent state.

    Episodes end at random, where the state becomes 0. A program gets the policy's weights.
    """
    rng = np.random.default_rng(seed)
    reference = Reference(policy, rows)
    # Some numbers are beyond the clip of a normaliser.
    farthest = 300 if policy.config.model.normalize_observations else 1
    size = graph.about["state_size"]
    own_state = np.zeros((rows, size), np.float32)
    state = own_state.copy()
    for _ in range(steps):
        observations = observations_of(policy.spaces[0], rows, rng, farthest)
        feeds = feeds_of(graph, policy.spaces[0], observations)
        inputs = {entry["name"] for entry in graph.about["inputs"]}
        if size:
            feeds["state"] = own_state
        reward = None
        if "reward" in inputs:
            feeds["reward"] = reward = 3 * rng.standard_normal(rows, np.float32)
        if "noise" in inputs:
            (noise,) = [entry for entry in graph.about["inputs"] if entry["name"] == "noise"]
            feeds["noise"] = np.full((rows, noise["shape"][1]), 0.5, np.float32)
        if "weights" in inputs:
            feeds["weights"] = policy.weights
        actual = graph.step(feeds)
        expected = reference.step(observations, state if size else None, reward)
        compare(actual, expected)
        if size:
            goes_on = (rng.random((rows, 1)) > 0.05).astype(np.float32)
            own_state = actual["state_out"] * goes_on
            state = expected["state_out"] * goes_on


def every_cell() -> dict[str, Cell]:
    """Returns every encoder x core x heads x mask x normalised, by its name.

    Variants of the encoders are combined with one head.
    """
    encoders: dict[str, tuple[Space, dict[str, Any]]] = {
        "mlp": (OBSERVATIONS["vector"], {}),
        "nature": (OBSERVATIONS["frames"], {}),
        "impala": (OBSERVATIONS["frames"], {"kind": "impala_cnn"}),
        "small": (OBSERVATIONS["board"], {"filters": [4, 8]}),
        "parts": (OBSERVATIONS["parts"], {}),
    }
    variants: dict[str, tuple[Space, dict[str, Any]]] = {
        "relu": (OBSERVATIONS["vector"], {"activation": "relu"}),
        "shared critic": (OBSERVATIONS["vector"], {"critic": "shared"}),
        "separate cores": (OBSERVATIONS["vector"], {"critic": "separate", "core": "lstm"}),
        "choice": (OBSERVATIONS["choice"], {}),
        "choices": (OBSERVATIONS["choices"], {}),
        "item": (OBSERVATIONS["item"], {}),
        "items": (OBSERVATIONS["items"], {"core": "gru", "critic": "separate"}),
        "switches": (OBSERVATIONS["switches"], {}),
        "colours": (OBSERVATIONS["colours"], {"critic": "separate"}),
        "floats": (OBSERVATIONS["floats"], {}),
        "core inputs": (OBSERVATIONS["vector"], READS_BOTH),
        "separate parts": (OBSERVATIONS["parts"], {"kind": "impala_cnn", "critic": "separate"}),
    }
    layer_normed = {
        f"{encoder}-layer norm": (space, {**model, "layer_norm": True})
        for encoder, (space, model) in encoders.items()
    }
    actor_critic_heads: dict[str, tuple[Space, dict[str, Any]]] = {
        "choice": (CHOICES, {}),
        "choices": (SEVERAL, {}),
        "numbers": (NUMBERS, {}),
        "squashed": (NUMBERS, {"gaussian": "squashed"}),
    }
    single_heads: dict[str, tuple[Space, dict[str, Any]]] = {
        "q": (CHOICES, {"name": "dqn", "duelling": False}),
        "duelling q": (CHOICES, {"name": "dqn", "duelling": True}),
        "noisy quantiles": (SEVERAL, {"name": "dqn", "quantiles": 3, "noisy": True}),
        "sac": (NUMBERS, {"name": "sac", "log_std_min": -0.2, "log_std_max": 0.2}),
        "td3": (NUMBERS, {"name": "td3"}),
    }

    cells = {}
    for (encoder, (space, model)), core in product(encoders.items(), ("none", "lstm", "gru")):
        for head, (actions, options) in actor_critic_heads.items():
            cells[f"{encoder}-{core}-{head}"] = Cell(
                space, actions, {**model, **options, "core": core}
            )
    for encoder, (space, model) in encoders.items():
        for head, (actions, algo) in single_heads.items():
            cells[f"{encoder}-{head}"] = Cell(space, actions, model, algo)
    for core, encoder in (("lstm", "mlp"), ("gru", "small"), ("lstm", "parts")):
        space, model = encoders[encoder]
        cells[f"{encoder}-{core}-q"] = Cell(
            space, CHOICES, {**model, "core": core}, {"name": "r2d2"}
        )
    for encoder, (space, model) in (variants | layer_normed).items():
        cells[encoder] = Cell(space, CHOICES, model)
    for encoder, (space, model) in layer_normed.items():
        cells[f"{encoder}-duelling q"] = Cell(space, CHOICES, model, single_heads["duelling q"][1])

    # A mask of choices beside each of them, and each of them normalised.
    for name, cell in list(cells.items()):
        if cell.action_space is not NUMBERS:
            seen = masked(cell.observation_space, cell.action_space)
            cells[f"{name}-masked"] = cell._replace(observation_space=seen)
    for name, cell in list(cells.items()):
        model = {**cell.model, "normalize_observations": True}
        cells[f"{name}-normalised"] = cell._replace(model=model)
    return cells


SHARED_CELLS = {
    "mlp": Cell(spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(2)),
    "frames": Cell(OBSERVATIONS["frames"], spaces.Discrete(6)),
    "memory": Cell(masked(OBSERVATIONS["parts"], CHOICES), CHOICES, {"core": "lstm"}),
}
"""The cells for tests in other languages."""


def write_cases(cell: Cell, folder: Path, rows: int = 3, steps: int = 5) -> None:
    """Writes the file of a cell, and steps with their results by the reference."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = cell.policy()
    graph = written(policy, folder)
    reference = Reference(policy, rows)
    rng = np.random.default_rng(0)
    size = graph.about["state_size"]
    state = np.zeros((rows, size), np.float32)

    cases = []
    for _ in range(steps):
        observations = observations_of(cell.observation_space, rows, rng)
        inputs = feeds_of(graph, cell.observation_space, observations)
        if size:
            inputs["state"] = state
        outputs = reference.step(observations, state if size else None)
        compare(graph.step(inputs), outputs)
        cases.append({"inputs": _as_json(inputs), "outputs": _as_json(outputs)})
        state = outputs.get("state_out", state)
    (folder / "cases.json").write_text(json.dumps(cases))


def _as_json(arrays: Results) -> dict[str, Any]:
    return {
        name: {"dtype": str(array.dtype), "shape": array.shape, "data": array.ravel().tolist()}
        for name, array in arrays.items()
    }


if __name__ == "__main__":
    for name, cell in SHARED_CELLS.items():
        write_cases(cell, Path(sys.argv[1]) / name)

"""ONNX files: their graphs compute what actors compute, and what cannot be written is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from onnx_cells import (
    CHOICES,
    NUMBERS,
    OBSERVATIONS,
    READS_BOTH,
    SEVERAL,
    SHARED_CELLS,
    Cell,
    Graph,
    Reference,
    Results,
    every_cell,
    feeds_of,
    masked,
    observations_of,
    play,
    write_cases,
    written,
)
from pages import blocks
from penstock import UserError
from penstock.__main__ import main
from penstock.configs.load import presets, resolve
from penstock.core.params import Float32
from penstock.envs import probe
from penstock.evaluation.onnx_export import write
from penstock.evaluation.policy_module import PolicyModule
from penstock.learner.checkpoints import exported
from penstock.learner.checkpoints.exported import Exported
from penstock.models import normalizer

EXAMPLES = Path(__file__).parents[3] / "examples"
CELLS = every_cell()
VECTOR = OBSERVATIONS["vector"]
NORMALIZED = {"normalize_observations": True}
# Of each encoder, core, head and mask some; the slow test takes all of them.
FEW = [*CELLS][::7]
SOME = ("mlp-none-numbers-normalised", "parts-lstm-choices-masked-normalised", "nature-duelling q")
HEADS = {
    "choices with a mask": Cell(masked(VECTOR, SEVERAL), SEVERAL),
    "a choice": Cell(VECTOR, CHOICES),
    "numbers": Cell(VECTOR, NUMBERS),
    "squashed numbers": Cell(VECTOR, NUMBERS, {"gaussian": "squashed", "core": "gru"}),
    "sac": Cell(VECTOR, NUMBERS, algo={"name": "sac", "log_std_min": -0.2, "log_std_max": 0.2}),
}
REWARDS = {"name": "ppo", "reward_clip": 2.0, "reward_scale": 0.5}
READS = {
    "choices": Cell(VECTOR, SEVERAL, READS_BOTH, REWARDS),
    "numbers": Cell(VECTOR, NUMBERS, READS_BOTH, REWARDS),
    "squashed": Cell(VECTOR, NUMBERS, READS_BOTH | {"gaussian": "squashed", "core": "gru"}),
    "reward alone": Cell(VECTOR, CHOICES, READS_BOTH | {"core_inputs": ["reward"]}, REWARDS),
    "action alone": Cell(
        OBSERVATIONS["parts"], CHOICES, READS_BOTH | {"core_inputs": ["action"]}, REWARDS
    ),
}


class EagerGraph:
    """A policy's module where torch computes it, in the place of a `Graph`."""

    def __init__(self, policy: Exported) -> None:
        self.module = PolicyModule(policy.config, policy.info, policy.weights)
        inputs = [{"name": array.name} for array in self.module.inputs]
        self.about = {"inputs": inputs, "state_size": self.module.state_size}

    @torch.no_grad()
    def step(self, feeds: Results) -> Results:
        inputs = [torch.from_numpy(np.asarray(feeds[array.name])) for array in self.module.inputs]
        return {name: tensor.numpy() for name, tensor in self.module.results(*inputs).items()}


def play_all(graph: Graph, policy: Exported) -> None:
    """Compare a graph with the reference for batches of 1, 3 and 64, and over 100 steps."""
    play(graph, policy, rows=1, steps=3)
    play(graph, policy, rows=3, steps=100 if graph.about["state_size"] else 3)
    play(graph, policy, rows=64, steps=3)


@pytest.mark.parametrize("name", READS)
def test_the_module_reads_action_and_reward_as_actors_do(name: str) -> None:
    policy = READS[name].policy()
    graph: Any = EagerGraph(policy)
    play(graph, policy, rows=5, steps=12)


def test_the_state_of_a_sampled_action_has_that_action(tmp_path: Path) -> None:
    policy = READS["choices"].policy()
    graph = written(policy, tmp_path, sampled=True)
    play_all(graph, policy)
    reference = Reference(policy, rows=64, seed=7)
    rng = np.random.default_rng(0)
    observations = observations_of(policy.spaces[0], 64, rng)
    size = graph.about["state_size"]
    feeds = feeds_of(graph, policy.spaces[0], observations)
    feeds["state"] = rng.standard_normal((64, size), np.float32)
    feeds["reward"] = np.zeros(64, np.float32)
    feeds["noise"] = noise_of(graph, 64, np.random.default_rng(7))
    feeds["state"][:, -1] = 0
    results = graph.step(feeds)
    reference.sample(observations, feeds["state"])
    np.testing.assert_allclose(results["sampled_state_out"], reference.state, rtol=1e-5, atol=1e-5)
    assert (results["sampled_state_out"] != results["state_out"]).any()


@pytest.mark.parametrize("name", FEW)
def test_the_module_decides_as_actors_do(name: str) -> None:
    policy = CELLS[name].policy()
    graph: Any = EagerGraph(policy)
    play(graph, policy, rows=5, steps=4)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SOME else [pytest.mark.slow]) for name in CELLS],
)
def test_a_file_decides_as_actors_do(tmp_path: Path, name: str) -> None:
    policy = CELLS[name].policy()
    play_all(written(policy, tmp_path), policy)


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_the_network_of_every_preset_is_exported(tmp_path: Path, preset: str) -> None:
    config = resolve(preset)
    info = probe(config.env)
    cell = Cell(*info.spaces, config.model.model_dump(), config.algo.model_dump())
    policy = cell.policy()._replace(config=config, info=info)
    graph = written(policy, tmp_path)
    for rows in (1, 3):
        play(graph, policy, rows=rows, steps=3)


def noise_of(graph: Graph, rows: int, rng: np.random.Generator) -> Float32:
    """Returns the input "noise" of the numbers that a sampler draws from ``rng``."""
    (noise,) = [entry for entry in graph.about["inputs"] if entry["name"] == "noise"]
    size = noise["shape"][1]
    if "uniform" in noise["meaning"]:
        return np.stack([rng.random(rows, dtype=np.float32) for _ in range(size)], axis=1)
    return rng.standard_normal((size, rows), dtype=np.float32).T


@pytest.mark.parametrize(
    "head",
    [pytest.param(head, marks=[] if "mask" in head else [pytest.mark.slow]) for head in HEADS],
)
def test_a_sampled_action_is_that_of_the_sampler_with_the_same_numbers(
    tmp_path: Path, head: str
) -> None:
    rows = 256
    seed = 7
    policy = HEADS[head].policy()
    graph = written(policy, tmp_path, sampled=True)
    reference = Reference(policy, rows, seed)
    size = graph.about["state_size"]
    state = np.zeros((rows, size), np.float32)
    rng = np.random.default_rng(0)
    noise_rng = np.random.default_rng(seed)
    for _ in range(20):
        observations = observations_of(policy.spaces[0], rows, rng)
        feeds = feeds_of(graph, policy.spaces[0], observations)
        feeds["noise"] = noise_of(graph, rows, noise_rng)
        if size:
            feeds["state"] = state
        results = graph.step(feeds)
        actions, log_prob = reference.sample(observations, state if size else None)

        sampled = results["sampled_action"]
        if actions.dtype.kind == "f":
            np.testing.assert_allclose(sampled, actions, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(sampled, actions)
        assert len(np.unique(sampled.reshape(rows, -1), axis=0)) > 3  # it does draw
        if log_prob is not None:
            np.testing.assert_allclose(results["log_prob"], log_prob, rtol=1e-5, atol=1e-5)


def test_the_log_density_of_a_squashed_action_is_that_of_torch() -> None:
    """SAC's sampler records none."""
    policy = HEADS["sac"].policy()
    module = PolicyModule(policy.config, policy.info, policy.weights, sampled=True)
    obs = torch.randn(16, 5, dtype=torch.float64)
    results = module.results(obs, torch.randn(16, 2))
    normal = torch.distributions.Normal(results["mean"], results["log_std"].exp())
    tanh = torch.distributions.TransformedDistribution(
        normal, [torch.distributions.TanhTransform()]
    )
    low, high = (torch.from_numpy(bound) for bound in (NUMBERS.low, NUMBERS.high))
    unit_actions = (2 * (results["sampled_action"] - low) / (high - low) - 1).float()
    expected = tanh.log_prob(unit_actions).sum(1)
    torch.testing.assert_close(results["log_prob"], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(VECTOR, NUMBERS, NORMALIZED),
        pytest.param(CELLS["nature-duelling q"], marks=pytest.mark.slow),
        pytest.param(CELLS["parts-lstm-choices-masked-normalised"], marks=pytest.mark.slow),
        pytest.param(CELLS["impala-gru-numbers-normalised"], marks=pytest.mark.slow),
    ],
)
def test_a_program_computes_the_policy_of_any_weights(tmp_path: Path, cell: Cell) -> None:
    policies = [cell.policy(seed) for seed in (0, 1)]
    graph = written(policies[0], tmp_path, program=True)
    for policy in policies:
        play(graph, policy, rows=3, steps=5)
    assert graph.about["layout"][0][1]
    assert (tmp_path / "policy.onnx").stat().st_size < max(60_000, policies[0].weights.nbytes / 4)


def with_swapped_gates(policy: Exported) -> Exported:
    """Returns a policy whose LSTM has its input gate in the place of its forget gate."""
    module = PolicyModule(policy.config, policy.info, policy.weights)
    weights = policy.weights.copy()
    for name, array in module.layout.views(weights).items():
        if name.startswith("cores."):
            size = len(array) // 4
            array[: 2 * size] = np.concatenate([array[size : 2 * size], array[:size]])
    return policy._replace(weights=weights)


@pytest.mark.slow
def test_a_swapped_gate_is_noticed(tmp_path: Path) -> None:
    policy = Cell(VECTOR, CHOICES, {"core": "lstm"}).policy()
    graph = written(with_swapped_gates(policy), tmp_path)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        play(graph, policy, rows=3, steps=10)


def test_a_clip_that_is_left_out_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Cell(VECTOR, CHOICES, NORMALIZED).policy()
    monkeypatch.setattr(normalizer, "CLIP", 1e9)
    graph = written(policy, tmp_path)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        play(graph, policy, rows=16, steps=5)


@pytest.mark.slow
def test_cases_for_other_languages_are_what_onnxruntime_computes(tmp_path: Path) -> None:
    write_cases(Cell(VECTOR, CHOICES, {"core": "gru"}), tmp_path)
    graph = Graph(tmp_path / "policy.onnx")
    cases = json.loads((tmp_path / "cases.json").read_text())
    assert len(cases) == 5
    for case in cases:
        feeds = {
            name: np.array(array["data"], array["dtype"]).reshape(array["shape"])
            for name, array in case["inputs"].items()
        }
        results = graph.step(feeds)
        for name, array in case["outputs"].items():
            expected = np.reshape(array["data"], array["shape"])
            np.testing.assert_allclose(results[name], expected, rtol=1e-5, atol=1e-5)


def test_a_file_says_what_its_graph_takes_and_gives(tmp_path: Path) -> None:
    """A part with the name of another input is called otherwise."""
    seen = spaces.Dict({"state": spaces.Discrete(3), "noise": spaces.Box(0, 1, (2,), np.float32)})
    policy = Cell(seen, CHOICES).policy()._replace(play={"way": "sampled"})
    graph = written(policy, tmp_path, sampled=True)
    about = graph.about
    for told, ports in (
        (about["inputs"], graph.session.get_inputs()),
        (about["outputs"], graph.session.get_outputs()),
    ):
        assert [entry["name"] for entry in told] == [port.name for port in ports]
        assert [entry["shape"] for entry in told] == [port.shape for port in ports]
        assert all(entry["meaning"] for entry in told)
    assert [entry["name"] for entry in about["inputs"]] == ["obs.noise", "obs.state", "noise"]
    assert (about["format"], about["env"], about["play"]) == (1, "x", "sampled")
    assert about["spaces"][1] == {"Discrete": [4, 2]}

    data = (tmp_path / "policy.onnx").read_bytes()
    assert str(Path(write.__code__.co_filename).parent).encode() not in data
    assert [path.name for path in tmp_path.iterdir()] == ["policy.onnx"]


class Own(nn.Module):
    """Features of one layer, and of the statistics of a batch norm."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(shapes["obs"][0], 8)
        self.norm = nn.BatchNorm1d(8)
        self.norm.num_batches_tracked = None  # an integer, and buffers are float32

    def forward(self, arrays: dict[str, Tensor]) -> Any:
        return self.norm(self.linear(arrays["obs"])).tanh()


class Whole(Own):
    def forward(self, arrays: dict[str, Tensor]) -> Any:
        features = super().forward(arrays)
        return features[:, :4], features[:, 5]


class Counting(Own):
    def forward(self, arrays: dict[str, Tensor]) -> Any:
        obs = arrays["obs"]
        return super().forward({"obs": obs.view(len(obs), -1)})


class Branching(Own):
    def forward(self, arrays: dict[str, Tensor]) -> Any:
        features = super().forward(arrays)
        return features if features.sum() > 0 else -features


class Looping(Own):
    def forward(self, arrays: dict[str, Tensor]) -> Any:
        return torch.cat([self.linear(row[None]) for row in arrays["obs"]])


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("mine")
    for kind in (Own, Whole, Counting, Branching, Looping):
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "mine", module)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {"entry": "mine:Own"},
        {"entry": "mine:Own", "core": "lstm", "normalize_observations": True},
        {"entry": "mine:Whole"},
        {"entry": "mine:Counting"},
    ],
)
def test_a_custom_network_is_exported(
    tmp_path: Path, own_module: None, model: dict[str, Any]
) -> None:
    policy = Cell(VECTOR, CHOICES, model).policy()
    play_all(written(policy, tmp_path), policy)


@pytest.mark.slow
def test_the_custom_network_of_the_examples_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    frame = spaces.Box(0, 255, (1, 45, 45), np.uint8)
    policy = Cell(frame, CHOICES, {"entry": "own_network:Cells"}).policy()
    play_all(written(policy, tmp_path), policy)


@pytest.mark.slow
def test_arrays_of_any_dtype_go_in_as_the_environment_returns_them(tmp_path: Path) -> None:
    kinds = ["i1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]
    parts: dict[str, Any] = {kind: spaces.Box(0, 7, (3,), np.dtype(kind).type) for kind in kinds}
    parts["scalar"] = spaces.Box(-1, 1, (), np.float32)
    parts["empty"] = spaces.Box(0, 1, (0,), np.float32)
    policy = Cell(spaces.Dict(parts), spaces.Box(-1, 1, (), np.float16)).policy()
    graph = written(policy, tmp_path)
    assert len(graph.about["inputs"]) == len(kinds) + 1
    play_all(graph, policy)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"entry": "mine:Branching"}, "data-dependent expression"),
        pytest.param({"entry": "mine:Looping"}, "UserError: ", marks=pytest.mark.slow),
        pytest.param(
            {"entry": "mine:Counting", "core": "lstm"}, "as len(x) is", marks=pytest.mark.slow
        ),
    ],
)
def test_a_custom_network_that_the_exporter_refuses_is_named_with_the_reason(
    tmp_path: Path,
    own_module: None,
    model: dict[str, Any],
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    policy = Cell(VECTOR, CHOICES, model).policy()
    with pytest.raises(UserError) as refused:
        write(tmp_path / "policy.onnx", policy)
    told = str(refused.value)
    assert f"refuses model.entry {model['entry']} (" in told
    assert reason in told
    assert told.endswith("in torch's operations on a whole batch, or export a .safetensors file")
    assert "\n" not in told
    assert capfd.readouterr() == ("", "")
    assert not any(tmp_path.iterdir())


def test_epsilon_greedy_actions_are_not_sampled(tmp_path: Path) -> None:
    policy = CELLS["mlp-q"].policy()
    with pytest.raises(UserError, match=r"algo.name dqn draws no action from probabilities"):
        write(tmp_path / "policy.onnx", policy, sampled=True)


def test_actions_without_deviations_are_not_sampled(tmp_path: Path) -> None:
    policy = CELLS["mlp-td3"].policy()
    with pytest.raises(UserError, match=r"algo.name td3 draws no action from probabilities"):
        write(tmp_path / "policy.onnx", policy, sampled=True)


def test_an_old_torch_or_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Cell(VECTOR, CHOICES).policy()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(UserError, match=r"need onnxscript.*pip install 'penstock\[onnx\]'"):
            write(tmp_path / "policy.onnx", policy)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.8.1+cpu"))
    with pytest.raises(UserError, match=r"torch 2.8.1\+cpu is installed, and ONNX files need 2.9"):
        write(tmp_path / "policy.onnx", policy)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """An exported policy in the format of Penstock."""
    policy = Cell(VECTOR, CHOICES).policy()
    path = tmp_path / "agent.safetensors"
    exported.write(path, policy.config, policy.spaces, policy.info, policy.weights)
    return path


def export(monkeypatch: pytest.MonkeyPatch, *words: object) -> Any:
    """Run `penstock export`, and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["penstock", "export", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_command_writes_an_onnx_file_of_an_exported_one(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = file.with_name("agent.onnx")
    target.write_bytes(b"an older one")
    assert export(monkeypatch, file, target, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["nbytes"] == target.stat().st_size
    assert [entry["name"] for entry in result["inputs"]] == ["obs"]
    assert [entry["name"] for entry in result["outputs"]] == ["action", "logits", "value"]
    play(Graph(target), exported.read(file), rows=2, steps=2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a.pt"], "a.pt ends in neither of .safetensors and .onnx"),
        (["a.onnx", "--half"], "--half is for .safetensors, and a.onnx holds 32-bit floats"),
        (["a.safetensors", "--program"], "--program is for .onnx; name the file a.onnx"),
        (["a.safetensors", "--sampled"], "--sampled is for .onnx; name the file a.onnx"),
        (["no/such/a.onnx"], "cannot be written: No such file or directory"),
    ],
)
def test_the_command_refuses_what_a_format_does_not_have(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(file.parent)
    assert export(monkeypatch, file, *words) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cartpole = SHARED_CELLS["mlp"]
    recurrent = cartpole._replace(model={"core": "gru"})
    for name, cell, options in (
        ("policy", cartpole, {}),
        ("recurrent", recurrent, {}),
        ("sampled", cartpole, {"sampled": True}),
        ("program", cartpole, {"program": True}),
    ):
        write(tmp_path / f"{name}.onnx", cell.policy(), **options)

    monkeypatch.chdir(tmp_path)
    results: list[dict[str, Any]] = []
    for block in blocks("onnx.md", "python"):
        names: dict[str, Any] = {}
        exec(block, names)
        results.append(names)
    episode, metadata, memory, sampled, program = results
    assert episode["ended"]
    assert metadata["names"] == ["obs"]
    assert memory["state"].shape == (3, memory["size"])
    assert set(sampled["action"]) == {0, 1}
    assert program["value"] == [0]  # of weights that are all 0

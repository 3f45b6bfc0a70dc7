"""The bare form of a target's network has the same numbers of parameters and outputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.algos.samples import network_shape
from penstock.bench.bare import PASS_ROWS, BareNetwork, Form, one_behind, pass_rows, rounds
from penstock.bench.compare import BARE_SHARING, ideal
from penstock.bench.rates import ROUNDS
from penstock.configs.load import resolve
from penstock.envs import probe

TARGETS = [
    ("cartpole", []),
    ("pong_impala", ["model.normalize_observations=false"]),
    ("pong_impala", ["model.kind=impala_cnn", "model.normalize_observations=false"]),
]


@pytest.mark.parametrize(("target", "overrides"), TARGETS)
def test_bare_network_has_as_many_parameters_as_the_targets(
    target: str, overrides: list[str]
) -> None:
    config = resolve(target, overrides)
    network = BareNetwork.of(config, on_learner=True)
    assert network is not None
    size = network_shape(config, probe(config.env)).layout.size
    assert sum(p.numel() for p in network.parameters()) == size


@pytest.mark.parametrize(("target", "overrides"), TARGETS)
def test_bare_learning_computes_gradients_of_all_parameters(
    target: str, overrides: list[str]
) -> None:
    network = BareNetwork.of(resolve(target, overrides), on_learner=True)
    assert network is not None
    network.forward(Form(False, False, 3)).square().sum().backward()
    assert all(torch.count_nonzero(p.grad) for p in network.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("stage", ["bare_inference", "bare_learner"])
def test_rounds_name_the_fastest_form(stage: str) -> None:
    found = rounds(resolve("cartpole", []).model_dump(mode="json"), stage, 0.05)
    assert len(found["rates"]) == ROUNDS
    assert min(found["rates"]) > 0
    assert found["note"].startswith(("fp32", "bf16"))


def seconds_of(form: Form) -> float:
    """Of an observation in a form on a pretended GPU."""
    if form.rows == 640:
        raise torch.OutOfMemoryError
    if form.compiled and form.graph:
        raise RuntimeError("the compiler was not found")
    return 1.0 - 0.1 * sum((form.bf16, form.channels_last, form.compiled, 2 * form.graph))


@pytest.mark.parametrize("fails", [False, True])
def test_fastest_pass_on_a_gpu_is_also_tried_compiled_and_captured(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    options = ["actors.envs=32", "actors.unroll=20", "learner.batch_slots=2"]
    config = resolve("pong_impala", [*options, "learner.updates_per_batch=2"])
    network = BareNetwork.of(config, on_learner=True)
    assert network is not None
    assert pass_rows(config, network) == PASS_ROWS
    network.on_gpu = True
    assert pass_rows(config, network) == (640, 320, 160)
    tried = []

    def measured(form: Form, learns: bool) -> float:
        tried.append(form)
        if fails and form.rows == 160:
            raise RuntimeError("not for lack of memory")
        return seconds_of(form)

    monkeypatch.setattr(network, "_time_form", measured)
    if fails:
        with pytest.raises(RuntimeError, match="not for lack"):
            network.fastest((640, 320, 160), learns=True)
        return
    form = network.fastest((640, 320, 160), learns=True)
    assert (form.channels_last, form.rows, form.compiled, form.graph) == (True, 320, False, True)
    assert {each.rows for each in tried} == {640, 320, 160}
    assert {(each.compiled, each.graph) for each in tried if each.rows == 320} == {
        (False, False), (False, True), (True, False), (True, True),
    }  # fmt: skip
    assert [each.graph for each in tried] == sorted(each.graph for each in tried)
    assert "channels_last, graph, 320 rows" in str(form)


def test_at_most_two_calls_are_queued() -> None:
    told: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.number = 0

        def record(self) -> None:
            self.number = len(told)

        def synchronize(self) -> None:
            told.append(f"until {self.number}")

    paced = one_behind(lambda: told.append("call"), SimpleNamespace(make_event=Event))
    for _ in range(3):
        paced()
    assert told == ["call", "until 0", "call", "until 1", "call", "until 3"]


def test_recurrent_network_has_no_bare_form() -> None:
    assert rounds(resolve("memory", []).model_dump(mode="json"), "bare_learner", 0.05) == {}


def test_the_ideal_of_bare_parts_leaves_out_this_packages_own_stages() -> None:
    core_s = {"bare_environment": 3e-4, "bare_inference": 2e-4, "bare_learner": 5e-4, "write": 1.0}
    found = ideal(core_s, 2, 1e9, on_gpu=False, sharing=BARE_SHARING)
    assert found == pytest.approx(2000.0)

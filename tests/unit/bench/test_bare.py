"""The plain form of a target's network: as many parameters and as many outputs as the target's."""

from __future__ import annotations

import pytest
import torch

from penstock.algos.samples import network_shape
from penstock.bench.bare import BareNetwork, Form, rounds
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
def test_it_has_the_parameters_of_the_targets_network(target: str, overrides: list[str]) -> None:
    config = resolve(target, overrides)
    network = BareNetwork.of(config, on_learner=True)
    assert network is not None
    size = network_shape(config, probe(config.env)).layout.size
    assert sum(p.numel() for p in network.parameters()) == size


@pytest.mark.parametrize(("target", "overrides"), TARGETS)
def test_learning_computes_a_gradient_of_all_parameters(target: str, overrides: list[str]) -> None:
    network = BareNetwork.of(resolve(target, overrides), on_learner=True)
    assert network is not None
    network.forward(Form(False, False, 3)).square().sum().backward()
    assert all(torch.count_nonzero(p.grad) for p in network.parameters() if p.grad is not None)
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("stage", ["bare_inference", "bare_learner"])
def test_rounds_name_the_form_that_was_fastest(stage: str) -> None:
    found = rounds(resolve("cartpole", []).model_dump(mode="json"), stage, 0.05)
    assert len(found["rates"]) == ROUNDS
    assert min(found["rates"]) > 0
    assert found["note"].startswith(("fp32", "bf16"))


def test_a_network_with_memory_has_no_plain_form() -> None:
    assert rounds(resolve("memory", []).model_dump(mode="json"), "bare_learner", 0.05) == {}


def test_the_ideal_of_bare_parts_leaves_out_this_packages_own_stages() -> None:
    core_s = {"bare_environment": 3e-4, "bare_inference": 2e-4, "bare_learner": 5e-4, "write": 1.0}
    found = ideal(core_s, 2, 1e9, on_gpu=False, sharing=BARE_SHARING)
    assert found == pytest.approx(2000.0)

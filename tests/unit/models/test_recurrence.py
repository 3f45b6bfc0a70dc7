"""Recurrent networks: learner and actor compute the same across episode ends."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from fake_inference import given
from net_weights import flat_of
from penstock.actors.rollout import Rollout
from penstock.algos.acting import make_inference, make_policy
from penstock.algos.pqn import algorithm as pqn
from penstock.algos.samples import process, slot_spec
from penstock.algos.unrolled import unrolled
from penstock.configs.schedules import with_values
from penstock.configs.schema import Config
from penstock.core.params import Float32, Stamp
from penstock.models.distributions import distribution
from penstock.models.fitting import actor_critic_shape
from penstock.models.torch_cores import Core, Gru, Lstm
from penstock.models.torch_nets import build_net
from penstock.profiling.ledger import TimeLedger
from random_game import RandomGame

ENVS, UNROLL, UNROLLS = 4, 12, 4
TWO, PAIR = spaces.Discrete(2), spaces.MultiDiscrete([3, 2])
TORQUES = spaces.Box(-1, 1, (2,), np.float32)
PARTS = {"position": ((3,), "<f4"), "speed": ((2, 2), "<f4"), "action_mask": ((5,), "|u1")}


def config(**model: Any) -> Config:
    about = {"core_size": 8, "hidden": [16]} | model
    actors = {"envs": ENVS, "unroll": UNROLL}
    algo = {"name": "ppo", "reward_clip": 1.5, "reward_scale": 3.0}
    sections = {"env": {"id": "x"}, "model": about, "actors": actors, "algo": algo}
    return Config.model_validate(sections)


def wide_awake(net: nn.Module) -> Float32:
    """Random weights, as they are published: fresh ones hardly tell one state from another."""
    torch.manual_seed(4)
    with torch.no_grad():
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            small = name.endswith("log_std") or "normalizer" in name
            tensor.add_((0.1 if small else 0.4) * torch.randn_like(tensor).abs_())
    return flat_of(net)


CASES = [
    (TWO, None, {}),
    (TWO, None, {"critic": "separate"}),
    (TWO, None, {"normalize_observations": True}),
    (PAIR, None, {}),
    (PAIR, PARTS, {"normalize_observations": True, "critic": "separate"}),
    (spaces.Discrete(5), PARTS, {}),
    (TORQUES, None, {}),
    (TORQUES, None, {"gaussian": "squashed", "log_std_init": -0.5}),
]


INPUTS = [["action", "reward"], ["action"], ["reward"]]


@pytest.mark.parametrize(
    ("core", "inputs"),
    [("lstm", []), ("gru", []), ("none", []), *(("lstm", i) for i in INPUTS), ("gru", INPUTS[0])],
)
@pytest.mark.parametrize(("action_space", "arrays", "model"), CASES)
def test_the_learner_reproduces_the_actors_log_probabilities(
    core: str, inputs: list[str], action_space: Any, arrays: Any, model: dict[str, Any]
) -> None:
    """Over several unrolls, with episodes that end inside, to 1e-5 in float32."""
    cfg = config(core=core, core_inputs=inputs, **model)
    game = RandomGame(ENVS, action_space, arrays)
    net = build_net(actor_critic_shape(cfg, game.info))
    spec = slot_spec(cfg, game.info)
    inference = make_inference(cfg, game.info, 3)
    inference.refresh(given(wide_awake(net), Stamp(0, 0)))
    rollout = Rollout(game, inference, 0, TimeLedger())  # type: ignore[arg-type]
    states = []
    for index in range(UNROLLS):
        columns = spec.views(spec.zeros())
        rollout.fill(columns, index)
        process(cfg.algo, columns)
        batch = {name: torch.from_numpy(np.array(array)) for name, array in columns.items()}
        if core != "none":
            states.append(batch["core_state"])
        for envs in (slice(None), slice(1, 3), torch.tensor([3, 0])):
            found = log_probabilities(net, batch, envs)
            expected = batch["behaviour_logp"][:, envs]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert game.resets > 10
    if core != "none":
        assert not states[0].any()
        assert all(state.abs().amax(1).gt(0).any() for state in states[1:])


@pytest.mark.parametrize("core", ["lstm", "none"])
@pytest.mark.parametrize(
    ("action_space", "arrays", "model"),
    [
        (TWO, None, {"layer_norm": True}),
        (PAIR, PARTS, {"normalize_observations": True, "layer_norm": True}),
        (PAIR, None, {"core_inputs": ["action", "reward"]}),
    ],
)
def test_the_learner_of_pqn_reproduces_the_actors_values(
    core: str, action_space: Any, arrays: Any, model: dict[str, Any]
) -> None:
    """Of the taken actions, over several unrolls with episodes that end inside."""
    model = {key: value for key, value in model.items() if core != "none" or key != "core_inputs"}
    sections = config(core=core, **model).model_dump() | {"algo": {"name": "pqn"}}
    cfg = Config.model_validate(sections)
    game = RandomGame(ENVS, action_space, arrays)
    net = build_net(pqn.network(cfg, game.info))
    inference = make_inference(cfg, game.info, 3)
    inference.refresh(given(wide_awake(net), Stamp(0, 1)))
    rollout = Rollout(game, inference, 0, TimeLedger())  # type: ignore[arg-type]
    spec = slot_spec(cfg, game.info)
    options: Any = with_values(cfg.algo, 0)
    for index in range(UNROLLS):
        columns = spec.views(spec.zeros())
        rollout.fill(columns, index)
        batch = {name: torch.from_numpy(np.array(array)) for name, array in columns.items()}
        prepared = pqn.prepare(net, batch, options, [slice(0, 1), slice(1, ENVS)])
        assert prepared["q_lag"][batch["alive"]].max() <= 1e-4
        assert batch["q_taken"].std() > 0.01


def log_probabilities(net: Any, batch: dict[str, Tensor], envs: Any) -> Tensor:
    with torch.no_grad():
        outputs, values, mask = unrolled(net, batch, envs)
    alive = batch["alive"][:, envs]
    steps = alive.numel()
    assert values.shape == (steps + alive.shape[1],)
    policy = distribution(net.actions, outputs[:steps], None if mask is None else mask[:steps])
    return policy.logp(batch["action"][:, envs].flatten(0, 1)).view(alive.shape)


@pytest.mark.parametrize(("kind", "reference"), [(Lstm, nn.LSTM), (Gru, nn.GRU)])
def test_outputs_equal_torch_cells_run_episode_by_episode(kind: type[Core], reference: Any) -> None:
    torch.manual_seed(0)
    rows, envs, inputs, size = 9, 3, 5, 6
    core = kind(inputs, size)  # type: ignore[call-arg]
    with torch.no_grad():
        for parameter in core.parameters():
            parameter.copy_(torch.randn_like(parameter))
    theirs = reference(inputs, size)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(core.input.weight)
        theirs.bias_ih_l0.copy_(core.input.bias)
        theirs.weight_hh_l0.copy_(core.recurrent.weight)
        theirs.bias_hh_l0.copy_(core.recurrent.bias)
    features = torch.randn(rows, envs, inputs)
    first = torch.zeros(rows, envs, dtype=torch.bool)
    for row, env in ((0, 1), (2, 0), (3, 0), (5, 2)):
        first[row, env] = True
    before = torch.randn(envs, core.state_size)
    outputs, after = core(features, before, first)
    for env in range(envs):
        cuts = [0, *first[1:, env].nonzero()[:, 0].add(1).tolist(), rows]
        state = before[env] * ~first[0, env]
        for start, end in pairwise(cuts):
            vectors = tuple(part[None] for part in state.split(size))
            given = vectors if len(vectors) == 2 else vectors[0]
            expected, last = theirs(features[start:end, env], given)
            torch.testing.assert_close(outputs[start:end, env], expected, rtol=1e-5, atol=1e-5)
            final = torch.cat(last, 1)[0] if isinstance(last, tuple) else last[0]
            state = torch.zeros(core.state_size)
        torch.testing.assert_close(after[env], final, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Lstm, Gru])
def test_gradients_match_finite_differences(kind: type[Core]) -> None:
    """Of everything that comes in and of all weights, by torch's own check in float64."""
    torch.manual_seed(1)
    core = kind(2, 3).double()  # type: ignore[call-arg]
    first = torch.tensor([[False, True], [False, False], [True, False], [False, False]])
    features = torch.randn(4, 2, 2, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, core.state_size, dtype=torch.float64, requires_grad=True)
    names, weights = zip(*core.named_parameters(), strict=True)
    given = [torch.randn_like(weight, requires_grad=True) for weight in weights]

    def run(features: Tensor, state: Tensor, *given: Tensor) -> Any:
        named = dict(zip(names, given, strict=True))
        return torch.func.functional_call(core, named, (features, state, first))

    assert torch.autograd.gradcheck(run, (features, state, *given))


def test_no_gradient_crosses_the_beginning_of_an_episode() -> None:
    core = Lstm(2, 3)
    features = torch.randn(4, 2, 2, requires_grad=True)
    first = torch.zeros(4, 2, dtype=torch.bool)
    first[2, 0] = True
    outputs, _ = core(features, torch.zeros(2, 6), first)
    (gradient,) = torch.autograd.grad(outputs[3].sum(), features)
    assert not gradient[:2, 0].any()
    assert gradient[2:, 0].all()
    assert gradient[:, 1].all()


def test_policy_continues_from_a_given_state() -> None:
    cfg, game = config(core="gru"), RandomGame(ENVS, TWO)
    net = build_net(actor_critic_shape(cfg, game.info))
    policy = make_policy(cfg, game.info, 0)
    policy.load(wide_awake(net))
    assert policy.state.shape == (ENVS, 8)
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(3, ENVS, 4)).astype(np.float32)
    policy.outputs(obs[0])
    state, expected = policy.state.copy(), policy.outputs(obs[1]).copy()
    policy.outputs(obs[2])
    policy.state[:] = state
    np.testing.assert_array_equal(policy.outputs(obs[1]), expected)
    policy.reset(np.array([True, False, False, True]))
    assert not policy.state[[0, 3]].any()
    assert policy.state[[1, 2]].all()


@pytest.mark.gpu
@pytest.mark.parametrize("core", ["lstm", "gru"])
def test_gpu_outputs_and_gradients_equal_those_of_a_cpu(core: str) -> None:
    cfg, game = config(core=core, normalize_observations=True), RandomGame(ENVS, PAIR, PARTS)
    net = build_net(actor_critic_shape(cfg, game.info))
    spec = slot_spec(cfg, game.info)
    columns = spec.views(spec.zeros())
    inference = make_inference(cfg, game.info, 0)
    inference.refresh(given(wide_awake(net), Stamp(0, 0)))
    Rollout(game, inference, 0, TimeLedger()).fill(columns, 0)  # type: ignore[arg-type]
    found = []
    for device in ("cpu", "cuda"):
        batch = {name: torch.tensor(array, device=device) for name, array in columns.items()}
        outputs, values, mask = unrolled(net.to(device), batch, slice(1, 3))
        net.zero_grad()
        policy_of = distribution(net.actions, outputs, mask)
        (policy_of.entropy().sum() + values.sum()).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        found.append([t.detach().cpu().clone() for t in (outputs, values, *gradients)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-2, atol=1e-2)

"""A trained policy in a program: its inputs, its outputs and its errors."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import msgpack
import numpy as np
import numpy.typing as npt
import pytest
from gymnasium import spaces
from safetensors import safe_open
from safetensors.numpy import save as to_bytes

import penstock
from penstock import LoadedPolicy, UserError
from penstock.algos.acting import make_policy
from penstock.algos.samples import network_shape
from penstock.configs.load import dump, resolve
from penstock.core import used_names
from penstock.envs import EnvInfo, probe
from penstock.envs.space_json import brief_spaces, from_json, to_json
from penstock.envs.vector_env import action_map
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.models.torch_nets import filled_net

Array = npt.NDArray[Any]


class Shown(gymnasium.Env[Any, Any]):
    """An environment of the spaces that it is given."""

    def __init__(self, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation, action

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(0)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.0, False, False, {}


THREE = spaces.Box(-1.0, 1.0, (3,), np.float32)
CELLS = spaces.Box(0, 10, (3, 3), np.uint8, seed=0)


def cells() -> Shown:
    return Shown(CELLS, spaces.Discrete(3))


def starts_at_five() -> Shown:
    return Shown(THREE, spaces.Discrete(3, start=5))


def bounded() -> Shown:
    low, high = np.array([[0.0, -4.0], [10.0, 0.0]], np.float32)
    return Shown(THREE, spaces.Box(low, high, dtype=np.float32))


def several() -> Shown:
    return Shown(THREE, spaces.MultiDiscrete([2, 3], start=[1, 10]))


def switches() -> Shown:
    return Shown(THREE, spaces.MultiBinary(4))


def numbered() -> Shown:
    return Shown(spaces.Discrete(6, start=2), spaces.Discrete(2))


def items() -> Shown:
    return Shown(spaces.Discrete(1500, start=2), spaces.Discrete(4))


def parts() -> Shown:
    seen = {"place": spaces.Discrete(4), "speed": spaces.Box(-1, 1, (2,), np.float32)}
    return Shown(spaces.Dict(seen), spaces.Discrete(2))


def a_run(folder: Path, target: str, overrides: list[str], seed: int = 0) -> Path:
    """The folder of a run whose checkpoint `last` holds random weights."""
    config = resolve(target, overrides)
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump(config))
    used_names.note(config)
    layout = network_shape(config, probe(config.env)).layout
    weights = 0.2 * np.random.default_rng(seed).standard_normal(layout.size, np.float32)
    checkpoint_format.save(folder / "checkpoints" / "last", Checkpoint(layout, weights))
    return folder


def loaded(folder: Path, game: str, *overrides: str, **options: Any) -> LoadedPolicy:
    a_run(folder, f"{__name__}:{game}", list(overrides))
    return penstock.load_policy(folder, **options)


@pytest.fixture
def cartpole(tmp_path: Path) -> LoadedPolicy:
    return penstock.load_policy(a_run(tmp_path, "cartpole", []))


def of_numpy(policy: LoadedPolicy, observations: Array) -> Array:
    """CartPole's logits by hand: two tanh layers of the policy's tower, then its head."""
    named = checkpoint_format.load(
        Path(policy.config.run.dir or "") / "checkpoints/last"
    ).layout.views(
        checkpoint_format.load(Path(policy.config.run.dir or "") / "checkpoints/last").weights
    )
    x = observations.astype(np.float64)
    for i in range(2):
        x = np.tanh(x @ named[f"hidden.{i}.weight"][0] + named[f"hidden.{i}.bias"][0])
    return np.asarray(x @ named["policy.weight"].T + named["policy.bias"])


def test_loaded_and_exported_policies_play_in_the_way_found_better(tmp_path: Path) -> None:
    folder = a_run(tmp_path, "cartpole", [])
    last, file = folder / "checkpoints" / "last", tmp_path / "policy.safetensors"
    assert not penstock.load_policy(folder).sample  # as in an older version
    stored = checkpoint_format.load(last)
    play = {"way": "sampled", "greedy": {"mean": -20.0, "se": 9.0}}
    checkpoint_format.save(last, replace(stored, meta={"play": play}))
    policy = penstock.load_policy(folder)
    assert policy.sample
    policy.save(file)
    assert penstock.load_policy(file).sample
    assert exported.read(file).play == play
    assert not penstock.load_policy(file, sample=False).sample
    at_rest = np.zeros((200, 4), np.float32)
    assert len(set(penstock.load_policy(file)(at_rest)[0].tolist())) == 2
    assert len(set(penstock.load_policy(file, sample=False)(at_rest)[0].tolist())) == 1


def test_a_file_of_half_the_size_holds_parameters_as_float16(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "lunarlander", ["model.hidden=[64,64]"])
    policy, file = penstock.load_policy(run), tmp_path / "half.safetensors"
    whole = policy.save(tmp_path / "whole.safetensors")
    assert policy.save(file, half=True) < 0.6 * whole
    layout = network_shape(policy.config, policy.info).layout
    kept = layout.views(exported.read(file).weights)
    for name, array in layout.views(policy._weights).items():
        rounded = array if name.startswith("normalizer.") else array.astype(np.float16)
        np.testing.assert_array_equal(kept[name], rounded.astype(np.float32))


def test_a_file_with_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", "cartpole", [])
    file = tmp_path / "agent.safetensors"
    penstock.load_policy(run).save(file)
    with safe_open(file, framework="numpy") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        about = stored.metadata()
    next(iter(tensors.values())).flat[0] = np.nan
    file.write_bytes(to_bytes(tensors, about))
    with pytest.raises(UserError, match="has numbers that are not finite"):
        penstock.load_policy(file)


def test_policy_takes_the_likeliest_action_for_single_and_batched_observations(
    tmp_path: Path,
) -> None:
    policy = penstock.load_policy(a_run(tmp_path, "cartpole", [f"run.dir={tmp_path}"]))
    seen = np.random.default_rng(1).standard_normal((50, 4)).astype(np.float32)
    wanted = of_numpy(policy, seen).argmax(-1)
    assert len(set(wanted)) == 2
    batch, state = policy(seen)
    assert state is None
    assert batch.tolist() == wanted.tolist()
    ones = [policy(row)[0] for row in seen]
    assert ones == wanted.tolist()
    assert all(type(action) is int for action in ones)
    assert batch.tolist() == wanted.tolist(), "a later call has changed what an earlier one gave"


def test_actions_of_a_policy_are_accepted_by_the_environment(cartpole: LoadedPolicy) -> None:
    env = gymnasium.make("CartPole-v1")
    cartpole.check(env)
    obs, _ = env.reset(seed=3)
    for _ in range(5):
        action, _ = cartpole(obs)
        obs, *_ = env.step(action)


@pytest.mark.parametrize("game", ["starts_at_five", "bounded", "several", "switches"])
@pytest.mark.parametrize("sample", [False, True])
def test_actions_lie_in_the_space_of_the_environment(
    tmp_path: Path, game: str, sample: bool
) -> None:
    algo = () if game == "starts_at_five" else ("algo.name=ppo",)
    policy = loaded(tmp_path, game, *algo, sample=sample)
    rng = np.random.default_rng(5)
    taken = [policy(rng.uniform(-1, 1, 3).astype(np.float32))[0] for _ in range(40)]
    assert all(policy.action_space.contains(action) for action in taken)
    assert len({str(action) for action in taken}) > 1
    batch, _ = policy(rng.uniform(-1, 1, (6, 3)).astype(np.float32))
    assert all(policy.action_space.contains(action) for action in batch)


def test_policy_takes_dict_observations(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "parts", "algo.name=ppo")
    speed = np.random.default_rng(0).uniform(-1, 1, (4, 2)).astype(np.float32)
    one_by_one = [policy({"place": i, "speed": speed[i]})[0] for i in range(4)]
    together, _ = policy({"place": np.arange(4), "speed": speed})
    assert together.tolist() == one_by_one
    with pytest.raises(UserError, match=r"the observation is without speed"):
        policy({"place": 1})
    with pytest.raises(UserError, match=r"of parts that are not equally many: this policy was"):
        policy({"place": np.arange(3), "speed": speed})
    with pytest.raises(UserError, match=r"is, in speed, of shape \[3\] where \[2\] belongs"):
        policy({"place": 1, "speed": np.zeros(3)})
    with pytest.raises(UserError, match=r"the observation is without place"):
        policy(np.zeros(2))


def test_policy_takes_discrete_observations(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "numbered", "algo.name=ppo")
    one_by_one = [policy(number)[0] for number in range(2, 8)]
    assert len(set(one_by_one)) == 2
    assert policy(np.arange(2, 8))[0].tolist() == one_by_one
    assert policy([2, 3])[0].tolist() == one_by_one[:2]


def test_sampling_repeats_with_its_seed(tmp_path: Path) -> None:
    a_run(tmp_path, "cartpole", [])
    obs = np.zeros((64, 4), np.float32)
    first, again, other = (
        penstock.load_policy(tmp_path, sample=True, seed=seed)(obs)[0].tolist()
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert len(set(first)) == 2


def test_batches_of_other_sizes_have_other_random_numbers(tmp_path: Path) -> None:
    policy = penstock.load_policy(a_run(tmp_path, "cartpole", []), sample=True)
    at_rest = np.zeros((80, 4), np.float32)
    turns = [[policy(at_rest[:n])[0].tolist() for n in range(60, 72)] for _ in range(3)]
    assert len({str(actions[:60]) for turn in turns for actions in turn}) == 36


@pytest.mark.parametrize("seed", [-1, 1.5, "1"])
def test_seed_must_be_an_integer(tmp_path: Path, seed: Any) -> None:
    a_run(tmp_path, "cartpole", [])
    with pytest.raises(UserError, match=r"seed is .*; it must be a whole number of at least 0"):
        penstock.load_policy(tmp_path, seed=seed)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_state_is_passed_in_and_returned(tmp_path: Path, kind: str) -> None:
    policy = loaded(tmp_path, "bounded", "algo.name=ppo", f"model.kind={kind}")
    seen = np.random.default_rng(2).uniform(-1, 1, (5, 3, 3)).astype(np.float32)
    state: Any = None
    alone = []
    for row in seen[:, 1]:
        action, state = policy(row, state)
        assert state.ndim == 1
        alone.append(action)
    batch_state: Any = None
    together = []
    for rows in seen:
        actions, batch_state = policy(rows, batch_state)
        together.append(actions[1])
    np.testing.assert_allclose(together, alone, atol=1e-4)
    np.testing.assert_allclose(batch_state[1], state, atol=1e-4)
    forgetful, _ = policy(seen[4, 1])
    assert not np.allclose(forgetful, alone[4], atol=1e-2), "what it remembers counts for nothing"
    batch_state[2] = 0  # an episode begins there
    actions, _ = policy(seen[4], batch_state)
    np.testing.assert_allclose(actions[2], policy(seen[4, 2])[0], atol=1e-4)
    with pytest.raises(UserError, match="the state has shape"):
        policy(seen[0], state)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_state_of_q_values_is_that_of_an_unrolled_network(
    tmp_path: Path, kind: str
) -> None:
    torch = pytest.importorskip("torch")
    policy = loaded(tmp_path, "starts_at_five", "algo.name=r2d2", f"model.core={kind}")
    seen = np.random.default_rng(2).uniform(-1, 1, (5, 3, 3)).astype(np.float32)
    net: Any = filled_net(network_shape(policy.config, policy.info), policy._weights)
    q, last_state = net.unroll(torch.from_numpy(seen), torch.zeros(3, net.state_size))

    state: Any = None
    for row, expected in zip(seen, q.view(5, 3, -1), strict=True):
        assert_close(policy.details(row, state).q, expected)
        actions, state = policy(row, state)
        assert actions.tolist() == (5 + expected.argmax(1)).tolist()
    assert_close(state, last_state)


READS = ("algo.name=ppo", "model.core=lstm", "model.core_size=8", "algo.reward_clip=1")


@pytest.mark.parametrize("game", ["starts_at_five", "several", "bounded"])
def test_a_policy_that_reads_action_and_reward_decides_as_actors_do(
    tmp_path: Path, game: str
) -> None:
    policy = loaded(tmp_path, game, *READS, "model.core_inputs=[action,reward]", "actors.envs=8")
    assert policy.reads_reward
    actor = make_policy(policy.config, policy.info, 0)
    actor.load(policy._weights)

    rng = np.random.default_rng(0)
    rewards: Any = None
    state: Any = None
    for _ in range(12):
        seen = rng.uniform(-1, 1, (8, 3)).astype(np.float32)
        actions, state = policy(seen, state, rewards)
        expected = action_map(policy.action_space)(actor.greedy(seen))
        np.testing.assert_allclose(actions, expected, atol=1e-5)
        rewards = 3 * rng.normal(size=8)
        actor.take_rewards(rewards)
        ended = rng.random(8) < 0.2
        actor.reset(ended)
        state[ended] = 0
    details = [policy.details(seen, state, rewards + more) for more in (0, 1)]
    first, second = (np.array(each.state) for each in details)
    assert not np.allclose(first, second), "the reward has no effect"


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (None, "this policy reads the last reward"),
        ([1.0, 2.0], r"the reward has shape \[2\] where \[\] belongs"),
        (np.nan, "there is a reward of nan"),
        ("much", "the reward is 'much', which is no number"),
    ],
)
def test_a_reward_that_is_needed_is_checked(tmp_path: Path, reward: Any, words: str) -> None:
    policy = loaded(tmp_path, "starts_at_five", *READS, "model.core_inputs=[reward]")
    seen = np.zeros(3, np.float32)
    _, state = policy(seen)
    with pytest.raises(UserError, match=words):
        policy(seen, state, reward)


def test_a_reward_that_is_not_read_changes_nothing(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "starts_at_five", *READS, "model.core_inputs=[action]")
    seen = np.zeros(3, np.float32)
    _, state = policy(seen)
    assert not policy.reads_reward
    np.testing.assert_array_equal(policy(seen, state, 7.0)[1], policy(seen, state)[1])


def masked() -> Shown:
    return Shown(
        spaces.Dict({"speed": THREE, "action_mask": spaces.MultiBinary(3)}), spaces.Discrete(3)
    )


def forward(policy: LoadedPolicy, packed: Array) -> tuple[Any, Any]:
    """Outputs and values by the learner's network in torch; values None without a critic."""
    torch = pytest.importorskip("torch")
    from penstock.models.torch_nets import build_net

    shape: Any = network_shape(policy.config, policy.info)
    net: Any = build_net(shape).requires_grad_(False).eval()
    source = shape.layout.views(policy._weights)
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        np.copyto(tensor.numpy(), source[name])
    rows = torch.from_numpy(packed)
    if policy.config.model.core != "none":
        outputs, values = net(rows[None], torch.zeros(len(rows), shape.state_size))
    else:
        found = net(rows)
        outputs, values = found if isinstance(found, tuple) else (found, None)
    return outputs, values


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("core", ["none", "lstm"])
def test_details_of_choices_are_those_of_torchs_distribution(
    tmp_path: Path, core: str, sample: bool
) -> None:
    torch = pytest.importorskip("torch")
    policy = loaded(tmp_path, "several", "algo.name=ppo", f"model.core={core}", sample=sample)
    seen = np.random.default_rng(1).uniform(-1, 1, (7, 3)).astype(np.float32)
    found = policy.details(seen)
    logits, values = forward(policy, seen)
    assert_close(found.logits, logits)
    assert_close(found.value, values)

    parts = [torch.distributions.Categorical(logits=part) for part in logits.split([2, 3], 1)]
    chosen = torch.from_numpy(found.action - [1, 10]).T
    assert_close(found.probabilities, torch.cat([part.probs for part in parts], 1))
    log_probs = [part.log_prob(choice) for part, choice in zip(parts, chosen, strict=True)]
    assert_close(found.log_prob, sum(log_probs))
    assert_close(found.entropy, sum(part.entropy() for part in parts))
    assert (found.q, found.mean, found.std) == (None, None, None)
    assert (found.state is None) is (core == "none")


def test_details_of_a_masked_choice_have_probability_zero(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    policy = loaded(tmp_path, "masked", "algo.name=ppo", sample=True)
    speed = np.random.default_rng(1).uniform(-1, 1, (4, 3)).astype(np.float32)
    mask = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 1, 1]], np.int8)
    found = policy.details({"speed": speed, "action_mask": mask})
    assert found.probabilities is not None
    assert (found.probabilities[mask == 0] == 0).all()

    packed = np.empty((4, *policy.info.observation_space.shape), np.uint8)
    policy._packer.write({"speed": speed, "action_mask": mask}, packed)
    logits, _ = forward(policy, packed)
    allowed = torch.where(torch.from_numpy(mask) != 0, logits, -torch.inf)
    expected = torch.distributions.Categorical(logits=allowed)
    assert_close(found.probabilities, expected.probs)
    assert_close(found.log_prob, expected.log_prob(torch.from_numpy(found.action)))
    # torch's own entropy is NaN where a logit is minus infinity.
    assert_close(found.entropy, torch.special.entr(expected.probs).sum(1))


@pytest.mark.parametrize("sample", [False, True])
def test_details_of_numbers_are_those_of_a_normal_distribution(
    tmp_path: Path, sample: bool
) -> None:
    torch = pytest.importorskip("torch")
    policy = loaded(tmp_path, "bounded", "algo.name=ppo", sample=sample)
    # Small observations and means, so that no action is clipped.
    layout = network_shape(policy.config, policy.info).layout
    layout.views(policy._weights)["log_std"][:] = [-3, -2.5]
    seen = 0.01 * np.random.default_rng(1).uniform(-1, 1, (6, 3)).astype(np.float32)
    found = policy.details(seen)
    outputs, values = forward(policy, seen)
    mean, log_std = outputs.chunk(2, 1)
    assert_close(found.mean, mean)
    assert_close(found.std, log_std.exp())
    assert_close(found.value, values)

    # The actions are mapped from -1 ... 1 to 0 ... 10 and -4 ... 0.
    numbers = (found.action - [5, -2]) / [5, 2]
    assert np.abs(numbers).max() < 1
    assert (np.abs(numbers - mean.numpy()).max() > 1e-3) is np.bool_(sample)
    expected = torch.distributions.Normal(mean, log_std.exp())
    log_prob = expected.log_prob(torch.from_numpy(numbers)).sum(1)
    assert found.log_prob is not None
    np.testing.assert_allclose(np.array(found.log_prob), log_prob, rtol=1e-4, atol=1e-4)
    assert_close(found.entropy, expected.entropy().sum(1))
    assert (found.logits, found.probabilities, found.q) == (None, None, None)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("options", [("algo.name=sac",), ("algo.name=ppo",)], ids=["sac", "ppo"])
def test_details_of_squashed_numbers_are_those_of_torchs_distribution(
    tmp_path: Path, options: tuple[str, ...], sample: bool
) -> None:
    torch = pytest.importorskip("torch")
    if options == ("algo.name=ppo",):
        options = (*options, "model.gaussian=squashed")
    policy = loaded(tmp_path, "bounded", *options, sample=sample)
    seen = np.random.default_rng(1).uniform(-0.3, 0.3, (6, 3)).astype(np.float32)
    found = policy.details(seen)
    outputs, values = forward(policy, seen)
    mean, log_std = outputs.chunk(2, 1)
    assert_close(found.mean, mean)
    assert_close(found.std, log_std.exp())
    assert (found.value is None) is (values is None)

    numbers = (found.action.astype(np.float64) - [5, -2]) / [5, 2]
    squashed = torch.distributions.TransformedDistribution(
        torch.distributions.Normal(mean.double(), log_std.double().exp()),
        torch.distributions.TanhTransform(),
    )
    # The inverse of tanh loses digits near its ends, and the action is float32.
    inside = np.abs(numbers).max(1) < 0.999
    assert inside.any()
    log_prob = squashed.log_prob(torch.from_numpy(numbers)).sum(1).numpy()
    assert found.log_prob is not None
    np.testing.assert_allclose(np.array(found.log_prob)[inside], log_prob[inside], atol=5e-3)
    assert found.entropy is None


def test_details_of_q_values_have_no_distribution(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "starts_at_five", "algo.name=dqn", sample=False)
    seen = np.random.default_rng(1).uniform(-1, 1, (6, 3)).astype(np.float32)
    found = policy.details(seen)
    q, _ = forward(policy, seen)
    assert_close(found.q, q)
    assert_close(found.value, q.max(1).values)
    assert found.action.tolist() == (5 + q.argmax(1)).tolist()
    assert (found.log_prob, found.entropy, found.logits) == (None, None, None)


@pytest.mark.parametrize("game", ["several", "bounded", "starts_at_five"])
def test_details_of_one_observation_are_a_row_of_those_of_a_batch(
    tmp_path: Path, game: str
) -> None:
    policy = loaded(tmp_path, game, "algo.name=ppo", "model.core=gru", sample=False)
    seen = np.random.default_rng(3).uniform(-1, 1, (5, 3)).astype(np.float32)
    together = vars(policy.details(seen))
    alone = vars(policy.details(seen[2]))
    for name, array in together.items():
        if array is None:
            assert alone[name] is None
        else:
            assert_close(alone[name], array[2])
    assert {type(alone[name]) for name in ("value", "log_prob", "entropy")} == {float}
    action, state = policy(seen[2])
    np.testing.assert_array_equal(alone["action"], action)
    np.testing.assert_array_equal(alone["state"], state)
    with pytest.raises(UserError, match="the state has shape"):
        policy.details(seen, alone["state"])


def test_malformed_observations_are_refused(cartpole: LoadedPolicy) -> None:
    for shape in [(3,), (2, 3), (2, 2, 4), (0, 4), ()]:
        with pytest.raises(UserError, match=r"trained on CartPole-v1, which shows Box"):
            cartpole(np.zeros(shape, np.float32))
    with pytest.raises(UserError, match="the observation is of rows that differ in length: this"):
        cartpole([[0, 1, 2, 3], [0]])
    with pytest.raises(UserError, match="nan at"):
        cartpole(np.array([0, np.nan, 0, 0], np.float32))
    with pytest.raises(UserError, match="without memory"):
        cartpole(np.zeros(4, np.float32), np.zeros(8, np.float32))


def test_discrete_observation_outside_its_space_is_refused(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "numbered", "algo.name=ppo")
    for wrong in (1, 8, [3, 99]):
        with pytest.raises(UserError, match=r"which is not in Discrete"):
            policy(wrong)


def test_environment_with_other_spaces_is_refused(cartpole: LoadedPolicy) -> None:
    with pytest.raises(UserError, match=r"CartPole-v1, whose observations are Box.*, \(4,\), "):
        cartpole.check(gymnasium.make("Acrobot-v1"))
    other = Shown(cartpole.observation_space, spaces.Discrete(3))
    with pytest.raises(UserError, match=r"actions are Discrete\(2\), and the .* Discrete\(3\)"):
        cartpole.check(other)


def test_folder_without_a_run_or_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run; give the folder of a run"):
        penstock.load_policy(tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text(dump(resolve("cartpole")))
    with pytest.raises(UserError, match="give the folder of a run that has saved a checkpoint"):
        penstock.load_policy(tmp_path, checkpoint="last")


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    a_run(tmp_path, "cartpole", [])
    (tmp_path / "config.yaml").write_text(dump(resolve("cartpole", ["model.hidden=[8]"])))
    with pytest.raises(UserError, match="is of another network"):
        penstock.load_policy(tmp_path)


GAMES = ["starts_at_five", "bounded", "several", "switches", "numbered", "parts"]


@pytest.mark.parametrize("game", GAMES)
def test_exported_policy_acts_the_same_without_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, game: str
) -> None:
    policy = loaded(tmp_path, game, "algo.name=ppo", "model.core=gru")
    nbytes = policy.save(tmp_path / "policy.safetensors")
    assert nbytes == (tmp_path / "policy.safetensors").stat().st_size
    monkeypatch.setitem(sys.modules, __name__, None)  # nobody can import it any more
    with pytest.raises(UserError, match="there is no module"):
        penstock.load_policy(tmp_path)
    again = penstock.load_policy(tmp_path / "policy.safetensors")
    assert again.observation_space == policy.observation_space
    assert again.action_space == policy.action_space
    policy.observation_space.seed(1)
    state: Any = None
    state_again: Any = None
    for _ in range(10):
        seen = policy.observation_space.sample()
        action, state = policy(seen, state)
        action_again, state_again = again(seen, state_again)
        np.testing.assert_array_equal(action_again, action)
        np.testing.assert_array_equal(state_again, state)


def test_empty_layout_entries_of_older_files_are_ignored(tmp_path: Path) -> None:
    """As those of 0.1 have, for choices and parts of observations."""
    policy, file = loaded(tmp_path, "cells"), tmp_path / "policy.safetensors"
    policy.save(file)
    with safe_open(file, "numpy") as read:
        about = json.loads(read.metadata()["penstock_policy"])
        tensors = {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118
    about["layout"].append(["floats.0", [0, 8, 16]])
    tensors["floats.0"] = np.zeros((0, 8, 16), np.float32)
    file.write_bytes(to_bytes(tensors, {"penstock_policy": json.dumps(about)}))
    seen = np.stack([CELLS.sample() for _ in range(9)])
    np.testing.assert_array_equal(penstock.load_policy(file)(seen)[0], policy(seen)[0])


def test_older_file_without_a_scale_divides_bytes_by_255(tmp_path: Path) -> None:
    """Bytes up to 10 were divided by 255."""
    policy = loaded(tmp_path, "cells")
    old = loaded(tmp_path / "old", "cells", "model.scale=bytes")
    file = tmp_path / "policy.safetensors"
    old.save(file)
    with safe_open(file, "numpy") as read:
        about = json.loads(read.metadata()["penstock_policy"])
        tensors = {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118
    del about["config"]["model"]["scale"]
    file.write_bytes(to_bytes(tensors, {"penstock_policy": json.dumps(about)}))
    seen = np.stack([CELLS.sample() for _ in range(99)])
    np.testing.assert_array_equal(penstock.load_policy(file)(seen)[0], old(seen)[0])
    assert (policy(seen)[0] != old(seen)[0]).any()


def test_older_file_of_many_choices_reads_them_one_hot(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "items")
    old = loaded(tmp_path / "old", "items", "env.embed_above=1000000")
    assert policy.info.observation_space.shape == (8,)
    assert old.info.observation_space.shape == (1500,)
    file = tmp_path / "policy.safetensors"
    seen = np.arange(2, 1502, 7)
    for each in (policy, old):
        each.save(file)
        np.testing.assert_array_equal(penstock.load_policy(file)(seen)[0], each(seen)[0])
    with safe_open(file, "numpy") as read:
        about = json.loads(read.metadata()["penstock_policy"])
        tensors = {name: read.get_tensor(name) for name in read.keys()}  # noqa: SIM118
    del about["config"]["env"]["embed_above"]
    file.write_bytes(to_bytes(tensors, {"penstock_policy": json.dumps(about)}))
    np.testing.assert_array_equal(penstock.load_policy(file)(seen)[0], old(seen)[0])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(0, 255, (4, 84, 84), np.uint8),
        spaces.Box(-np.inf, np.array([0.1, np.inf], np.float32), (2,), np.float32),
        spaces.Box(np.float64(0.1), np.float64(0.3), (), np.float64),
        spaces.MultiDiscrete(np.array([[2, 3]]), start=np.array([[1, 10]])),
        spaces.MultiBinary([2, 3]),
        spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary(2)]),
        spaces.Dict(OrderedDict(z=THREE, a=spaces.Dict({"b": spaces.Discrete(2)}))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_space_survives_json(space: spaces.Space[Any]) -> None:
    again = from_json(json.loads(json.dumps(to_json(space))))
    assert again == space
    assert again.dtype == space.dtype
    if isinstance(space, spaces.Dict):
        assert isinstance(again, spaces.Dict)
        assert list(again.spaces) == list(space.spaces)


def test_brief_spaces_are_small_and_sufficient_for_networks() -> None:
    low = np.linspace(-3, 0, 3 * 90 * 90, dtype=np.float32).reshape(3, 90, 90)
    parts = {"seen": spaces.Box(low, low + 5), "speed": spaces.Box(-low[0, :2, 0], np.float32(9))}
    own = spaces.Dict(OrderedDict(parts)), spaces.Box(low.ravel()[:70], np.float32(1), (70,))
    packed = msgpack.packb(brief_spaces(*own))
    assert len(packed) < 2_000
    observations, actions = (from_json(space) for space in msgpack.unpackb(packed))
    assert actions == own[1]
    info, again = (EnvInfo.of_spaces("it", each, 1, "") for each in (own, (observations, actions)))
    assert again.parts == info.parts
    assert again.parts[0].bounds == (-3.0, 5.0)
    assert again.observation_space == info.observation_space


def test_file_without_a_policy_is_refused_in_one_sentence(
    tmp_path: Path, cartpole: LoadedPolicy
) -> None:
    good, wrong = tmp_path / "good.safetensors", tmp_path / "wrong"
    cartpole.save(good)
    ours = good.read_bytes()
    checkpoint_bytes = (tmp_path / "checkpoints/last/checkpoint.safetensors").read_bytes()
    changed = ours.replace(b'\\"hidden', b'\\"hidded')  # what the network's parts are called
    for data in (b"", b"import torch", checkpoint_bytes, ours[:-8], changed):
        wrong.write_bytes(data)
        with pytest.raises(UserError, match="no policy that penstock has exported") as refused:
            penstock.load_policy(wrong)
        assert "\n" not in str(refused.value)
    wrong.write_bytes(ours.replace(b'\\"format\\": 1', b'\\"format\\": 2'))
    with pytest.raises(UserError, match="has format 2, this version reads 1; export it again"):
        penstock.load_policy(wrong)


def test_unwritable_policy_file_is_refused(tmp_path: Path, cartpole: LoadedPolicy) -> None:
    with pytest.raises(UserError, match=r"is a folder; name a file in it, such as .*agent.saf"):
        cartpole.save(tmp_path)
    with pytest.raises(UserError, match="cannot be written: No such file or directory; name"):
        cartpole.save(tmp_path / "nowhere" / "policy.safetensors")
    rule = r"p\.onnx does not end in \.safetensors, and only penstock export writes other formats; "
    with pytest.raises(UserError, match=rule + r"name the file p\.safetensors"):
        cartpole.save(tmp_path / "p.onnx")
    with pytest.raises(UserError, match=r"p\.pt ends in neither of \.safetensors and \.onnx"):
        cartpole.save(tmp_path / "p.pt")
    assert not [*tmp_path.glob("p.*")]

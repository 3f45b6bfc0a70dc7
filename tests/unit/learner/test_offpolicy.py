"""The off-policy trainer on arrays: learning, target networks, and resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from data_algorithms import train_dqn_on
from penstock import replay
from penstock.algos.acting import make_policy
from penstock.algos.dqn.update import DqnUpdate
from penstock.algos.sac.update import SacUpdate
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import StepHooks, TransitionSequences
from penstock.core.observations import laid_out, row_nbytes, views
from penstock.core.params import Float32
from penstock.envs.vector_env import EnvInfo
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.sources.batch_sampler import ReplayBatch
from penstock.learner.state import set_weights, weights_of
from penstock.learner.sync.gradient_sync import SingleLearner
from penstock.models.normalizer import MOST_FRAMES

CHOICES = EnvInfo(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(4), 1, "")
TORQUES = EnvInfo(spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-2, 2, (1,), np.float32), 1, "")
FRAMES = EnvInfo(spaces.Box(0, 255, (2, 40, 40), np.uint8), spaces.Discrete(3), 1, "")
COMMON = ("learner.precision=fp32", "learner.device=cpu", "model.activation=relu")
GAMES = {"dqn": CHOICES, "sac": TORQUES, "td3": TORQUES}

Batch = dict[str, Any]


def trainer(algo: str, *options: str, info: EnvInfo | None = None) -> OffPolicyTrainer:
    config = resolve("Acrobot-v1", [f"algo.name={algo}", *COMMON, *options])
    return OffPolicyTrainer(config, info or GAMES[algo])


def random_batch(algo: str, seed: int = 0, size: int = 32, info: EnvInfo | None = None) -> Batch:
    rng = np.random.default_rng(seed)
    info = info or GAMES[algo]
    space, actions = info.observation_space, info.action_space
    shape = (size, *space.shape)

    def observations() -> Any:
        if space.dtype == np.uint8:
            return rng.integers(0, 256, shape).astype(np.uint8)
        return rng.normal(size=shape).astype(np.float32)

    return {
        "obs": observations(),
        "action": rng.integers(0, actions.n, size).astype(np.int32)
        if isinstance(actions, spaces.Discrete)
        else rng.uniform(-1, 1, (size, *actions.shape)).astype(np.float32),
        "reward": rng.normal(size=size).astype(np.float32),
        "next_obs": observations(),
        "discount": np.where(rng.random(size) < 0.2, 0, 0.99).astype(np.float32),
        "weights": rng.uniform(0.2, 1, size).astype(np.float32),
    }


def values(made: OffPolicyTrainer) -> Float32:
    flat: Float32 = torch.cat([t.detach().flatten() for t in made.published_tensors()]).numpy()
    return flat


def dqn_of(made: OffPolicyTrainer) -> DqnUpdate:
    assert isinstance(made._update, DqnUpdate)
    return made._update


def sac_of(made: OffPolicyTrainer) -> SacUpdate:
    assert isinstance(made._update, SacUpdate)
    return made._update


def errors_by(made: OffPolicyTrainer, batch: Batch) -> Float32:
    """Where values and targets are those of the network that is published now, in numpy."""
    q = []
    for name in ("obs", "next_obs"):
        policy = make_policy(made.config, CHOICES, 0)
        policy.load(values(made))
        q.append(policy.outputs(batch[name]).copy())
    target = batch["reward"] + batch["discount"] * q[1].max(1)
    errors: Float32 = np.abs(target - q[0][np.arange(32), batch["action"]])
    return errors


def test_td_errors_are_of_the_published_network_before_the_update() -> None:
    made = trainer("dqn", "algo.double=false", "actors.envs=32")
    batch = random_batch("dqn")
    expected = errors_by(made, batch)
    errors = made.update(batch).numpy()
    np.testing.assert_allclose(errors, expected, rtol=1e-4, atol=1e-5)
    assert errors.dtype == np.float32
    assert not np.allclose(made.update(batch).numpy(), errors)
    assert made.progress.learner_steps == made.progress.version == 2


@pytest.mark.parametrize("duelling", ["false", "true"])
def test_targets_use_the_last_copied_network(duelling: str) -> None:
    options = ("algo.double=false", "algo.target_every=3", f"algo.duelling={duelling}")
    made = trainer("dqn", "actors.envs=32", "learner.lr=0.01", *options)
    for step in range(3):
        made.update(random_batch("dqn", step))
    batch = random_batch("dqn", 3)
    expected = errors_by(made, batch)  # the third update copied this network
    np.testing.assert_allclose(made.update(batch), expected, rtol=1e-4, atol=1e-4)


def test_rate_of_exploration_follows_the_agent_steps_and_is_published() -> None:
    made = trainer("dqn", "algo.epsilon={from: 1, to: 0.2}", "stop.env_steps=1000")
    for trained_steps, expected in ((0, 1.0), (250, 0.8), (1000, 0.2), (2000, 0.2)):
        made.progress.trained_steps = trained_steps
        made.update(random_batch("dqn"))
        assert values(made)[-1] == pytest.approx(expected)
        assert made.statistics()["epsilon"] == pytest.approx(expected)
    assert made.layout.entries[-1] == ("epsilon", (1,))


def test_noise_of_both_networks_is_drawn_for_each_update() -> None:
    """At the same weights errors differ, and a resumed generator draws the same."""
    made = trainer("dqn", "algo.noisy=true", "learner.lr=1e-30")
    batch = random_batch("dqn")
    state = torch.get_rng_state()
    errors = [made.update(batch).numpy() for _ in range(2)]
    assert not np.allclose(*errors)
    torch.set_rng_state(state)
    np.testing.assert_allclose(made.update(batch), errors[0], rtol=1e-5)

    update = dqn_of(made)
    noise = [net.head._noise for net in (update.net, update.target_net)]
    assert not torch.equal(noise[0][0], noise[1][0]), "the target network has its own"


def test_target_network_is_copied_every_target_every_steps() -> None:
    made = trainer("dqn", "algo.target_every=3")
    start, target = values(made), dqn_of(made)._target
    for step in range(1, 7):
        made.update(random_batch("dqn", step))
        if step % 3:
            assert not np.array_equal(target.numpy(), values(made))
        else:
            np.testing.assert_array_equal(target.numpy(), values(made))
        if step < 3:
            np.testing.assert_array_equal(target.numpy(), start)


def test_target_critics_follow_by_tau() -> None:
    made = trainer("sac", "algo.tau=0.25")
    update = sac_of(made)
    before = update.critics._target.numpy().copy()
    made.update(random_batch("sac"))
    critics = update.critics.optimizer.values.detach().numpy()
    assert not np.array_equal(before, critics)
    np.testing.assert_allclose(
        update.critics._target, 0.75 * before + 0.25 * critics, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("info", [CHOICES, FRAMES])
def test_micro_batches_give_the_update_of_the_whole(info: EnvInfo) -> None:
    found = []
    for size in (256, 5):
        made = trainer("dqn", f"learner.micro_batch={size}", info=info)
        errors = made.update(random_batch("dqn", info=info)).numpy()
        found.append((errors, made.optimizers()["q"].grads, made.statistics()))
    (errors, grads, statistics), (other, parts, others) = found
    np.testing.assert_allclose(errors, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grads, parts, rtol=1e-4, atol=1e-4)
    assert statistics == pytest.approx(others, rel=1e-4)


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_weights_scale_the_gradient_and_are_1_where_absent(algo: str) -> None:
    plain, ones, some = (random_batch(algo) for _ in range(3))
    del plain["weights"]
    ones["weights"][:] = 1
    stepped = []
    for batch in (plain, ones, some):
        made = trainer(algo)
        made.update(batch)
        stepped.append(made.optimizers()["q" if algo == "dqn" else "critics"].grads.clone())
    assert torch.equal(stepped[0], stepped[1])
    assert not torch.allclose(stepped[0], stepped[2])


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_published_tensors_have_the_layout_of_the_acting_policy(algo: str) -> None:
    made = trainer(algo, "algo.duelling=true") if algo == "dqn" else trainer(algo)
    made.update(random_batch(algo))
    assert sum(t.numel() for t in made.published_tensors()) == made.layout.size
    policy = make_policy(made.config.model_copy(), GAMES[algo], 0)
    policy.load(values(made))
    shape = GAMES[algo].observation_space.shape
    obs = np.random.default_rng(1).normal(size=(made.config.actor_envs, *shape))
    net = dqn_of(made).net if algo == "dqn" else made._update.actor  # type: ignore[attr-defined]
    expected = net(torch.from_numpy(obs.astype(np.float32))).detach()
    np.testing.assert_allclose(policy.outputs(obs), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("algo", "passes"), [("dqn", 1), ("sac", 3)])
def test_a_backward_pass_is_announced(algo: str, passes: int) -> None:
    made, begun = trainer(algo), list[int]()

    class Begun(StepHooks):
        def before_backward(self) -> None:
            begun.append(made.progress.learner_steps)

    for _ in range(2):
        made.step(ReplayBatch(replay.Batch(random_batch(algo))), hooks=Begun())
    assert begun == [0] * passes + [1] * passes, "before the update is complete"


def test_publication_is_due_every_publish_every_updates() -> None:
    made = trainer("dqn", "learner.publish_every=3")
    due = [made.step(ReplayBatch(replay.Batch(random_batch("dqn")))).publish_due for _ in range(6)]
    assert due == [False, False, True] * 2


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_resumed_trainer_goes_on_bit_for_bit(algo: str, optimizer: str, tmp_path: Path) -> None:
    options = [f"learner.optimizer={optimizer}"]
    options += ["algo.target_every=4"] if algo == "dqn" else []
    whole = trainer(algo, *options)
    for step in range(10):
        if step == 5:
            CheckpointManager(tmp_path, whole).save()
        whole.update(random_batch(algo, step))
    resumed = trainer(algo, *options, "run.seed=9")
    assert CheckpointManager(tmp_path, resumed).resume("must")
    for step in range(5, 10):
        resumed.update(random_batch(algo, step))
    np.testing.assert_array_equal(values(whole), values(resumed))
    ours, theirs = whole.state_dict(), resumed.state_dict()
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    assert resumed.progress.learner_steps == 10


@pytest.mark.parametrize("tuned", [False, True])
def test_a_resumed_trainer_has_the_temperature_of_its_config_unless_it_is_tuned(
    tuned: bool,
) -> None:
    tune = f"algo.tune_alpha={str(tuned).lower()}"
    before = trainer("sac", "algo.alpha=0.5", tune)
    after = trainer("sac", "algo.alpha=0.1", tune)
    after.load_state_dict(before.state_dict())
    after.update(random_batch("sac"))
    assert after.statistics()["alpha"] == pytest.approx(0.5 if tuned else 0.1)


def test_state_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match=r"state of .*exp_avg.* but this run needs .*square_avg"):
        trainer("dqn", "learner.optimizer=rmsprop").load_state_dict(trainer("dqn").state_dict())


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_update_with_a_nonfinite_loss_is_skipped_and_counted(algo: str) -> None:
    made = trainer(algo, *(["algo.policy_delay=1"] if algo == "td3" else []))
    batch = random_batch(algo)
    made.update(batch)
    state = made.state_dict()
    before = {name: array.copy() for name, array in state.items() if "target" not in name}
    weights = values(made)
    reward, batch["reward"][3] = batch["reward"][3], np.nan
    errors = made.update(batch).numpy()
    assert np.isfinite(errors).all()  # or the replay would refuse its new priorities
    after = made.state_dict()
    assert all(np.array_equal(array, after[name]) for name, array in before.items())
    np.testing.assert_array_equal(values(made), weights)
    assert (made.device_statistics.skipped, made.device_statistics.skipped_in_row) == (1, 1)
    assert "nan" in made.device_statistics.last_skipped
    assert np.isfinite(list(made.statistics().values())).all()
    batch["reward"][3] = reward
    made.update(batch)
    assert (made.device_statistics.skipped, made.device_statistics.skipped_in_row) == (1, 0)
    assert not np.array_equal(values(made), weights)


def test_statistics_are_means_and_start_over() -> None:
    made = trainer("sac", "algo.alpha=0.5", "algo.tune_alpha=false")
    assert made.statistics() == {}
    for _ in range(3):
        made.update(random_batch("sac"))
    found = made.statistics()
    assert found["alpha"] == pytest.approx(0.5)
    assert found["td_error"] > 0
    assert found["learning_rate"] == made.config.learner.lr
    assert made.statistics() == {}


def test_statistics_of_sac_are_those_of_its_definitions() -> None:
    """By its networks' outputs, and the noise that torch draws; a discount of 0 leaves the reward
    as the target. The actor is judged by critics that have taken their step."""
    made, batch = trainer("sac", "algo.alpha=0.5", "learner.grad_clip=null"), random_batch("sac")
    batch["discount"][:] = 0
    update, obs = sac_of(made), torch.from_numpy(batch["obs"])
    with torch.no_grad():
        q = update.critics.net(obs, torch.from_numpy(batch["action"])).double().numpy()
        mean, log_std = update.actor(obs).double().numpy().T
    torch.manual_seed(3)
    made.update(batch)
    torch.manual_seed(3)
    torch.randn(32, 1)  # for the next action
    noise = torch.randn(32, 1)[:, 0].double().numpy()
    action = np.tanh(mean + np.exp(log_std) * noise)
    logp = -0.5 * noise**2 - 0.5 * np.log(2 * np.pi) - log_std - np.log(1 - action**2)
    with torch.no_grad():
        judged = update.critics.net(obs, torch.from_numpy(action[:, None]).float()).numpy()
    errors = batch["reward"] - q
    norms = [made.optimizers()[name].grads.norm().item() for name in ("critics", "actor")]
    found = made.statistics()
    assert found.pop("learning_rate") == made.config.learner.lr
    assert found == pytest.approx({
        "critic_loss": 0.5 * (errors**2 * batch["weights"]).sum() / 32,
        "actor_loss": (0.5 * logp - judged.min(0)).mean(),
        "td_error": np.abs(errors).mean(),
        "q_mean": q.mean(),
        "entropy": -logp.mean(),
        "alpha": 0.5,
        "grad_norm": np.hypot(*norms),
    }, rel=1e-4, abs=1e-5)  # fmt: skip


class ListReplay:
    """The plainest replay there is: rows in a list, drawn uniformly."""

    def __init__(self, seed: int = 0) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self._rng = np.random.default_rng(seed)

    def sample(self, size: int) -> Batch:
        drawn = [self.rows[i] for i in self._rng.integers(len(self.rows), size=size)]
        names = ("obs", "action", "reward", "next_obs", "discount")
        columns = (np.stack(column) for column in zip(*drawn, strict=True))
        return dict(zip(names, columns, strict=True))


def test_dqn_learns_a_contextual_bandit() -> None:
    """The observation shows which of four actions pays 1, by the network that acts."""
    made = trainer("dqn", "actors.envs=16", "actors.count=1", "learner.lr=2e-3")
    policy = make_policy(made.config, CHOICES, 0)
    replay, rng = ListReplay(), np.random.default_rng(0)
    shown = np.eye(4, dtype=np.float32)
    for _ in range(150):
        policy.load(values(made))
        right = rng.integers(4, size=16)
        actions = policy.act(shown[right]).copy()
        zero = np.float32(0)
        replay.rows += [
            (shown[r], a, np.float32(a == r), shown[r], zero)
            for r, a in zip(right, actions, strict=True)
        ]
        made.update(replay.sample(64))
    policy.load(values(made))
    assert policy.greedy(np.repeat(shown, 4, 0)).tolist() == np.repeat(np.arange(4), 4).tolist()
    assert made.statistics()["td_error"] < 0.3


def test_dqn_learns_delayed_rewards() -> None:
    """A corridor of four rooms: only action 1, three times in a row, pays in the end."""
    made = trainer("dqn", "algo.target_every=20", "learner.lr=3e-3", "algo.discount=0.9")
    replay, rng = ListReplay(), np.random.default_rng(0)
    rooms = np.eye(4, dtype=np.float32)
    for _ in range(300):
        room = int(rng.integers(3))
        action = np.int32(rng.integers(4))
        after = room + 1 if action == 1 else 0
        discount = np.float32(0 if after == 3 else 0.9)
        replay.rows.append((rooms[room], action, np.float32(after == 3), rooms[after], discount))
    for _ in range(500):
        made.update(replay.sample(64))
    q = dqn_of(made).net(torch.from_numpy(rooms[:3])).detach().numpy()
    np.testing.assert_allclose(q[:, 1], [0.81, 0.9, 1.0], atol=0.06)
    # Any other action begins anew: 0.9 of the first room's worth.
    np.testing.assert_allclose(np.delete(q, 1, 1), 0.9 * 0.81, atol=0.08)


def test_sac_learns_where_the_reward_is_highest() -> None:
    """One number to choose: the best is half of what is shown."""
    options = ("model.hidden=[32,32]", "learner.lr=3e-3", "actors.envs=32", "algo.alpha=0.1")
    made = trainer("sac", *options)
    policy = make_policy(made.config, TORQUES, 0)
    replay, rng = ListReplay(), np.random.default_rng(0)
    for step in range(500):
        if step % 4 == 0:
            policy.load(values(made))
            obs = rng.uniform(-1, 1, (32, 3)).astype(np.float32)
            action = policy.act(obs).copy()
            reward = -10 * (action[:, 0] - obs[:, 0] / 2) ** 2
            zeros = np.zeros(32, np.float32)
            replay.rows += list(zip(obs, action, reward, obs, zeros, strict=True))
        made.update(replay.sample(64))
    policy.load(values(made))
    obs = rng.uniform(-1, 1, (32, 3)).astype(np.float32)
    assert np.abs(policy.greedy(obs)[:, 0] - obs[:, 0] / 2).mean() < 0.1
    made.statistics()
    made.update(replay.sample(64))
    assert made.statistics()["entropy"] == pytest.approx(-1.0, abs=0.5)  # the target


@pytest.mark.gpu
@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_a_gpu_takes_the_same_steps(algo: str) -> None:
    options = ("algo.tune_alpha=false",) if algo == "sac" else ()
    on_cpu, on_gpu = trainer(algo, *options), trainer(algo, *options, "learner.device=cuda")
    on_gpu.load_state_dict(on_cpu.state_dict())
    on_gpu.published_tensors()[0].copy_(on_cpu.published_tensors()[0])
    errors = [made.update(random_batch(algo)).cpu() for made in (on_cpu, on_gpu)]
    if algo == "dqn":  # noise differs between devices
        torch.testing.assert_close(*errors, rtol=1e-3, atol=1e-3)
    assert errors[1].isfinite().all()


def parts_of(*arrays: tuple[str, tuple[int, ...], str]) -> EnvInfo:
    parts = laid_out(arrays)
    space = spaces.Box(0, 255, (row_nbytes(parts),), np.uint8)
    return EnvInfo(space, spaces.Discrete(4), 1, "", parts)


def packed(info: EnvInfo, rows: int, seed: int) -> Any:
    """Numbers around 50, and masks of which each row allows something."""
    rng, found = np.random.default_rng(seed), np.zeros((rows, *info.observation_space.shape), "u1")
    for name, array in views(info.parts, found).items():
        if name == "action_mask":
            array[...] = rng.random(array.shape) < 0.5
            array[np.arange(rows), rng.integers(0, 4, rows)] = 1
        else:
            array[...] = rng.normal(50, 20, array.shape).clip(0, 255)
    return found


def statistics_of(made: OffPolicyTrainer) -> dict[str, Any]:
    return {
        name.removeprefix("normalizer."): t.clone() for name, t in made.shared_statistics().items()
    }


NORMALIZED = "model.normalize_observations=true"


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_observations_are_normalised_by_all_drawn_rows(algo: str) -> None:
    made, info = trainer(algo, NORMALIZED), GAMES[algo]
    seen = []
    for seed in range(3):
        batch = random_batch(algo, seed)
        batch["obs"] = batch["obs"] * 30 + 100
        seen.append(batch["obs"].astype(np.float64))
        made.update(batch)
    rows, found = np.concatenate(seen), statistics_of(made)
    assert found["count"].item() == len(rows)
    np.testing.assert_allclose(found["mean"], rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["var"], rows.var(0), rtol=1e-4)
    size = info.observation_space.shape[0]
    assert [tuple(shape) for _, shape in made.layout.entries[-3:]] == [(size,), (size,), (1,)]
    np.testing.assert_array_equal(values(made)[-2 * size - 1 : -size - 1], found["mean"])


def test_frames_are_normalised_by_some_of_each_batch() -> None:
    made = trainer("dqn", NORMALIZED, info=FRAMES)
    seen = []
    for seed in range(3):
        batch = random_batch("dqn", seed, size=48, info=FRAMES)
        seen.append(batch["obs"][:MOST_FRAMES].reshape(MOST_FRAMES, -1).astype(np.float64))
        made.update(batch)
    rows, found = np.concatenate(seen), statistics_of(made)
    assert found["count"].item() == len(rows) == 3 * MOST_FRAMES
    np.testing.assert_allclose(found["mean"], rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found["var"], rows.var(0), rtol=1e-4)


def test_a_normalised_network_learns_from_normalised_observations() -> None:
    """The errors are those of a plain network on observations that numpy has normalised."""
    made, plain = trainer("dqn", NORMALIZED), trainer("dqn")
    batch = random_batch("dqn")
    batch["obs"], batch["next_obs"] = batch["obs"] * 30 + 100, batch["next_obs"] * 30 + 100
    mean, std = batch["obs"].mean(0), batch["obs"].std(0)
    scaled = {
        **batch,
        **{name: ((batch[name] - mean) / std).clip(-10, 10) for name in ("obs", "next_obs")},
    }
    for _ in range(2):  # the second time with the same statistics, after a step
        np.testing.assert_allclose(made.update(batch), plain.update(scaled), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_statistics_forget_a_batch_whose_step_was_skipped(algo: str) -> None:
    made = trainer(algo, NORMALIZED)
    made.update(random_batch(algo))
    before = statistics_of(made)
    broken = random_batch(algo, 1)
    broken["reward"][3] = np.nan
    made.update(broken)
    assert all(torch.equal(tensor, before[name]) for name, tensor in statistics_of(made).items())
    made.update(random_batch(algo, 1))
    assert statistics_of(made)["count"].item() == 64


class Adding(SingleLearner):
    """Another learner, whose sums are ``others``."""

    def __init__(self, others: torch.Tensor | None = None) -> None:
        self._others = others
        self.own: list[torch.Tensor] = []

    def all_reduce(self, values: torch.Tensor) -> None:
        self.own.append(values.clone())
        if self._others is not None:
            values += self._others


def two_rows() -> ReplayBatch:
    """Drawn with probabilities 0.04 and 0.16."""
    drawn = random_batch("dqn", size=2) | {"weights": np.array([1.0, 0.5], np.float32)}
    return ReplayBatch(replay.Batch(drawn), min_probability=0.04, beta=0.5)


@pytest.mark.parametrize(("others", "factor"), [(0.01, 0.5), (0.09, 1.0), (None, 1.0)])
def test_importance_weights_are_divided_by_the_largest_of_all_learners(
    others: float | None, factor: float
) -> None:
    """(N P)^-beta with beta 1/2: of 0.04 and 0.16 they are 1 and 1/2, divided by the first of them,
    and 1/2 and 1/4, divided by that of 0.01."""
    heard: list[float] = []

    class Two(Adding):
        world = 2

        def all_reduce_min(self, value: float) -> float:
            heard.append(value)
            return min(value, value if others is None else others)

    made, alone = (trainer("dqn", "replay.prioritized=true") for _ in range(2))
    made.sync = Two()
    own, scaled = (two_rows() for _ in range(2))
    scaled.data["weights"] *= np.float32(factor)
    made.step(own._replace(tensors=made.tensors_of(own.data)))
    alone.step(scaled)
    np.testing.assert_allclose(own.data["weights"], factor * np.array([1.0, 0.5]), rtol=1e-6)
    torch.testing.assert_close(made.optimizers()["q"].grads, alone.optimizers()["q"].grads)
    made.step(None, totals=np.array([2.0]))
    assert heard == [0.04, np.inf]


def test_learners_sum_observation_statistics_including_one_without_a_batch() -> None:
    first, second = random_batch("dqn", 1), random_batch("dqn", 2)
    made = [trainer("dqn", NORMALIZED) for _ in range(4)]
    made[0].sync = sync = Adding()
    made[0].update(first)
    made[1].update({name: np.concatenate([first[name], second[name]]) for name in first})
    for i, batch in ((2, second), (3, None)):
        made[i].sync = Adding(sync.own[0])
        made[i].update(batch, 64.0)
    for i, whole in ((2, 1), (3, 0)):
        for name, tensor in statistics_of(made[whole]).items():
            torch.testing.assert_close(statistics_of(made[i])[name], tensor, rtol=1e-4, atol=1e-5)
    assert statistics_of(made[3])["count"].item() == 32


@pytest.mark.parametrize("double", [False, True])
def test_learner_ignores_masked_actions(double: bool) -> None:
    """Against an actor's outputs, in which what is forbidden has the least value of all."""
    info = parts_of(("speed", (3,), "<f4"), ("action_mask", (4,), "|u1"))
    made = trainer(
        "dqn", f"algo.double={str(double).lower()}", NORMALIZED, "actors.envs=32", info=info
    )
    batch = {**random_batch("dqn"), "obs": packed(info, 32, 0), "next_obs": packed(info, 32, 1)}
    masks = {
        name: views(info.parts, batch[name])["action_mask"] != 0 for name in ("obs", "next_obs")
    }
    batch["action"] = masks["obs"].argmax(1).astype(np.int32)
    made.update(batch)  # the same rows again leave the statistics as they are
    policy, weights, rows = make_policy(made.config, info, 0), values(made), np.arange(32)
    policy.load(weights)
    taken = policy.outputs(batch["obs"])[rows, batch["action"]]
    online = policy.outputs(batch["next_obs"]).copy()
    target = dqn_of(made)._target.numpy()
    policy.load(np.concatenate([target, weights[len(target) :]]))
    behind = policy.outputs(batch["next_obs"])
    best = (online if double else behind).argmax(1)
    assert masks["next_obs"][rows, best].all()
    expected = np.abs(batch["reward"] + batch["discount"] * behind[rows, best] - taken)
    np.testing.assert_allclose(made.update(batch), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("algo", ["dqn", "sac", "td3"])
def test_resumed_normalised_dict_trainer_continues_bit_for_bit(algo: str) -> None:
    arrays = (("screen", (40, 44), "|u1"), ("speed", (3,), "<f4"))
    info = parts_of(*arrays)
    if algo != "dqn":
        info = replace(info, action_space=TORQUES.action_space)

    def batch(seed: int) -> Batch:
        obs = {"obs": packed(info, 32, seed), "next_obs": packed(info, 32, seed + 100)}
        return {**random_batch(algo, seed), **obs}

    made, other = (trainer(algo, NORMALIZED, info=info) for _ in range(2))
    for seed in range(3):
        made.update(batch(seed))
    set_weights(other, weights_of(made))
    other.load_state_dict(made.state_dict())
    other.progress.load_state_dict(made.progress.state_dict())
    torch.manual_seed(7)
    errors = made.update(batch(3))
    torch.manual_seed(7)
    assert torch.equal(other.update(batch(3)), errors)
    np.testing.assert_array_equal(values(made), values(other))


def test_custom_update_with_its_own_network_is_not_normalised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_dqn_on(TransitionSequences(4), monkeypatch)
    trainer("dqn")
    with pytest.raises(
        UserError, match=r"make it by context\.network\(\), or set model\.normalize_"
    ):
        trainer("dqn", NORMALIZED)

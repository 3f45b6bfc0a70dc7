"""R2D2: values of sequences as the actor computed them, targets, loss and priorities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from fake_inference import given
from penstock.actors.rollout import Rollout
from penstock.algos.acting import make_inference
from penstock.algos.dqn.update import STATISTICS
from penstock.algos.r2d2 import update
from penstock.algos.r2d2.config import R2d2Config
from penstock.algos.samples import network_shape, process
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.params import Stamp
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.sources.replay import ReplayDataSource
from penstock.models.layout import SingleHead
from penstock.models.torch_general import GeneralHeadNet
from penstock.models.torch_nets import filled_net
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Accounting
from penstock.transport.shm.store import SlotWriter
from random_game import RandomGame

ENVS, UNROLL, SLOTS = 4, 7, 12
PARTS = {"position": ((3,), "<f4"), "board": ((2, 6, 6), "|u1"), "action_mask": ((3,), "|u1")}
SIZES = (
    *("algo.name=r2d2", f"actors.envs={ENVS}", f"actors.unroll={UNROLL}", "actors.count=1"),
    *("transport.slots=1", "replay.samples_per_insert=null", "replay.capacity=2000"),
    *("replay.min_size=200", "replay.batch_size=64", "model.hidden=[16]", "model.core_size=8"),
    *("algo.sequence_length=9", "algo.overlap=4", "algo.n_step=3", "algo.discount=0.9"),
)


# ------------------------------------------------------------- sequences of an actor's play


def weights_of(trainer: OffPolicyTrainer) -> np.ndarray[Any, Any]:
    """Random weights, as they are published: fresh ones hardly tell one state from another."""
    torch.manual_seed(4)
    with torch.no_grad():
        for tensor in trainer.published_tensors():
            tensor.add_(0.4 * torch.randn_like(tensor))
    return torch.cat([t.detach().flatten() for t in trainer.published_tensors()]).numpy()


@pytest.mark.parametrize("burn_in", [0, 4])
@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        (None, ["model.core=lstm"]),
        (None, ["model.core=gru", "algo.duelling=false"]),
        (PARTS, ["model.core=lstm"]),
        (None, ["model.core=lstm", "model.core_inputs=[action,reward]", "algo.reward_clip=1"]),
        (PARTS, ["model.core=gru", "model.core_inputs=[reward]", "algo.quantiles=5"]),
    ],
)
def test_the_learner_reproduces_the_actors_values_over_episode_ends(
    arrays: Any, options: list[str], burn_in: int
) -> None:
    """From the actor's slots through the real replay, also of the observations after the last
    steps of episodes."""
    cfg = resolve("CartPole-v1", [*SIZES, f"algo.burn_in={burn_in}", *options])
    game: Any = RandomGame(ENVS, spaces.Discrete(3), arrays)
    trainer = OffPolicyTrainer(cfg, game.info)
    weights = weights_of(trainer)
    inference = make_inference(cfg, game.info, 3)
    inference.refresh(given(weights, Stamp(0, 1)))
    rollout = Rollout(game, inference, 0, TimeLedger())
    source = ReplayDataSource(cfg, trainer, Accounting(), 1, 1, TimeLedger(), shared=False)
    store = source.store
    lane = store.open_lane(1)
    event = store.lane_event(lane)
    writer = SlotWriter(store.arena, store.geometry, lane, event, store.filled_event)

    # Play; the largest value of each observation, none of which occurs twice.
    q_max: dict[bytes, float] = {}
    for sequence in range(SLOTS):
        slot = writer.acquire(0.0)
        assert slot is not None
        steps = rollout.fill(slot.columns, slot.index)
        for t, env in np.ndindex(UNROLL, ENVS):
            key = slot.columns["obs"][t, env].tobytes()
            q_max[key] = float(slot.columns["q_max"][t, env])
        process(cfg.algo, slot.columns)
        slot.header["sequence"], slot.header["steps"] = sequence, steps
        writer.publish(slot)
        batch = source.next(0.0)
    assert game.resets > 10
    assert batch is not None

    data = {name: torch.from_numpy(np.array(column)) for name, column in batch.data.items()}
    net: Any = filled_net(network_shape(cfg, game.info), weights)
    mask = data["mask"]
    rows = update.SequenceRows.of(net, data, burn_in)
    obs = rows.obs
    q = rows.values(net, burn_in)
    q = q.mean(3) if q.ndim == 4 else q

    taken = q[:-1].gather(2, data["action"].long()[..., None])[..., 0]
    torch.testing.assert_close(taken[mask], data["q_taken"][mask], rtol=0, atol=1e-4)
    allowed = net.mask(obs)
    if allowed is not None:
        forbids = (allowed == 0) & (allowed != 0).any(1, keepdim=True)
        q = q.masked_fill(forbids.view(q.shape), -1e9)
    largest = q.amax(2)
    compared = after_the_end = 0
    for column, steps in enumerate(mask.sum(0).tolist()):
        for row in range(steps + 1):
            expected = q_max.get(obs[row, column].numpy().tobytes())
            if expected is not None:  # the last of all rows have no successor
                assert largest[row, column].item() == pytest.approx(expected, abs=1e-4)
                compared += 1
                after_the_end += row == steps
    assert compared > 200
    assert after_the_end > 30
    assert data["state"].any(1).float().mean() > 0.2
    assert trainer.plan_updates(batch).counts.tolist() == [rows.trained.sum().item()]
    source.close()
    store.close()


def test_every_step_of_an_episode_is_trained_on() -> None:
    """The first sequence of an episode has no burn-in, and those that follow begin where it
    ends."""
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[3:, 0] = False
    state = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, -0.1]])
    trained = update.trained_steps(mask, state, burn_in=2)
    assert trained.int().tolist() == [[1, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]]
    assert update.trained_steps(mask, state, burn_in=0).equal(mask)


# ------------------------------------------------------------------------ values and targets


@pytest.mark.parametrize(
    ("value", "rescaled"),
    # By hand: sqrt(|x| + 1) - 1 is 0, 1, 9 and 999.
    [(0.0, 0.0), (3.0, 1.003), (-3.0, -1.003), (99.0, 9.099), (-999_999.0, -1998.999)],
)
def test_large_values_are_rescaled_and_restored(value: float, rescaled: float) -> None:
    found = update.rescale(torch.tensor(value))
    assert found.item() == pytest.approx(rescaled, rel=1e-6)
    assert update.unscale(found).item() == pytest.approx(value, rel=1e-6, abs=1e-6)


def test_rescaled_values_are_restored_to_six_digits() -> None:
    values = torch.cat([torch.linspace(-1, 1, 2001), torch.logspace(0, 5, 2000)])
    torch.testing.assert_close(update.unscale(update.rescale(values)), values, rtol=1e-6, atol=1e-6)


def h(x: float) -> float:
    return math.copysign(math.sqrt(abs(x) + 1) - 1, x) + 1e-3 * x


def h_inverse(x: float) -> float:
    """As published: Kapturowski et al. 2019, footnote 1, by Pohlen et al. 2018, proposition A.2."""
    root = (math.sqrt(1 + 4 * 1e-3 * (abs(x) + 1 + 1e-3)) - 1) / (2 * 1e-3)
    return math.copysign(root**2 - 1, x)


class Sequences:
    """Random sequences of a real network, and what the paper says of them, step by step."""

    def __init__(self, cfg: R2d2Config, batch: int = 6) -> None:
        rng = np.random.default_rng(5)
        length = cfg.sequence_length
        self.cfg = cfg
        options = ["algo.name=r2d2", "model.hidden=[6]", "model.core_size=4"]
        config = resolve("CartPole-v1", options)
        game: Any = RandomGame(1, spaces.Discrete(3))
        shape = network_shape(config, game.info)
        values = rng.normal(size=(2, shape.layout.size)).astype(np.float32)
        self.net, self.target = (filled_net(shape, row) for row in values)
        assert isinstance(self.net, GeneralHeadNet)

        # Where each sequence ends: at its full length, or before with its episode; two of those
        # that begin their episode have a state of 0.
        self.lengths = [length, length, 5, 4, 1, length][:batch]
        ends = ["", "terminated", "terminated", "truncated", "terminated", "truncated"]
        steps = np.arange(length)[:, None]
        mask = steps < np.array(self.lengths)
        last = steps == np.array(self.lengths) - 1
        terminated = last & np.array([end == "terminated" for end in ends])
        state = rng.normal(size=(batch, 8)) * np.array([1, 0, 1, 0, 1, 1])[:, None]
        obs = rng.normal(size=(length + 1, batch, 4))
        arrays = {
            "obs": torch.from_numpy(obs[:-1]),
            "next_obs": torch.from_numpy(obs[1:]),
            "action": torch.from_numpy(rng.integers(0, 3, (length, batch))),
            "reward": torch.from_numpy(rng.normal(0, 5, (length, batch)) * mask),
            "discount": torch.from_numpy(np.where(terminated, 0, cfg.discount) * mask),
            "mask": torch.from_numpy(mask),
            "state": torch.from_numpy(state),
            "weights": torch.from_numpy(rng.random(batch)),
        }
        self.batch = {
            name: array.float() if array.is_floating_point() else array
            for name, array in arrays.items()
        }

    def values(self, net: Any, column: int) -> list[Tensor]:
        """Q-values of the observations of a sequence, each ``[3]``, one after the other."""
        state = self.batch["state"][column][None]
        has_burn_in = bool(state.any())
        last = self.batch["next_obs"][self.lengths[column] - 1, column]
        found = []
        for t in range(self.lengths[column] + 1):
            obs = last if t == self.lengths[column] else self.batch["obs"][t, column]
            if t == self.cfg.burn_in and has_burn_in:
                state = state.detach()
            outputs, state = net.act(obs[None, None], state)
            found.append(outputs[0])
        return found

    def errors(self, column: int) -> list[Tensor]:
        """Differences of target and value of the steps that are trained on."""
        cfg = self.cfg
        steps = self.lengths[column]
        reward, discount = self.batch["reward"][:, column], self.batch["discount"][:, column]
        online = self.values(self.net, column)
        with torch.no_grad():
            lagging = self.values(self.target, column)
        begins = not self.batch["state"][column].any()
        found = []
        for t in range(0 if begins else cfg.burn_in, steps):
            end = min(t + cfg.n_step, steps)
            chooser = online if cfg.double else lagging
            best = int(chooser[end].argmax())
            total = h_inverse(float(lagging[end][best]))
            for k in reversed(range(t, end)):
                total = float(reward[k]) + float(discount[k]) * total
            found.append(h(total) - online[t][self.batch["action"][t, column]])
        return found


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("n_step", [1, 3, 20])
@pytest.mark.parametrize("burn_in", [0, 3])
def test_loss_gradient_and_priorities_equal_the_papers_loops(
    double: bool, n_step: int, burn_in: int
) -> None:
    cfg = R2d2Config(
        sequence_length=8,
        burn_in=burn_in,
        overlap=0,
        n_step=n_step,
        discount=0.9,
        double=double,
        huber=1e6,
    )
    made = Sequences(cfg)
    for parameter in made.net.parameters():
        parameter.requires_grad_()
    net: Any = made.net
    target: Any = made.target
    total, priorities, sums = update.loss(net, target, made.batch, cfg)
    gradient = torch.autograd.grad(total, list(made.net.parameters()))

    expected_total = torch.zeros(())
    expected_priorities, all_errors = [], []
    for column, weight in enumerate(made.batch["weights"]):
        errors = made.errors(column)
        expected_total = expected_total + weight * sum(0.5 * e * e for e in errors)
        sizes = [abs(e.item()) for e in errors] or [0.0]
        expected_priorities.append(0.9 * max(sizes) + 0.1 * sum(sizes) / len(sizes))
        all_errors += [e.item() for e in errors]
    expected_gradient = torch.autograd.grad(expected_total, list(made.net.parameters()))

    assert total.item() == pytest.approx(expected_total.item(), rel=1e-5)
    np.testing.assert_allclose(priorities, expected_priorities, rtol=1e-5)
    for found, expected in zip(gradient, expected_gradient, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    named = dict(zip(STATISTICS, sums.tolist(), strict=True))
    assert named["td_error"] == pytest.approx(sum(map(abs, all_errors)), rel=1e-5)
    assert named["q_target_mean"] - named["q_mean"] == pytest.approx(sum(all_errors), rel=1e-4)
    assert not priorities.requires_grad


class Table:
    """Gives the same values at each step, and forbids the second action."""

    head_shape = SingleHead(3)
    core_inputs = None

    def __init__(self, *values: float) -> None:
        self._values = torch.tensor(values)

    def unroll(self, obs: Tensor, state: Tensor, inputs: None) -> tuple[Tensor, Tensor]:
        rows = obs.shape[0] * obs.shape[1]
        return self._values.expand(rows, -1), state

    def mask(self, obs: Tensor) -> Tensor:
        return torch.tensor([1, 0, 1]).expand(obs.shape[0] * obs.shape[1], -1)


@pytest.mark.parametrize("double", [True, False])
def test_a_masked_action_is_in_no_target(double: bool) -> None:
    cfg = R2d2Config(sequence_length=1, burn_in=0, overlap=0, n_step=1, double=double, discount=0.5)
    net: Any = Table(0.0, 9.0, 2.0)
    target: Any = Table(1.0, 9.0, 3.0)
    batch = {
        "obs": torch.zeros(1, 1, 4),
        "next_obs": torch.zeros(1, 1, 4),
        "action": torch.zeros(1, 1),
        "reward": torch.zeros(1, 1),
        "discount": torch.full((1, 1), 0.5),
        "mask": torch.ones(1, 1, dtype=torch.bool),
        "state": torch.zeros(1, 2),
        "weights": torch.ones(1),
    }
    _, priorities, _ = update.loss(net, target, batch, cfg)
    assert priorities.item() == pytest.approx(h(0.5 * h_inverse(3.0)), rel=1e-6)


def test_targets_in_float32_agree_with_loops_to_six_digits() -> None:
    rng = np.random.default_rng(0)
    length, batch, n_step = 30, 40, 5
    q = rng.normal(0, 3, (length, batch))
    lengths = rng.integers(1, length + 1, batch)
    steps = np.arange(length)[:, None]
    mask = steps < lengths
    reward = rng.normal(size=(length, batch)) * mask
    terminated = (steps == lengths - 1) & (rng.random(batch) < 0.5)
    discount = np.where(terminated, 0, 0.99) * mask

    named = [torch.from_numpy(array.astype(np.float32)) for array in (reward, discount, q)]
    rewards, discounts, values = named
    returns = update.n_step_returns(
        rewards, discounts, update.unscale(values), torch.from_numpy(mask), n_step
    )
    found = update.rescale(returns)
    for t, column in np.argwhere(mask):
        end = min(t + n_step, lengths[column])
        total = h_inverse(q[end - 1, column])
        for k in reversed(range(t, end)):
            total = reward[k, column] + discount[k, column] * total
        assert found[t, column].item() == pytest.approx(h(total), rel=1e-6, abs=1e-6)


# ------------------------------------------------------------------------------- the config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["algo.overlap=40"], "algo.overlap 40 leaves no step between the starts of two sequences"),
        (["algo.burn_in=50"], "algo.burn_in 50 leaves no step to train on of algo.sequence_length"),
        (["model.critic=shared"], "model.critic shared is for actor-critics, and algo.name r2d2 i"),
    ],
)
def test_a_config_without_memory_or_steps_is_refused(options: list[str], message: str) -> None:
    game: Any = RandomGame(1, spaces.Discrete(3))
    with pytest.raises(UserError, match=message):
        network_shape(resolve("CartPole-v1", ["algo.name=r2d2", *options]), game.info)

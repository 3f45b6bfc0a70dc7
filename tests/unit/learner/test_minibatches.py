"""Minibatches of steps: dealing, gathering, and updates against a plain computation."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import small_trainer
from penstock.algos.ops.frame_stacks import stacks
from penstock.algos.slots import BEGINS, OLDER
from penstock.configs.load import resolve
from penstock.core.interfaces import Share
from penstock.core.observations import MASK, views
from penstock.core.specs import HEADER
from penstock.device.choice import device_of
from penstock.device.transfers import DeviceUploader
from penstock.envs import probe
from penstock.learner.minibatches import BatchSteps, Minibatch, deal_steps
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.transport.shm.store import Slot
from random_game import RandomGame
from small_trainer import weights

CPU = torch.device("cpu")
OPTIONS = ("actors.envs=5", "actors.unroll=7", "learner.publish_every=1", "algo.minibatches=steps")
batch = partial(small_trainer.batch, ends=0.1)
Array = np.ndarray[Any, Any]


def trainer(*options: str) -> Trainer:
    config = resolve("cartpole_ppo", [*OPTIONS, *options])
    return Trainer(config, probe(config.env))


def places(share: Share) -> list[int]:
    assert share.order is not None
    return [int(place) for place in share.order[share.places]]


def test_every_epoch_deals_all_steps_anew_in_nearly_equal_shares() -> None:
    alive = np.random.default_rng(0).random((7, 5)) < 0.7
    torch.manual_seed(0)
    shares = deal_steps(alive, updates=4, epochs=3)
    assert [len(places(share)) for share in shares] == [8, 9, 9, 9] * 3
    epochs = [[p for s in shares[i : i + 4] for p in places(s)] for i in (0, 4, 8)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(35))
        assert epoch != sorted(epoch), "the first too"
    assert epochs[0] != epochs[1] != epochs[2]
    for share in shares:
        assert share.steps == sum(alive[place // 5, place % 5] for place in places(share))
    torch.manual_seed(0)
    again = deal_steps(alive, updates=4, epochs=3)
    assert [places(share) for share in again] == [places(share) for share in shares]


def reference_advantages(made: Trainer, columns: dict[str, Array]) -> tuple[Array, Array]:
    """Values ``[T + 1, E]`` and GAE ``[T, E]``, step by step."""
    cfg: Any = made.config.algo
    with torch.no_grad():
        values = made.model(torch.from_numpy(columns["obs"]))[1].view(8, 5).double().numpy()
    advantages = np.zeros((7, 5))
    for env in range(5):
        later = 0.0
        for t in reversed(range(7)):
            if not columns["alive"][t, env]:
                later = 0.0
                continue
            go_on = 0.0 if columns["terminated"][t, env] else cfg.discount
            delta = columns["reward"][t, env] + go_on * values[t + 1, env] - values[t, env]
            cut = columns["truncated"][t, env]
            later = delta + (0.0 if cut else go_on * cfg.gae_lambda * later)
            advantages[t, env] = later
    return values, advantages


@pytest.mark.parametrize("normalize", ["minibatch", "batch", "none"])
@pytest.mark.parametrize("updates", [3, 4])
def test_updates_are_those_of_a_plain_computation(normalize: str, updates: int) -> None:
    """Which takes rows one by one, with torch's own Adam."""
    made = trainer(
        f"learner.updates_per_batch={updates}", "algo.epochs=2", "algo.value_clip=0.1",
        f"algo.normalize_advantages={normalize}", "learner.lr_end_fraction=1",
        "learner.lr_decay_steps=null", "learner.lr=3e-3",
    )  # fmt: skip
    cfg: Any = made.config.algo
    staged = batch(made)
    columns = {name: array.copy() for name, array in staged.arrays.items()}
    values, advantages = reference_advantages(made, columns)
    alive = columns["alive"]
    targets = advantages + values[:-1]
    if normalize == "batch":
        advantages = (advantages - advantages[alive].mean()) / (advantages[alive].std() + 1e-8)
    net, before = copy.deepcopy(made.model), copy.deepcopy(made.model)
    adam = torch.optim.Adam(net.parameters(), lr=3e-3, eps=made.config.learner.eps)

    torch.manual_seed(11)
    made.step(staged)
    torch.manual_seed(11)
    for share in deal_steps(alive, updates, 2):
        rows = [(p // 5, p % 5) for p in places(share) if alive[p // 5, p % 5]]
        own = np.array([advantages[row] for row in rows])
        if normalize == "minibatch":
            own = (own - own.mean()) / (own.std() + 1e-8)
        total = torch.zeros(())
        for row, advantage in zip(rows, own, strict=True):
            seen, action = torch.from_numpy(columns["obs"][row])[None], int(columns["action"][row])
            outputs, value = net(seen)
            logps = torch.log_softmax(outputs[0], 0)
            proximal = torch.log_softmax(before(seen)[0][0], 0)[action].detach()
            weight = (proximal - math.log(0.5)).exp().clamp(max=cfg.rho_clip)
            ratio = (logps[action] - proximal).exp()
            bounded = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            policy = -weight * torch.minimum(ratio * advantage, bounded * advantage)
            old, target = float(values[row]), float(targets[row])
            near = old + (value[0] - old).clamp(-0.1, 0.1)
            error = torch.maximum((value[0] - target) ** 2, (near - target) ** 2)
            entropy = -(logps.exp() * logps).sum()
            total = total + policy + cfg.value_cost * error / 2 - cfg.entropy_cost * entropy
        adam.zero_grad()
        (total / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), made.config.learner.grad_clip or 1e9)
        adam.step()
    expected = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    torch.testing.assert_close(made.optimizer.values, expected, rtol=1e-3, atol=2e-6)


def test_minibatch_of_all_steps_equals_one_of_whole_unrolls() -> None:
    by_steps, by_unrolls = (
        trainer("learner.updates_per_batch=1", f"algo.minibatches={how}")
        for how in ("steps", "unrolls")
    )
    for made in (by_steps, by_unrolls):
        made.step(batch(made))
    np.testing.assert_allclose(weights(by_steps), weights(by_unrolls), rtol=1e-4, atol=1e-6)


def test_micro_batches_give_the_update_of_the_whole() -> None:
    options = ("learner.updates_per_batch=2", "algo.normalize_advantages=none", "algo.epochs=2")
    whole, parts = trainer(*options), trainer(*options, "learner.micro_batch=5")
    for made in (whole, parts):
        torch.manual_seed(5)
        made.step(batch(made))
    np.testing.assert_allclose(weights(whole), weights(parts), rtol=1e-4, atol=1e-5)


def test_each_sample_counts_once_and_is_trained_on_in_every_epoch() -> None:
    made = trainer("learner.updates_per_batch=6", "algo.epochs=3")
    staged = batch(made)
    plan = made.plan_updates(staged)
    totals = plan.counts
    assert [totals[i : i + 6].sum() for i in (0, 6, 12)] == [staged.steps] * 3
    made.step(staged, plan)
    made.progress.commit(made.progress.growth(), made.progress.growth())
    assert (made.progress.learner_steps, made.progress.trained_steps) == (18, staged.steps)
    assert 0 < made.statistics()["entropy"] <= np.log(2) + 1e-6
    assert made.interrupted_result(plan).trained_steps == staged.steps


@pytest.mark.parametrize("frame", [(4, 6), (3, 5)])
def test_stacks_of_frames_are_those_of_the_whole_batch(frame: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    shapes = {"obs": (8, 5, *frame), OLDER: (5, 3, *frame), "seat": (5,)}
    columns = {k: torch.from_numpy(rng.integers(0, 255, v, np.uint8)) for k, v in shapes.items()}
    columns[BEGINS] = torch.from_numpy(rng.choice([0, 0, 0, 1, 2], (7, 5)).astype(np.uint8))
    columns["alive"] = torch.ones(7, 5, dtype=torch.bool)
    whole = stacks(columns["obs"], columns[OLDER], columns[BEGINS])
    steps = torch.tensor([34, 0, 12, 12, 5])
    batch_steps = BatchSteps(columns, frozenset({OLDER, "seat"}), DeviceUploader(device_of(CPU)))
    batch_steps.set_order(torch.cat([torch.tensor([7, 8]), steps, torch.tensor([1])]))
    made = Minibatch(batch_steps, slice(2, 7))
    expected = torch.stack([whole[step // 5, step % 5] for step in steps.tolist()])[None]
    assert torch.equal(made["obs"], expected)
    assert OLDER not in made
    begins = [columns[BEGINS][step // 5, step % 5] for step in steps.tolist()]
    assert made[BEGINS].tolist() == [begins]
    with pytest.raises(KeyError):
        made["seat"]


@pytest.mark.parametrize("shape", [(3,), (), (2, 8)])
def test_observations_are_gathered(shape: tuple[int, ...]) -> None:
    obs = torch.arange(8 * 5 * math.prod(shape), dtype=torch.float32).view(8, 5, *shape)
    columns = {"obs": obs, "alive": torch.ones(7, 5, dtype=torch.bool)}
    made = BatchSteps(columns, frozenset(), DeviceUploader(device_of(CPU)))
    for order in (torch.tensor([30, 1]), torch.tensor([1, 30])):  # two epochs
        made.set_order(order)
        for place in range(2):
            step = int(order[place])
            found = Minibatch(made, slice(place, place + 1))["obs"]
            assert torch.equal(found, obs[step // 5, step % 5][None, None])


def test_dict_observations_and_action_masks_are_gathered() -> None:
    """They are bytes of one row."""
    arrays: dict[str, tuple[tuple[int, ...], str]] = {"speed": ((3,), "<f4"), MASK: ((3,), "|u1")}
    game = RandomGame(5, spaces.Discrete(3), arrays)
    found: list[tuple[Array, Array]] = []
    for how in ("steps", "unrolls"):
        options = ("algo.name=ppo", f"algo.minibatches={how}", "actors.envs=5", "actors.unroll=7")
        config = resolve("x:f", [*options, "learner.updates_per_batch=1", "learner.device=cpu"])
        made = Trainer(config, game.info)
        columns = made.spec.views(made.spec.zeros())
        rng = np.random.default_rng(1)
        for row in columns["obs"]:
            if not found:
                game.reset_into(0, row)
        if found:
            columns["obs"][...] = found[0][1]
        columns["reward"][...] = rng.normal(size=(7, 5))
        columns["alive"][...] = True
        columns["behaviour_logp"][...] = -1.0
        header = np.zeros((), HEADER)
        header["steps"] = 35
        staged = StagingBatch(made.spec, 1, made.device)
        staged.gather([Slot(0, header, (), columns)])
        before = weights(made)
        made.step(staged)
        assert not np.array_equal(weights(made), before)
        found.append((weights(made), columns["obs"].copy()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    masks = views(game.info.parts, found[0][1])[MASK]
    assert not masks.all(), "some choices are forbidden"

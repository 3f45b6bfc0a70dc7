"""How a batch becomes several updates: epochs, shares, reward scaling and early stops."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.algos.core_inputs import REWARD
from penstock.algos.ppo import algorithm as ppo
from penstock.algos.slots import RETURN
from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.learner.minibatches import deal, pieces
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.state import learning_rate_of
from penstock.learner.sync.gradient_sync import GroupLostError, SingleLearner
from penstock.learner.trainer import RewardScale, Trainer, empty_batch
from small_trainer import batch, weights

OPTIONS = ("actors.envs=8", "actors.unroll=6", "learner.publish_every=1")
Array = np.ndarray[Any, Any]


def trainer(*options: str) -> Trainer:
    config = resolve("cartpole_ppo", [*OPTIONS, *options])
    return Trainer(config, probe(config.env))


def environments(share: slice | Tensor) -> list[int]:
    return [int(e) for e in np.arange(8)[share if isinstance(share, slice) else share.numpy()]]


def test_every_epoch_deals_all_environments_anew() -> None:
    alive = np.random.default_rng(0).random((5, 8)) < 0.7
    torch.manual_seed(0)
    shares = deal(alive, updates=4, epochs=3)
    dealt = [[environments(share.places) for share in shares[i : i + 4]] for i in (0, 4, 8)]
    assert dealt[0] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dealt[1] != dealt[0] != dealt[2] != dealt[1]
    for epoch in dealt:
        assert sorted(chain.from_iterable(epoch)) == list(range(8))
    for share in shares:
        assert share.steps == alive[:, environments(share.places)].sum()
    torch.manual_seed(0)
    again = deal(alive, updates=4, epochs=3)
    assert [environments(s.places) for s in again] == [environments(s.places) for s in shares]


def test_update_of_all_environments_is_not_shuffled() -> None:
    before = torch.get_rng_state()
    shares = deal(np.ones((5, 8), np.bool_), updates=1, epochs=3)
    assert [share.places for share in shares] == [slice(0, 8)] * 3
    assert torch.equal(torch.get_rng_state(), before)


def test_pieces_are_no_larger_than_a_micro_batch() -> None:
    assert list(pieces(slice(2, 7), 2)) == [slice(2, 4), slice(4, 6), slice(6, 7)]
    dealt = [part.tolist() for part in pieces(torch.tensor([4, 1, 3]), 2)]  # type: ignore[union-attr]
    assert dealt == [[4, 1], [3]]


def test_epochs_count_updates_but_each_sample_once() -> None:
    made = trainer("algo.epochs=3")
    staged = batch(made)
    assert made.step(staged).publish_due
    made.progress.commit(made.progress.growth(), made.progress.growth())
    assert made.progress.learner_steps == made.progress.version == 12
    assert made.progress.trained_steps == staged.steps
    found = made.statistics()
    assert 0 < found["entropy"] <= np.log(2) + 1e-6, "a mean over all epochs"
    assert found["learning_rate"] == 5e-3, "the preset's, at the first step"


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_micro_batches_give_the_update_of_the_whole(core: str) -> None:
    inference = "actors.inference=auto"
    options = ("algo.epochs=2", "algo.normalize_advantages=batch", f"model.core={core}", inference)
    whole, parts = trainer(*options), trainer(*options, "learner.micro_batch=7")
    for made in (whole, parts):
        torch.manual_seed(5)
        made.step(batch(made))
    torch.testing.assert_close(whole.optimizer.values, parts.optimizer.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("over", "sizes"), [("minibatch", [2] * 4), ("batch", [1] * 8)])
def test_preparation_is_computed_in_pieces_of_update_size(
    over: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[slice]] = []

    def noted(own: Any, *args: Any) -> Any:
        told.append(args[3])
        return own(*args)

    own = {"prepare": ppo.prepare, "going_on": ppo.going_on}
    noting: dict[str, Any] = {name: partial(noted, function) for name, function in own.items()}
    monkeypatch.setattr(ppo, "PPO", replace(ppo.PPO, **noting))
    memory = ("model.core=lstm", "actors.inference=auto", "learner.micro_batch=7")
    made = trainer(*memory, "algo.epochs=2", f"algo.normalize_advantages={over}")
    made.step(batch(made))
    assert [[part.stop - part.start for part in parts] for parts in told] == [sizes, sizes]


def test_epochs_stop_beyond_target_kl() -> None:
    made = trainer("algo.epochs=4", "algo.target_kl=1e-9", "learner.updates_per_batch=2")
    made.step(batch(made))
    assert made.progress.learner_steps == 2, "each sample is trained on once"
    made = trainer("algo.epochs=4", "algo.target_kl=100", "learner.updates_per_batch=2")
    made.step(batch(made))
    assert made.progress.learner_steps == 8


def played(made: Trainer, by: Trainer, seed: int) -> StagingBatch:
    """A batch of random observations, in which ``by`` chose the actions."""
    staged = batch(made, seed)
    arrays = staged.arrays
    with torch.no_grad():
        logits, _ = by.model(torch.from_numpy(arrays["obs"][:-1]))
        policy = torch.distributions.Categorical(logits=logits.contiguous())
        action = policy.sample()
    shape = arrays["action"].shape
    arrays["action"][...] = action.view(shape).numpy()
    arrays["behaviour_logp"][...] = policy.log_prob(action).view(shape).numpy()
    return staged


@pytest.mark.parametrize("advantages", ["gae", "vtrace"])
def test_one_batch_of_lag_keeps_nine_tenths_of_the_samples(advantages: str) -> None:
    """Each batch is played by the weights of before the last batch, as with one slot ahead."""
    options = (f"algo.advantages={advantages}", "algo.epochs=4")
    made, behaviour = trainer(*options), trainer(*options)
    for seed in range(10):
        staged = played(made, behaviour, seed)
        behaviour.optimizer.values.copy_(made.optimizer.values)
        made.step(staged)
    found = made.statistics()
    assert found["kl_lag"] > 1e-4
    assert 0.9 <= found["effective_sample_share"] < 1
    assert 0 < found["rho_clipped"] < 1
    assert found["ratio_clipped_first_minibatch"] == 0
    assert found["kl_first_minibatch"] < 1e-6
    assert found["kl_epoch_1"] < found["kl"] < found["kl_epoch_4"]


@pytest.mark.parametrize("normalize", ["minibatch", "batch"])
def test_recurrent_policy_has_ratios_of_1_in_the_first_minibatch(normalize: str) -> None:
    """The proximal policy is that of the same unrolls from the same recurrent states."""
    memory = ("model.core=lstm", "actors.inference=auto", "learner.micro_batch=7")
    made = trainer(*memory, f"algo.normalize_advantages={normalize}", "algo.epochs=2")
    for seed in range(2):
        made.step(batch(made, seed))
    found = made.statistics()
    assert found["kl_lag"] > 1e-4
    assert found["kl_first_minibatch"] < 1e-8 < found["kl_epoch_2"]
    assert found["ratio_clipped_first_minibatch"] == 0


def test_a_core_reads_rewards_that_are_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those that the actor wrote into its state."""
    seen: dict[str, Any] = {}

    def noted(net: Any, columns: dict[str, Any], *rest: Any) -> Any:
        seen.update(columns)
        return ppo.prepare(net, columns, *rest)

    monkeypatch.setattr(ppo, "PPO", replace(ppo.PPO, prepare=noted))
    memory = ("model.core=lstm", "actors.inference=auto", "model.core_inputs=[reward]")
    made = trainer(*memory, "algo.normalize_rewards=true", "algo.reward_scale=1")
    staged = batch(made)
    rewards = staged.arrays["reward"].copy()
    made.step(staged)
    np.testing.assert_array_equal(seen[REWARD], rewards)
    assert not np.allclose(seen["reward"], rewards, rtol=0.1)


def test_batches_that_end_early_are_counted() -> None:
    made = trainer("algo.epochs=3", "algo.target_kl=1e-9")
    made.step(batch(made))
    assert made.statistics()["early_stops"] == 1
    made = trainer("algo.epochs=3", "algo.target_kl=100")
    made.step(batch(made))
    assert made.statistics()["early_stops"] == 0
    assert "early_stops" not in made.statistics(), "no batch since"


def test_the_loss_gets_the_present_values_of_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float, float]] = []

    def noted(net: Any, columns: Any, cfg: Any, *args: Any) -> Any:
        seen.append((cfg.clip, cfg.entropy_cost))
        return ppo.loss(net, columns, cfg, *args)

    monkeypatch.setattr(ppo, "PPO", replace(ppo.PPO, loss=noted))
    made = trainer(
        "learner.updates_per_batch=1", "algo.clip={from: 0.3, to: 0.1, steps: 80}",
        "algo.entropy_cost={from: 0.02, to: 0}", "stop.env_steps=200",
    )  # fmt: skip
    for steps in (0, 20, 120):
        made.progress.trained_steps = steps
        made.step(batch(made))
    # A quarter of the way and its end; a tenth of the run and three fifths of it.
    assert [clip for clip, _ in seen] == pytest.approx([0.3, 0.25, 0.1])
    assert [cost for _, cost in seen] == pytest.approx([0.02, 0.018, 0.008])


def test_learning_rate_follows_the_agent_steps_trained_on() -> None:
    plain = ("learner.lr_end_fraction=1", "learner.lr_decay_steps=null")
    schedule = "learner.lr={from: 4e-3, to: 1e-3}"
    for steps, rate in ((0, 4e-3), (50, 2.5e-3), (100, 1e-3), (500, 1e-3)):
        made = trainer(*plain, schedule, "stop.env_steps=100")
        fixed = trainer(*plain, f"learner.lr={rate}")
        for each in (made, fixed):
            each.progress.trained_steps = steps
            torch.manual_seed(1)
            each.step(batch(each))
            each.progress.lr_factor = 0.5
            assert learning_rate_of(each) == pytest.approx(rate / 2)
        np.testing.assert_allclose(weights(made), weights(fixed), rtol=1e-6, atol=1e-8)


class Lost(SingleLearner):
    """Learners of whom the others go after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, optimizer: Any, total: float, env_steps: int) -> Tensor:
        if not self.left:
            raise GroupLostError("gone")
        self.left -= 1
        return super().step(optimizer, total, env_steps)


@pytest.mark.parametrize(("steps", "envs"), [(0, 0), (1, 2), (3, 6), (4, 8), (7, 8)])
def test_trained_steps_of_an_interrupted_batch_are_counted(steps: int, envs: int) -> None:
    made = trainer("algo.epochs=3")
    staged = batch(made)
    made.sync = Lost(steps)
    plan = made.plan_updates(staged)
    with pytest.raises(GroupLostError):
        made.step(staged, plan)
    alive = staged.arrays["alive"][:, :envs]
    assert made.interrupted_result(plan).trained_steps == np.count_nonzero(alive)


def test_rewards_are_divided_by_the_deviation_of_all_returns() -> None:
    rng = np.random.default_rng(1)
    scale = RewardScale(torch.device("cpu"))
    seen: list[float] = []
    for _ in range(3):
        reward, returns = rng.normal(size=(2, 5, 3)).astype(np.float32) * [[[2.0]], [[7.0]]]
        alive = rng.random((5, 3)) < 0.7
        seen += returns[alive].tolist()
        columns = {"reward": reward, RETURN: returns, "alive": alive}
        found = scale({k: torch.from_numpy(v) for k, v in columns.items()}, lambda sums: None)
        np.testing.assert_allclose(found.numpy(), reward / np.std(seen), rtol=1e-5)


def test_scaled_rewards_are_clipped_and_include_returns_of_other_learners() -> None:
    scale = RewardScale(torch.device("cpu"))
    columns = {"reward": [[50.0, -3.0]], RETURN: [[1.0, 1.0]], "alive": [[True, True]]}
    tensors = {k: torch.tensor(v) for k, v in columns.items()}

    def add_others(sums: Tensor) -> None:
        sums += torch.tensor([2.0, 6.0, 18.0], dtype=torch.float64)  # two returns of 3

    np.testing.assert_allclose(scale(tensors, add_others).numpy(), [[10.0, -3.0]], rtol=1e-6)


def test_reward_normalisation_keeps_the_batch_and_survives_a_checkpoint() -> None:
    options = ("algo.normalize_rewards=true", "algo.reward_scale=1")
    made, other = trainer(*options), trainer(*options, "run.seed=1")
    staged = batch(made)
    before = staged.tensors["reward"].clone()
    made.step(staged)
    assert torch.equal(staged.tensors["reward"], before)
    other.load_state_dict({k: v.copy() for k, v in made.state_dict().items()})
    other.optimizer.values.copy_(made.optimizer.values)
    for each in (made, other):
        each.step(batch(made, seed=4))
    np.testing.assert_array_equal(weights(made), weights(other))
    assert "rewards/sums" in made.state_dict()
    assert "rewards/sums" not in trainer().state_dict()


class Pair(SingleLearner):
    """One of two learners: what it sums up is written down, and the other's is added."""

    def __init__(self) -> None:
        self.said: list[Tensor] = []
        self.others: list[Tensor] = []

    def all_reduce(self, values: Tensor) -> None:
        self.said.append(values.clone())
        if self.others:
            values += self.others.pop(0)


def test_a_learner_without_samples_takes_part_in_every_sum() -> None:
    options = (
        *("algo.epochs=2", "algo.target_kl=1", "algo.normalize_rewards=true"),
        *("algo.reward_scale=1", "model.normalize_observations=true"),
    )
    for normalize in ("minibatch", "batch", "none"):
        made = trainer(*options, f"algo.normalize_advantages={normalize}")
        made.sync = rich = Pair()
        plan = made.plan_updates(staged := batch(made))
        made.step(staged, plan)
        poor = trainer(*options, f"algo.normalize_advantages={normalize}")
        poor.sync = other = Pair()
        other.others = list(rich.said)
        poor.step(None, totals=plan.counts)
        assert [s.shape for s in other.said] == [s.shape for s in rich.said]
        assert len(rich.said) >= 3
        assert all(not s.any() for s in other.said), "it adds nothing"
        assert poor.progress.learner_steps == made.progress.learner_steps == 8
        mine, its = (dict(m.model.named_buffers())["normalizer.mean"] for m in (made, poor))
        assert torch.equal(mine, its)


def test_empty_batch_has_zero_loss() -> None:
    made = trainer()
    columns = empty_batch(made.spec, made.device)
    cfg: Any = made.config.algo
    net: Any = made.model
    columns |= ppo.prepare(net, columns, cfg, [slice(0, 1)])
    total, sums = ppo.loss(net, columns, cfg)
    assert total.item() == 0
    assert not sums.any()

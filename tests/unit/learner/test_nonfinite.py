"""Nonfinite updates are skipped and counted; then the run is rolled back; then it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.algos.ops.backward import backward
from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.nonfinite import NonFiniteGuard
from penstock.learner.state import put_state, take_state, weights_of
from penstock.learner.trainer import Trainer
from small_trainer import batch

OPTIONS = ("actors.envs=8", "actors.unroll=6", "learner.device=cpu")


class Rig:
    """A learner of CartPole on made-up unrolls, whose rewards may be anything."""

    def __init__(self, *options: str) -> None:
        config = resolve("cartpole", [*OPTIONS, "learner.nonfinite.max_in_row=3", *options])
        self.trainer = Trainer(config, probe(config.env))
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        self.guard = NonFiniteGuard(self.trainer, self._hear)

    def train(self, reward: float = 1.0, times: int = 1) -> None:
        for _ in range(times):
            self.trainer.step(batch(self.trainer, reward=reward, alive=1.0))

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """Everything that is learned, copied."""
        found = self.trainer.state_dict() | {"weights": weights_of(self.trainer)}
        return {name: array.copy() for name, array in found.items()}

    def _hear(self, kind: str, text: str, **data: Any) -> None:
        self.events.append((kind, text, data))


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


NORMALIZED = (
    *("model.normalize_observations=true", "algo.normalize_rewards=true"),
    "algo.reward_scale=1",
)


def test_backward_on_a_cpu_keeps_activations_as_long_as_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch._dynamo", raising=False)  # of other tests
        backward(loss)
    torch.testing.assert_close(weight.grad, torch.full((3,), 2.0))
    loss.backward()  # raises RuntimeError where they were freed, which takes the interpreter lock
    torch.testing.assert_close(weight.grad, torch.full((3,), 4.0))


def test_the_graph_of_a_compiled_network_is_not_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys)
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    backward(loss)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        pytest.param(np.nan, (), id="nan"),
        pytest.param(np.inf, (), id="inf"),
        pytest.param(np.nan, NORMALIZED, id="normalised"),
        pytest.param(np.nan, ("learner.updates_per_batch=4",), id="four updates"),
        pytest.param(np.nan, ("learner.accumulate=2", *NORMALIZED), id="two batches"),
    ],
)
def test_a_skipped_update_changes_nothing(reward: float, options: tuple[str, ...]) -> None:
    rig = Rig(*options)
    batches = rig.trainer.config.learner.accumulate
    rig.train(times=2 * batches)
    before = rig.state()
    rig.train(reward, times=batches)
    assert same(rig.state(), before)
    updates = rig.trainer.config.learner.updates_per_batch
    assert (
        rig.trainer.device_statistics.skipped
        == rig.trainer.device_statistics.skipped_in_row
        == updates
    )
    rig.train(times=batches)
    assert not same(rig.state(), before)
    assert rig.trainer.device_statistics.skipped_in_row == 0
    assert np.isfinite(list(rig.trainer.statistics().values())).all()


def test_a_loss_that_is_not_finite_is_no_update_though_its_gradients_are() -> None:
    x = torch.ones(3, requires_grad=True)
    backward(x.sum() + torch.tensor(torch.nan))
    assert x.grad is not None
    assert x.grad.isnan().all()
    x.grad = None
    backward(2 * x.sum(), torch.tensor(5.0))
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    x.grad = None
    backward(2 * x.sum(), torch.tensor(torch.inf))
    assert x.grad.isnan().all()  # type: ignore[attr-defined]


def test_repeated_nonfinite_updates_roll_back_with_a_lower_learning_rate() -> None:
    rig = Rig()
    rig.train(times=3)
    rig.guard.copy_state()
    good = rig.state()
    rig.train(times=5)
    rig.train(np.nan, times=2)
    assert not rig.guard.needs_rollback
    rig.train()
    rig.train(np.nan, times=2)
    assert not rig.guard.needs_rollback, "they are not in a row"
    rig.train(np.nan)
    assert rig.guard.needs_rollback
    rig.guard.report_skipped()
    steps = rig.trainer.progress.learner_steps
    assert rig.guard.roll_back() == ""
    assert not rig.guard.needs_rollback
    assert same(rig.state(), good)
    assert rig.trainer.progress.learner_steps == steps, "what was trained stays accounted for"
    assert rig.trainer.optimizer.lr_factor == 0.5
    assert [(kind, data["step"]) for kind, _, data in rig.events] == [
        ("note", steps),
        ("rollback", steps),
    ]
    lr = rig.trainer.config.learner.lr
    assert [data["learning_rate"] for _, _, data in rig.events] == [lr, lr / 2]
    assert "nan" in rig.events[1][2]["loss"]
    assert rig.guard.figures() == {"updates_skipped": 5, "rollbacks": 1}
    rig.guard.report_skipped()
    assert len(rig.events) == 2


def test_state_that_fails_again_is_not_restored_twice() -> None:
    rig = Rig()
    start = rig.state()
    rig.train(times=3)
    rig.guard.copy_state()
    kept = rig.state()
    for expected in (kept, start, start):
        rig.train(times=2)
        rig.train(np.nan, times=3)
        rig.guard.roll_back()
        assert same(rig.state(), expected)


def test_exhausted_rollback_budget_ends_the_run_in_the_last_good_state() -> None:
    rig = Rig("learner.nonfinite.max_rollbacks=2")
    good = rig.state()
    said: list[str] = []
    while not said or not said[-1]:
        rig.train(times=1)
        rig.train(np.nan, times=3)
        said.append(rig.guard.roll_back())
    assert said[:-1] == ["", ""]
    assert "3 updates in a row were skipped, after 2 rollbacks, the last with" in said[-1]
    assert "lower learner.lr (now 0.00025)" in said[-1]
    assert same(rig.state(), good)


def test_zero_rollback_budget_ends_the_run_at_once() -> None:
    rig = Rig("learner.nonfinite.max_rollbacks=0")
    rig.train(np.nan, times=3)
    assert rig.guard.roll_back().startswith("3 updates in a row were skipped, the last with")


def test_parameter_server_run_is_never_rolled_back() -> None:
    rig = Rig("learner.count=2", "learner.pace=ssp")
    rig.train(times=2)
    before = rig.state()
    rig.train(np.nan, times=3)
    assert rig.guard.roll_back()
    assert same(rig.state(), before)


def test_lowered_learning_rate_reaches_other_learners_and_the_checkpoint(
    tmp_path: Path, notes: list[str]
) -> None:
    rig, other = Rig(), Rig()
    rig.train(np.nan, times=3)
    rig.guard.roll_back()
    put_state(other.trainer, take_state(rig.trainer))
    assert other.trainer.optimizer.lr_factor == 0.5
    assert other.trainer.progress.rollbacks == 1, "they have one budget"
    CheckpointManager(tmp_path, rig.trainer).save()
    again = Rig()
    CheckpointManager(tmp_path, again.trainer).resume("must")
    assert again.trainer.optimizer.lr_factor == 0.5
    assert again.trainer.progress.rollbacks == 0
    assert "the learning rate stays at 0.5 times learner.lr" in notes[0]
    cooler = Rig("learner.lr=1e-5")
    CheckpointManager(tmp_path, cooler.trainer).resume("must")
    assert cooler.trainer.optimizer.lr_factor == 1.0


def test_learners_of_a_new_group_roll_back_to_one_state() -> None:
    rig = Rig()
    rig.train(times=2)
    rig.guard.reset_states()
    here = rig.state()
    rig.train(times=2)
    for _ in range(2):
        rig.train(np.nan, times=3)
        rig.guard.roll_back()
        assert same(rig.state(), here)


class Twice:
    """Two learners' exchange, one of which is this one; the other's gradients may be NaN."""

    world = 2

    def __init__(self, rig: Rig, bad: bool) -> None:
        self._rig, self._bad = rig, bad

    def prepare_backward(self, optimizer: Any, total: float) -> None:
        pass

    def step(self, optimizer: Any, total: float, env_steps: int) -> Tensor:
        if self._bad:
            optimizer.grads += torch.nan
        norm: Tensor = optimizer.step(total, env_steps)
        return norm

    def all_reduce(self, values: Tensor) -> None:
        values *= 2


def test_nonfinite_gradients_of_one_learner_are_skipped_by_all() -> None:
    rig = Rig()
    rig.trainer.sync = Twice(rig, bad=True)  # type: ignore[assignment]
    before = rig.state()
    rig.train(times=3)
    assert same(rig.state(), before)
    assert rig.guard.needs_rollback, "each of them knows at the same time"

"""Learners on a GPU when one of them dies: its reductions are queued already and never end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.configs.load import resolve
from penstock.core.params import Stamp
from penstock.envs import probe
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.nonfinite import NonFiniteGuard
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.publisher import Publisher
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.state import state_tensors, take_state
from penstock.learner.sync.gradient_sync import GroupLostError, SingleLearner
from penstock.learner.sync.local_sgd import LocalSgd
from penstock.learner.trainer import Trainer
from penstock.profiling.ledger import TimeLedger
from penstock.transport.shm.weights_board import WeightsBoard
from simulated_device import HazardError, SimulatedDevice, simulated
from small_trainer import slot, trainer

SEEDS = range(2)
SETTLE_S = 0.01
TIMEOUT_S = 60.0
LAST = 4  # batches before the one with the lost reduction


class NcclStandIn(SingleLearner):
    """Queues reductions; from one update on they never complete."""

    def __init__(self, made: Trainer, device: SimulatedDevice, lost_update: int) -> None:
        self._grads, self._device, self._lost = made.optimizer.grads, device, lost_update

    def step(self, optimizer: Any, total: float, env_steps: int) -> Tensor:
        if optimizer.updates >= self._lost:
            self._device.stall()
            self._grads.fill_(float(optimizer.updates))  # as an abort leaves them
        return super().step(optimizer, total, env_steps)


class Batches:
    """The same batches every time."""

    def __init__(self, made: Trainer) -> None:
        self._made, self._random = made, np.random.default_rng(3)
        self._staged = [StagingBatch(made.spec, 1, made.device) for _ in range(2)]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._step()

    def _step(self) -> None:
        self._staged.reverse()
        batch = self._staged[0]
        batch.gather([slot(self._made, self._random)])
        try:
            self._made.step(batch)
        finally:
            batch.on_last_use()


def states_of_batches() -> list[dict[str, Any]]:
    """The state after each batch, on the CPU."""
    made = trainer()
    batches, found = Batches(made), [copied(made)]
    for _ in range(LAST):
        batches.step()
        found.append(copied(made))
    return found


def copied(made: Trainer) -> dict[str, Any]:
    state = take_state(made)
    return {name: array.copy() for name, array in state.items() if name != "progress"}


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_reduction_is_detected_and_later_updates_are_undone(seed: int) -> None:
    expected = states_of_batches()
    with simulated(seed) as device:
        made = trainer()
        updates = made.config.learner.updates_per_batch
        made.sync = NcclStandIn(made, device, LAST * updates + 1)
        made.queue.join_group(state_tensors(made), TIMEOUT_S)
        waited = 0

        def meanwhile() -> None:  # as the supervisor's word of a member that has ended
            nonlocal waited
            waited += 1
            if device.stalled and waited > 100:
                raise GroupLostError("rank 1 has ended")

        made.queue.call_while_waiting(meanwhile)
        batches = Batches(made)
        with pytest.raises(GroupLostError, match="rank 1 has ended"):
            batches.step(LAST + 3)
        with made.queue.leave_group(SETTLE_S):
            assert device.stalled
            device.abort()
        made.on_regroup()
        found = copied(made)
    equal = [same(found, state) for state in expected]
    # The last complete batch, or the one before it if its end was not seen yet.
    assert any(equal[LAST - 1 :]), equal


def test_a_reduction_that_never_ends_is_given_up_after_the_timeout() -> None:
    with simulated() as device:
        made = trainer()
        made.queue.join_group(state_tensors(made), 0.05)
        device.stall()
        with pytest.raises(GroupLostError, match=r"a batch was not computed within 0\.05 s"):
            made.queue.drain()
        device.abort()


def test_reductions_that_complete_are_awaited_and_undo_no_update() -> None:
    with simulated() as device:
        made = trainer()
        made.queue.join_group(state_tensors(made), TIMEOUT_S)
        Batches(made).step()
        with made.queue.leave_group(TIMEOUT_S):
            pass
        assert device.stalled is False
        found = copied(made)
    assert same(found, states_of_batches()[1])


def test_an_average_of_parameters_counts_as_a_batch() -> None:
    with simulated() as device:
        made = trainer()
        made.queue.join_group(state_tensors(made), TIMEOUT_S)
        alone: Any = SimpleNamespace(world=1, gradients=SoloCollective(1, 1))
        pace = LocalSgd(
            alone, made.optimizers(), made.config.learner, TimeLedger(), made.queue.on_batch_queued
        )
        before = copied(made)["weights"]
        pace._average(0.5)
        with made.queue.leave_group(TIMEOUT_S):
            device.abort()
        np.testing.assert_array_equal(copied(made)["weights"], before / 2)


def test_a_rollback_counts_as_a_batch() -> None:
    with simulated() as device:
        made = trainer()
        made.queue.join_group(state_tensors(made), TIMEOUT_S)
        guard = NonFiniteGuard(made, lambda *_, **__: None)
        good = copied(made)["weights"]
        Batches(made).step(2)
        guard.roll_back()
        device.stall()  # in the first update after it
        made.optimizer.values.fill_(7)
        with made.queue.leave_group(SETTLE_S):
            device.abort()
        np.testing.assert_array_equal(copied(made)["weights"], good)


def test_target_network_follows_its_state_when_updates_are_undone() -> None:
    config = resolve("pong_apex", ["learner.precision=fp32", "learner.device=cpu"])
    made: Any = OffPolicyTrainer(config, probe(config.env))
    frames = torch.full((1, 4, 84, 84), 9, dtype=torch.uint8)
    before = made._update._target_q(frames)
    for tensor in made._update.state().values():
        tensor.mul_(1.5)  # as `StateCopies` writes it
    made.on_regroup()
    assert not torch.allclose(made._update._target_q(frames), before)


def test_weights_behind_a_lost_reduction_are_not_published() -> None:
    with simulated() as device:
        made = trainer()
        board = WeightsBoard.create(made.layout.size, shared=False)
        publisher = Publisher(made.published_tensors(), board)
        publisher.publish(0, Stamp(0, 1))
        publisher.flush(wait=True)
        device.stall()
        publisher.publish(0, Stamp(0, 2))
        publisher.drop()
        device.abort()
        publisher.flush(wait=True)
        assert board.read(np.empty(made.layout.size, np.float32)) == Stamp(0, 1)
        publisher.publish(0, Stamp(0, 3))
        publisher.flush(wait=True)
        assert board.read(np.empty(made.layout.size, np.float32)) == Stamp(0, 3)
        board.close()


def test_simulated_device_refuses_to_wait_for_stalled_work() -> None:
    with simulated() as device:
        values = torch.zeros(2, device=torch.device("cpu"))
        device.stall()
        values.add_(1)
        with pytest.raises(HazardError, match="waits for what never ends"):
            values.cpu()
        device.abort()
        assert values.cpu().tolist() == [1, 1]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert a.keys() == b.keys()
    return all(np.array_equal(a[name], b[name]) for name in a)

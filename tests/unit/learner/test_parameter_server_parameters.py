"""How pushes change the parameters, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from penstock.configs.sections import LearnerConfig
from penstock.learner.extras.parameter_server import protocol
from penstock.learner.extras.parameter_server.client import LocalCopy
from penstock.learner.extras.parameter_server.parameters import (
    Parameters,
    ServerState,
    make_parameters,
    pack_state,
    template,
    unpack_state,
)
from penstock.learner.extras.parameter_server.protocol import (
    NOTHING,
    Flag,
    Packed,
    ServerHeader,
    ServerMessage,
    ServerMessageKind,
)
from penstock.learner.optimizers.flat_optimizer import FlatOptimizer
from penstock.transport.wire import WireError


def config(**settings: object) -> LearnerConfig:
    base = {"count": 2, "optimizer": "sgd", "momentum": 0.0, "lr": 0.1, "grad_clip": None}
    return LearnerConfig.model_validate(base | settings)


def begun(cfg: LearnerConfig, values: list[float]) -> Parameters:
    made = make_parameters(len(values), cfg)
    arrays = {name: np.zeros(shape) for name, shape in template(len(values), cfg).items()}
    made.load(ServerState(0, 0, NOTHING, np.array(values, np.float32), arrays))
    return made


def message(packed: Packed) -> ServerMessage:
    return protocol.decode(protocol.encode(ServerHeader(ServerMessageKind.PUSH, samples=1), packed))


def gradient(*sums: float) -> ServerMessage:
    return message(protocol.pack_dense(np.array(sums, np.float32)))


def changes(**at: float) -> ServerMessage:
    indices = np.array([int(name[1:]) for name in at], np.uint32)
    return message(protocol.pack_sparse(indices, np.array(list(at.values()), np.float32)))


@pytest.mark.parametrize("gradients", [1, 3])
def test_learning_rate_is_scaled_by_the_gradients_of_a_step(gradients: int) -> None:
    """Those that `backup` does not wait for are not in it, nor are those of dead learners."""
    parameters = begun(config(pace="backup", count=4, lr_scaling="linear"), [1.0])
    for _ in range(2):
        for _ in range(gradients):
            parameters.add(parameters.read(gradient(2.0)), 2, 1)
        assert parameters.update(alone=False, steps=0)
    np.testing.assert_allclose(parameters.values, [1.0 - 2 * 0.1 * gradients], rtol=1e-6)


def test_gradients_of_one_step_are_weighted_by_samples() -> None:
    parameters = begun(config(pace="backup"), [1.0, 1.0])
    parameters.add(parameters.read(gradient(20.0, 0.0)), 10, 1)  # mean 2 over 10 samples
    parameters.add(parameters.read(gradient(0.0, 120.0)), 30, 1)  # mean 4 over 30
    assert parameters.update(alone=False, steps=0)
    # mean over 40 samples: (0.5, 3)
    np.testing.assert_allclose(parameters.values, [0.95, 0.7], rtol=1e-6)
    assert parameters.samples == 40


def test_single_gradient_updates_are_weighted_by_their_share() -> None:
    parameters = begun(config(pace="tap"), [0.0])
    parameters.add(parameters.read(gradient(10.0)), 10, 1)
    assert parameters.update(alone=True, steps=0)
    np.testing.assert_allclose(parameters.values, [-0.1], rtol=1e-6)  # mean 1, weight 1
    parameters.add(parameters.read(gradient(30.0)), 30, 2)
    assert parameters.update(alone=True, steps=0)
    np.testing.assert_allclose(parameters.values, [-0.25], rtol=1e-6)  # mean 1, weight 30/20


def test_no_update_is_made_without_a_gradient() -> None:
    parameters = begun(config(pace="ssp"), [1.0])
    assert not parameters.update(alone=True, steps=0)
    assert not begun(config(pace="asp"), [1.0]).update(alone=True, steps=0)


def test_learning_rate_falls_by_the_steps_of_all_workers() -> None:
    parameters = begun(config(pace="ssp", lr_decay_steps=100, lr_end_fraction=0.0), [0.0])
    parameters.add(parameters.read(gradient(1.0)), 1, 1)
    parameters.update(alone=True, steps=50)
    np.testing.assert_allclose(parameters.values, [-0.05], rtol=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop", "sgd"])
def test_state_survives_encoding_and_decoding(optimizer: str) -> None:
    cfg = config(pace="ssp", optimizer=optimizer, momentum=0.9)
    one = begun(cfg, [1.0, 2.0, 3.0])
    for _ in range(3):
        one.add(one.read(gradient(1.0, -2.0, 0.5)), 4, 1)
        one.update(alone=True, steps=0)
    packed = pack_state(one.values, one.arrays())
    head = ServerHeader(
        ServerMessageKind.STATE, version=3, samples=12, tally=(1.0, 9.0, 2.0, 0.5, 4.0, 2.0)
    )
    state = unpack_state(protocol.decode(protocol.encode(head, packed)), 3, template(3, cfg))
    assert (state.version, state.samples, state.tally) == (3, 12, head.tally)
    other = make_parameters(3, cfg)
    other.load(state)
    for parameters in (one, other):
        parameters.add(parameters.read(gradient(1.0, 1.0, 1.0)), 4, 1)
        parameters.update(alone=False, steps=0)
    np.testing.assert_array_equal(one.values, other.values)


def test_a_state_of_another_size_is_refused() -> None:
    cfg = config(pace="ssp")
    packed = pack_state(np.zeros(3, np.float32), {"steps": np.zeros(())})
    with pytest.raises(WireError):
        unpack_state(protocol.decode(protocol.encode(ServerHeader(3), packed)), 3, template(3, cfg))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("pace", ["ssp", "asp"])
def test_numbers_that_are_not_finite_are_refused(pace: str, bad: float) -> None:
    parameters = begun(config(pace=pace), [1.0, 1.0])
    with pytest.raises(WireError) as caught:
        parameters.read(changes(_1=bad) if pace == "asp" else gradient(0.0, bad))
    assert caught.value.reason == "not_finite"


# ------------------------------------------------------------------------------------------- asp


def test_changes_are_added_and_sent_to_workers_that_lack_them() -> None:
    shared = begun(config(pace="asp"), [1.0, 2.0, 3.0, 4.0])
    shared.add(shared.read(changes(_1=0.5)), 8, 1)
    assert shared.update(alone=True, steps=0)
    shared.add(shared.read(changes(_1=0.25, _3=-1.0)), 8, 2)
    shared.update(alone=True, steps=0)
    np.testing.assert_array_equal(shared.values, [1.0, 2.75, 3.0, 3.0])
    packed = shared.answer(0, 2)
    indices, values = protocol.sparse(message(packed), 4)
    assert indices.tolist() == [1, 3]
    assert values.tolist() == [2.75, 3.0]  # values, not changes: nothing is added twice
    indices, values = protocol.sparse(message(shared.answer(2, 2)), 4)
    assert indices.size == 0
    assert shared.samples == 16


def test_worker_without_parameters_gets_all_values() -> None:
    shared = begun(config(pace="asp"), [1.0, 2.0])
    packed = shared.answer(-1, 0)
    assert packed.flags == Flag.DENSE
    np.testing.assert_array_equal(protocol.dense(message(packed), 2), [1.0, 2.0])


def local_copy(values: list[float], significance: float) -> tuple[FlatOptimizer, LocalCopy]:
    parameter = nn.Parameter(torch.tensor(values))
    optimizer = FlatOptimizer([("x", parameter)], config(pace="asp", lr=1.0))
    return optimizer, LocalCopy(optimizer, significance)


def test_changes_are_sent_once_significant() -> None:
    optimizer, copy = local_copy([1.0, 100.0, 0.0], significance=0.1)
    optimizer.grads.copy_(torch.tensor([-0.06, -6.0, -0.001]))
    copy.step(1, 0)
    indices, sent = copy.take_significant(1)
    assert indices.tolist() == [2]  # any change of a value of about 0 is
    optimizer.grads.copy_(torch.tensor([-0.06, 0.0, 0.0]))
    copy.step(1, 0)
    indices, sent = copy.take_significant(1)
    assert indices.tolist() == [0]  # 0.12 of 1.12, after 0.06 of 1.06
    torch.testing.assert_close(sent, torch.tensor([0.12]))
    indices, sent = copy.take_significant(4)  # at clock 4 the threshold is 0.05
    assert indices.tolist() == [1]
    torch.testing.assert_close(sent, torch.tensor([6.0]))
    assert copy.take_significant(9)[0].numel() == 0


def test_pull_keeps_unsent_changes() -> None:
    optimizer, copy = local_copy([10.0, 10.0], significance=0.5)
    optimizer.grads.copy_(torch.tensor([1.0, 0.0]))
    copy.step(1, 0)
    assert copy.take_significant(1)[0].numel() == 0
    copy.set_shared(torch.tensor([1]), torch.tensor([20.0]))
    torch.testing.assert_close(optimizer.values, torch.tensor([9.0, 20.0]))
    copy.set_shared(slice(0, 2), torch.tensor([5.0, 6.0]))
    torch.testing.assert_close(optimizer.values, torch.tensor([4.0, 6.0]))

"""Every update on a pretended GPU: all tensors lie on it, and the host never waits.

See `pretended_gpu`. What waits, and why it may, is in `WAITING_CODECS` and the tests beside it.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    unset_fake_temporarily,
)

import pretended_gpu
from penstock.algos.slots import UnrollSummary
from penstock.configs.load import resolve
from penstock.core.params import Stamp
from penstock.core.specs import HEADER
from penstock.envs import probe
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.codecs.registry import CODECS
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.publisher import Publisher
from penstock.learner.sources.batch_sampler import ReplayBatch
from penstock.learner.sources.staging import torch_dtype
from penstock.learner.state import set_weights, weights_of
from penstock.learner.trainer import Trainer
from penstock.replay import Batch
from penstock.transport.shm.weights_board import WeightsBoard
from pretended_gpu import FREE_NBYTES, GPU, HostWaitsError, Waits, pretended
from reduce_ring import codec_for

# copy.deepcopy asks for a fake tensor's address
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

SMALL = ("actors.unroll=6", "actors.envs=8")
SHORT = ("algo.epochs=2", "learner.updates_per_batch=4", "learner.publish_every=8")
UNROLLS = {
    "ppo": ("cartpole", "algo.name=ppo", "learner.updates_per_batch=2"),
    "ppo, value clip": ("cartpole", "algo.name=ppo", "algo.value_clip=0.2"),
    "pqn": ("cartpole", "algo.name=pqn", "learner.updates_per_batch=2"),
    "impala": ("cartpole", "algo.name=impala"),
    "impala, accumulated": ("cartpole", "algo.name=impala", "learner.accumulate=2"),
    "rmsprop": ("cartpole", "algo.name=impala", "learner.optimizer=rmsprop"),
    "frames by ppo": ("pong", "learner.precision=bf16"),
    "frames by impala": ("pong_impala", "learner.precision=bf16"),
    "residual network": ("pong_impala", "model.kind=impala_cnn", "learner.precision=bf16"),
    "memory": ("memory", "learner.precision=bf16"),
    "normalised rewards, continuous": ("halfcheetah", "algo.normalize_rewards=true", *SHORT),
    "frames, continuous": ("car_racing", "algo.target_kl=null"),  # which waits
}
DRAWN = {
    "dqn": ("cartpole_dqn",),
    "dqn on frames": ("pong_apex", "learner.precision=bf16"),
    "sac": ("pendulum_sac",),
    "td3": ("Pendulum-v1", "algo.name=td3"),
    "sac, normalised": ("pendulum_sac", "model.normalize_observations=true"),
}
WAITING_CODECS = {"powersgd": "torch's own hook synchronizes its device"}
UNKNOWN_CODECS = {"terngrad": "torch lets a device that is written in Python have no generator"}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    with pretended(monkeypatch) as made:
        yield made


def unroll_trainer(waits: Waits, target: str, *options: str) -> Trainer:
    with unset_fake_temporarily():
        config = resolve(target, [*SMALL, *options])
        info = probe(config.env)
    waits.allowed = True
    made = Trainer(config, info)
    waits.allowed = False
    return made


def unrolls(made: Trainer) -> Any:
    """A batch on the device."""
    spec, learner = made.spec, made.config.learner
    shapes = {
        c.name: (*spec.rows_of(c)[:-1], learner.batch_slots * spec.envs, *c.shape)
        for c in spec.columns
    }
    arrays = {c.name: np.zeros(shapes[c.name], c.dtype) for c in spec.columns}
    arrays["alive"][...] = True
    tensors = {
        c.name: torch.empty(shapes[c.name], dtype=torch_dtype(c.dtype), device=GPU)
        for c in spec.columns
    }
    return SimpleNamespace(
        tensors=tensors,
        arrays=arrays,
        headers=np.zeros(0, HEADER),
        steps=arrays["alive"].size,
        summary=UnrollSummary.of(arrays),
        wait_on_device=lambda: None,
    )


@pytest.mark.parametrize("name", UNROLLS)
def test_updates_from_unrolls_stay_on_the_device_without_waits(waits: Waits, name: str) -> None:
    made = unroll_trainer(waits, *UNROLLS[name])
    assert made.optimizer.values.device == made.optimizer.grads.device == GPU
    for _ in range(2):
        made.step(unrolls(made))
        made.statistics()


@pytest.mark.parametrize("name", [name for name in UNROLLS if "frames" in name])
def test_frames_are_in_channels_last_order(waits: Waits, name: str) -> None:
    made = unroll_trainer(waits, *UNROLLS[name])
    made.step(unrolls(made))
    # The convolutions of a real GPU pass their order on; fake ones do not.
    frames = [given for given in waits.convolved if given.shape[-1] >= 84]
    assert frames
    assert all(given.is_contiguous(memory_format=torch.channels_last) for given in frames)


def test_pass_size_fits_a_quarter_of_the_free_memory(waits: Waits) -> None:
    target, *options = UNROLLS["frames by ppo"]
    made = unroll_trainer(waits, target, *options, "actors.envs=128")
    made.step(unrolls(made))
    # In bf16 the frames and the four outputs of the Nature CNN, in fp32 the features; and the
    # weights in bf16, which the rows of the first pass share.
    rows = 2 * 128 * 6 // made.config.learner.updates_per_batch
    kept = 2 * (4 * 84 * 84 + 32 * 20 * 20 + 64 * 9 * 9 + 64 * 7 * 7 + 512) + 4 * 512
    kept += 2 * made.optimizer.values.numel() // rows
    assert made._pass_size.rows == pytest.approx(FREE_NBYTES // 4 // kept, rel=0.02)
    fixed = unroll_trainer(waits, target, *options, "learner.micro_batch=100")
    fixed.step(unrolls(fixed))
    assert fixed._pass_size.rows == 100


@pytest.mark.parametrize("name", DRAWN)
def test_updates_from_replay_stay_on_the_device_without_waits(waits: Waits, name: str) -> None:
    target, *options = DRAWN[name]
    with unset_fake_temporarily():
        config = resolve(target, options)
        info = probe(config.env)
    waits.allowed = True
    made = OffPolicyTrainer(config, info)
    waits.allowed = False
    space, actions = info.observation_space, info.action_space
    discrete = hasattr(actions, "n")
    batch = {
        "obs": np.zeros((8, *space.shape), space.dtype),
        "action": np.zeros((8, *(actions.shape or ())), np.int32 if discrete else np.float32),
        "reward": np.zeros(8, np.float32),
        "next_obs": np.zeros((8, *space.shape), space.dtype),
        "discount": np.ones(8, np.float32),
        "weights": np.ones(8, np.float32),
    }
    for _ in range(2):
        made.step(ReplayBatch(Batch(batch)))
        made.statistics()


def test_weights_are_published_without_a_wait(waits: Waits) -> None:
    made = unroll_trainer(waits, "cartpole")
    board = WeightsBoard.create(made.layout.size, shared=False)
    publisher = Publisher(made.published_tensors(), board)
    publisher.publish(0, Stamp(0, 1))
    publisher.flush()
    board.close()


def test_weights_are_saved_and_return_to_the_device(waits: Waits) -> None:
    made = unroll_trainer(waits, "halfcheetah", "algo.normalize_rewards=true")
    waits.allowed = True  # a checkpoint needs the values
    set_weights(made, weights_of(made))
    assert made.state_dict()
    assert all(
        tensor.device == GPU
        for tensor in (*made.published_tensors(), *made.shared_statistics().values())
    )


@pytest.mark.parametrize("name", sorted(CODECS.specs.keys() - UNKNOWN_CODECS.keys()))
def test_codecs_stay_on_the_device(waits: Waits, name: str) -> None:
    waits.allowed = True
    codec = codec_for(4, 1, codec=name, warmup_updates=0, device=GPU)
    waits.allowed = False
    grads = torch.empty(max(bucket.stop for bucket in codec.buckets), device=GPU)
    try:
        for update in range(2):
            codec.begin(10_000 + update)
            for bucket in codec.buckets:
                codec.reduce(bucket, grads[bucket.start : bucket.stop], SoloCollective(1, 4))
    except (DataDependentOutputException, DynamicOutputShapeException, HostWaitsError):
        assert name in WAITING_CODECS, f"{name} waits for the device"
        return
    assert name not in WAITING_CODECS


@pytest.mark.parametrize(
    "call",
    [
        lambda there, here: there.sum().item(),
        lambda there, here: bool(there.any()),
        lambda there, here: there[there > 0],
        lambda there, here: there.nonzero(),
        lambda there, here: there.cpu(),
        lambda there, here: here.to(there.device),
        lambda there, here: torch.tensor([1.0], device=there.device),
        lambda there, here: there.copy_(here),
        lambda there, here: there + here,
    ],
)
def test_waits_and_mixed_devices_are_detected(
    waits: Waits, call: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    there, here = torch.empty(3, device=GPU), torch.empty(3)
    with pytest.raises((RuntimeError, HostWaitsError)):
        call(there, here)


def test_pretended_gpu_is_refused_beside_a_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pytest.skip.Exception, match="cannot be beside"):
        runpy.run_path(pretended_gpu.__file__)

"""Code that uses the device interface is correct on a device that lags behind its host.

The same work is done on the CPU and on the simulated device (`simulated_device`), under several
seeds: the numbers are the same, and no access is without an order. Then each call that makes an
order is left out, one at a time, and that is found: none is there for nothing, and none untested.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.configs.load import resolve
from penstock.core.params import Stamp
from penstock.device.choice import device_of
from penstock.device.transfers import DeviceUploader
from penstock.envs import probe
from penstock.learner.codecs.collective import SoloCollective
from penstock.learner.codecs.reducer import Reducer
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.publisher import Publisher
from penstock.learner.sources.batch_sampler import ReplayBatch
from penstock.learner.sources.staging import StagingBatch
from penstock.models.flat_parameters import flatten
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Batch, Replay
from penstock.transport.shm.weights_board import WeightsBoard
from reduce_ring import SHAPES, codec_for
from simulated_device import HazardError, simulated
from small_trainer import slot, trainer

SEEDS = range(4)
BATCHES = 5
POLICY_ID = 0
Work = Callable[[], Any]


def unrolls() -> Any:
    """Train on batches that another thread gathers, and read statistics."""
    made = trainer()
    batches = [StagingBatch(made.spec, 1, made.device) for _ in range(2)]
    rng = np.random.default_rng(3)
    with ThreadPoolExecutor(1) as feeder:
        gathered = feeder.submit(batches[0].gather, [slot(made, rng)])
        for number in range(BATCHES):
            gathered.result()
            batch, following = batches[number % 2], batches[(number + 1) % 2]
            gathered = feeder.submit(following.gather, [slot(made, rng)])
            made.step(batch)
            batch.on_last_use()
            assert all(np.isfinite(value) for value in made.statistics().values())
        gathered.result()
    return made.optimizer.values.detach().cpu().numpy()


def weights() -> Any:
    """Publish weights that change at once, and read what arrives."""
    made, found = trainer(), []
    board = WeightsBoard.create(made.layout.size, shared=False)
    publisher, read = (
        Publisher(made.published_tensors(), board),
        np.empty(made.layout.size, np.float32),
    )
    for number in range(BATCHES):
        publisher.publish(POLICY_ID, Stamp(0, number))
        made.optimizer.values.mul_(2)
        if number % 2:
            publisher.flush(wait=True)
            assert board.read(read) == Stamp(0, number)
            found.append(read.copy())
        publisher.flush()
    board.close()
    return np.stack(found)


def transitions(*options: str) -> Any:
    """Train on arrays that are overwritten as soon as a step returns, and take the differences."""
    config = resolve(
        "Acrobot-v1",
        [
            *("algo.name=dqn", "replay.prioritized=true"),
            *("learner.precision=fp32", "learner.device=cpu"),
            *options,
        ],
    )
    made = OffPolicyTrainer(config, probe(config.env))
    rng = np.random.default_rng(3)
    errors: list[Any] = []
    known: list[Any] = []
    arrays = {
        "obs": np.empty((32, 6), np.float32),
        "action": np.empty(32, np.int32),
        "reward": np.empty(32, np.float32),
        "next_obs": np.empty((32, 6), np.float32),
        "discount": np.empty(32, np.float32),
        "weights": np.empty(32, np.float32),
    }
    for _ in range(BATCHES):
        for name, array in arrays.items():
            array[...] = (
                rng.integers(0, 3, 32) if name == "action" else rng.normal(size=array.shape)
            )
        known.append(made.step(ReplayBatch(Batch(arrays))).errors)
        if len(known) > 1:  # as the sampler reads them
            errors.append(known.pop(0).get().copy())
    errors.append(known.pop().get().copy())
    return np.concatenate(errors), made.published_tensors()[0].detach().cpu().numpy()


def parts_of_dqn() -> Any:
    """Train on transitions with noise, quantiles and a rate of exploration that is published."""
    schedule = "algo.epsilon={from: 1, to: 0, steps: 100}"
    return transitions("algo.noisy=true", "algo.quantiles=4", schedule)


def uploads() -> Any:
    """Use uploaded arrays, and let them go at once."""
    uploader, made = DeviceUploader(device_of(torch.device("cpu"))), []
    array = np.empty(1000, np.float32)
    for number in range(BATCHES):
        array[...] = number
        placed = uploader.send(array).tensors_on_current_stream()
        made.append((placed * 2).sum())
        del placed
    return torch.stack(made).cpu().numpy()


def reductions() -> Any:
    """Reduce gradients in another thread while the backward pass goes on, and use them."""
    cpu = torch.device("cpu")
    nets = [nn.Parameter(torch.full(shape, 0.5, device=cpu)) for _, shape in SHAPES]
    values = flatten(nets)
    grads = torch.zeros_like(values)
    for parameter, part in zip(nets, grads.split([p.numel() for p in nets]), strict=True):
        parameter.grad = part.view(parameter.shape)
    with ThreadPoolExecutor(1) as thread:
        codec = codec_for(4, 1, codec="none")
        ring = SoloCollective(1, 4)
        reducer = Reducer(grads, nets, codec, ring, thread, TimeLedger(), overlap=True)
        for update in range(BATCHES):
            grads.zero_()
            reducer.prepare_backward(update, 4.0)
            sum((p * p * (i + 1)).sum() for i, p in enumerate(nets)).backward()  # type: ignore[union-attr]
            reducer.finish(update, 4.0)
            with torch.no_grad():
                values.sub_(grads, alpha=0.1)
        reducer.close()
    return values.cpu().numpy()


def prefetched() -> Any:
    """Use batches that another thread draws and brings, and let them go at once."""
    replay = Replay({"obs": (np.float32, (300,)), "action": (np.int64, ())}, 64, seed=3)
    for number in range(64):
        obs = np.full(300, number, np.float32)
        replay.add(
            obs=obs, action=0, reward=0.0, terminated=False, truncated=False, next_obs=obs + 1
        )
    made = []
    batches = replay.batches(16, device="cpu", prefetch=2)
    for _ in range(BATCHES):
        batch = next(batches)
        made.append((batch.obs * batch.next_obs).sum())
        del batch
    batches.close()
    return torch.stack(made).cpu().numpy()


WORKS: dict[str, Work] = {
    work.__name__: work
    for work in (
        *(unrolls, weights, transitions, parts_of_dqn),
        *(uploads, reductions, prefetched),
    )
}

HAZARDS = [
    ("unrolls", "synchronize", "Upload.wait"),
    ("unrolls", "enter_thread", "StagingBatch.gather"),
    ("unrolls", "record", "DeviceUploader.fill"),
    ("unrolls", "use_stream", "DeviceUploader.fill"),
    ("unrolls", "wait_event", "Upload.tensors_on_current_stream"),
    ("unrolls", "wait_stream", "DeviceUploader.follow"),
    ("unrolls", "host_memory", "StagingBatch.__init__"),
    ("weights", "wait_stream", "Publisher.publish"),
    ("weights", "use_stream", "Publisher.publish"),
    ("weights", "record", "Publisher.publish"),
    ("weights", "query", "Publisher.flush"),
    ("weights", "synchronize", "Publisher.flush"),
    ("weights", "host_memory", "Publisher.__init__"),
    ("unrolls", "record", "Download.__init__"),
    ("transitions", "synchronize", "Download.get"),
    ("transitions", "host_memory", "Download.__init__"),
    ("uploads", "synchronize", "DeviceUploader.send"),
    ("uploads", "wait_event", "Upload.tensors_on_current_stream"),
    ("uploads", "record", "DeviceUploader.send"),
    ("uploads", "record_use", "Upload.tensors_on_current_stream"),
    ("uploads", "host_memory", "Pinned.filled"),
    ("prefetched", "enter_thread", "DeviceUploader.enter_thread"),
    ("prefetched", "record", "DeviceUploader.send"),
    ("prefetched", "wait_event", "Upload.tensors_on_current_stream"),
    ("prefetched", "record_use", "Upload.tensors_on_current_stream"),
    ("prefetched", "host_memory", "Pinned.filled"),
    ("reductions", "record", "Reducer._hand_over"),
    ("reductions", "enter_thread", "Reducer._reduce"),
    ("reductions", "wait_event", "Reducer._reduce"),
    ("reductions", "wait_stream", "Reducer.finish"),
]


@pytest.mark.parametrize("name", WORKS)
def test_device_that_lags_behind_its_host_computes_the_same_results(name: str) -> None:
    expected = WORKS[name]()
    for seed in SEEDS:
        with simulated(seed):
            found = WORKS[name]()
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("name", "method", "caller"), HAZARDS)
def test_removing_any_ordering_of_device_work_is_detected(
    name: str, method: str, caller: str
) -> None:
    expected = WORKS[name]()
    for seed in SEEDS:
        with simulated(seed, (method, caller)) as device:
            try:
                made = WORKS[name]()
                found = any(not np.array_equal(a, b) for a, b in zip(made, expected, strict=True))
            except HazardError:
                found = True
        assert device.skipped, "nothing was left out"
        if found:
            return
    pytest.fail("the simulated device finds nothing wrong")

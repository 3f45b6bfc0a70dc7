"""The trainer: how a batch becomes updates, and its devices, precision and statistics."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import small_trainer
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import StepHooks
from penstock.device.choice import device_of, pick_device
from penstock.envs import EnvInfo, probe
from penstock.learner.factory import kind_note, on_own_gpu
from penstock.learner.passes import trunk_dtype
from penstock.learner.trainer import Trainer
from penstock.models.actions import discrete
from penstock.models.layout import CnnShape, FusedActorCriticShape, MlpShape
from penstock.profiling.device import DeviceClock
from penstock.profiling.ledger import Part, TimeLedger
from small_trainer import weights

BOX = spaces.Box(-1, 1, (2,), np.float32)
OPTIONS = ("actors.envs=8", "actors.unroll=6", "algo.normalize_advantages=false")
batch = partial(small_trainer.batch, reward=1.0, alive=0.9)


def trainer(*options: str, device: str = "cpu") -> Trainer:
    config = resolve("cartpole", [*OPTIONS, f"learner.device={device}", *options])
    return Trainer(config, probe(config.env))


def test_micro_batches_give_the_update_of_the_whole() -> None:
    whole, parts = trainer(), trainer("learner.micro_batch=14")
    for made in (whole, parts):
        made.step(batch(made))
    torch.testing.assert_close(whole.optimizer.grads, parts.optimizer.grads, rtol=1e-4, atol=1e-4)


def test_updates_of_a_batch_take_each_environment_once() -> None:
    made = trainer("learner.updates_per_batch=4")
    staged = batch(made)
    assert made.step(staged).publish_due
    made.progress.commit(made.progress.growth(), made.progress.growth())
    assert made.progress.learner_steps == made.progress.version == 4
    assert made.progress.trained_steps == staged.steps
    assert np.count_nonzero(staged.arrays["alive"]) == staged.steps


def test_the_policy_lag_is_that_of_the_parameters_that_were_pulled_for_a_batch() -> None:
    made = trainer("learner.updates_per_batch=1")
    staged = batch(made)
    plan = made.plan_updates(staged)
    made.progress.follow(7)  # updates of other learners, which a parameter server counts
    made.step(staged, plan)
    assert dict(made.progress.lag.counts) == {7: staged.steps}
    assert made.progress.version == 7  # its own gradient is not in the weights here
    assert made.progress.learner_steps == 8


def test_publication_is_due_every_publish_every_updates() -> None:
    made = trainer("learner.publish_every=3")
    assert [made.step(batch(made)).publish_due for _ in range(6)] == [
        False,
        False,
        True,
    ] * 2


def test_after_update_hook_gets_the_number_of_remaining_updates() -> None:
    options = ("algo.name=ppo", "algo.normalize_advantages=none", "algo.epochs=2")
    made = trainer(*options, "algo.minibatches=unrolls", "learner.updates_per_batch=4")
    left: list[tuple[int, int]] = []

    class Left(StepHooks):
        def after_update(self, updates_left: int) -> None:
            left.append((updates_left, made.progress.version))

    made.step(batch(made), hooks=Left())
    assert left == [(7 - i, i + 1) for i in range(8)]


def test_each_backward_pass_is_announced() -> None:
    made = trainer("learner.updates_per_batch=2")
    begun: list[int] = []

    class Begun(StepHooks):
        def before_backward(self) -> None:
            begun.append(made.progress.version)

    made.step(batch(made), hooks=Begun())
    assert begun == [0, 1], "before the update is complete"


def test_statistics_are_means_and_start_over() -> None:
    made = trainer()
    assert made.statistics() == {}
    made.step(batch(made))
    first = made.statistics()
    assert 0 < first["entropy"] <= np.log(2) + 1e-6
    assert made.statistics() == {}


def test_initial_network_follows_the_seed() -> None:
    np.testing.assert_array_equal(weights(trainer()), weights(trainer()))
    assert not np.array_equal(weights(trainer()), weights(trainer("run.seed=1")))


@pytest.mark.parametrize(
    ("target", "options", "actions", "shape", "sentence"),
    [
        ("x:f", (), BOX, (3,), "x:f has actions of numbers, and the options that are not set have "
         "the defaults for env.kind vector; env.kind=continuous has the ones that suit it"),
        ("x:f", (), spaces.Discrete(2), (3, 84, 84), "x:f has images, and the options that are not "
         "set have the defaults for env.kind vector; env.kind=pixels has the ones that suit it"),
        ("x:f", (), spaces.Discrete(2), (3, 9, 9), ""),
        ("x:f", (), spaces.Discrete(2), (3,), ""),
        ("x:f", ("env.kind=continuous",), BOX, (3,), ""),
        ("Walker2d-v5", (), BOX, (17,), ""),
        ("halfcheetah", ("env.id=x:f",), BOX, (3,), ""),
    ],
)  # fmt: skip
def test_spaces_that_do_not_suit_the_defaults_are_reported(
    target: str, options: tuple[str, ...], actions: Any, shape: tuple[int, ...], sentence: str
) -> None:
    images = len(shape) == 3
    seen = spaces.Box(0, 255, shape, np.uint8 if images else np.float32)
    config = resolve(target, ["algo.name=ppo", *options])
    assert kind_note(config, EnvInfo(seen, actions, 1, "by hand", ())) == sentence


def test_missing_device_is_refused() -> None:
    with pytest.raises(UserError, match=r"cuda:99 is not there.*learner.device=auto"):
        pick_device("cuda:99")


@pytest.mark.parametrize(("name", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_gpu_device_always_has_an_index(
    name: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.cuda._utils import _get_device_index  # what torch.cuda.set_device checks by

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _get_device_index(pick_device(name)) == index


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_several_learners_of_a_host_have_a_gpu_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = resolve("cartpole", ["learner.count=2", f"learner.device={name}"])
    ranks: list[Any] = [SimpleNamespace(learner=rank, store=None) for rank in range(2)]
    devices = [pick_device(on_own_gpu(config, rank).learner.device) for rank in ranks]
    assert devices == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_learners_share_the_gpus_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = resolve("cartpole", ["learner.count=3", "actors.count=3", "learner.device=auto"])
    ranks: list[Any] = [SimpleNamespace(learner=rank, store=None) for rank in range(3)]
    shared = [on_own_gpu(config, rank).learner.device for rank in ranks]
    assert shared == ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.gpu
def test_a_gpu_takes_the_same_steps() -> None:
    on_cpu, on_gpu = trainer(), trainer(device="cuda")
    on_gpu.optimizer.values.copy_(on_cpu.optimizer.values)
    for made in (on_cpu, on_gpu):
        for _ in range(5):
            made.step(batch(made))
    torch.testing.assert_close(
        on_gpu.optimizer.values.cpu(), on_cpu.optimizer.values, rtol=1e-3, atol=1e-4
    )


def test_normalised_advantages_are_over_the_whole_update() -> None:
    options = ("algo.normalize_advantages=true",)
    whole, cut = trainer(*options), trainer(*options, "learner.micro_batch=7")
    for made in (whole, cut):
        made.step(batch(made))
    np.testing.assert_array_equal(weights(whole), weights(cut))


@pytest.mark.gpu
def test_gpu_time_of_training_is_attributed_to_parts() -> None:
    host = TimeLedger()
    config = resolve("cartpole", [*OPTIONS, "learner.device=cuda"])
    made = Trainer(config, probe(config.env), host)
    data = batch(made)
    made.step(data)
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    seconds = TimeLedger(part=Part.WAIT)
    clock = DeviceClock(host, seconds, partial(device_of(made.device).make_event, timed=True))
    host.follow(clock.mark)
    made.queue.call_while_waiting(clock.settle)
    for _ in range(20):
        made.step(data)
    torch.cuda.synchronize()
    host.switch(Part.WAIT)
    clock.settle()
    spent, wall_s = seconds.snapshot(), time.perf_counter() - began_s
    assert all(spent[part] > 0 for part in ("forward", "backward", "optimize"))
    assert sum(spent.values()) == pytest.approx(wall_s, rel=0.2)  # the first step has waited


def test_ledger_switches_at_given_times_stay_in_order() -> None:
    ledger = TimeLedger(part=Part.WAIT)
    begin = time.perf_counter_ns()
    ledger.switch_at(Part.FORWARD, begin + 1_000_000)
    ledger.switch_at(Part.BACKWARD, begin + 3_000_000)
    ledger.switch_at(Part.WAIT, begin + 2_000_000)  # never before the last
    ledger.switch_at(Part.OPTIMIZE, begin + 4_000_000)
    spent = ledger.snapshot()
    assert spent["forward"] == pytest.approx(2e-3)
    assert "backward" not in spent
    assert spent["wait"] >= 1e-3


@pytest.mark.parametrize(
    ("shape", "on_gpu"),
    [
        (MlpShape(400, discrete(6), (128, 128), "relu", 1.0), torch.bfloat16),
        (MlpShape(17, discrete(6), (64, 64), "tanh", 1.0), torch.float32),
        (CnnShape(4, 84, 84, discrete(6), 1 / 255), torch.bfloat16),
    ],
)
def test_default_precision_follows_device_and_network(
    shape: FusedActorCriticShape, on_gpu: torch.dtype
) -> None:
    assert trunk_dtype("auto", torch.device("cuda:0"), shape) is on_gpu
    assert trunk_dtype("auto", torch.device("cpu"), shape) is torch.float32
    assert trunk_dtype("bf16", torch.device("cpu"), shape) is torch.bfloat16

"""Updates of each algorithm: the GPU's against the CPU's, and whether the host waits in them."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from gpu_stages.finding import Finding, Options
from penstock.bench.ceiling import drawn, staged
from penstock.configs.load import resolve
from penstock.device.choice import device_of
from penstock.device.interface import Device
from penstock.envs import probe
from penstock.learner.factory import AnyTrainer, make_trainer
from penstock.learner.trainer import Trainer

FRAMES = (
    "env.kwargs.obs_shape=[4,84,84]", "env.kwargs.obs_dtype=uint8", "model.kind=nature_cnn",
    "actors.envs=8", "actors.unroll=8", "learner.micro_batch=4096", "algo.discount=0.99",
)  # fmt: skip
CASES: dict[str, tuple[str, ...]] = {
    "impala": ("synthetic", *FRAMES),
    "ppo": ("synthetic", "algo.name=ppo", "algo.epochs=1", *FRAMES),
    "dqn": ("synthetic", "algo.name=dqn", "env.kind=pixels", *FRAMES),
    "sac": ("pendulum_sac",),
}
# Two epochs, since the second one copies its order to the device. With `LONG` that is more than
# 64 KB, above which a copy of pageable memory waits for the device. An update is one pass there: a
# GPU queues about a thousand launches, and then the host waits, too.
EPOCHS = ("algo.epochs=2", "learner.updates_per_batch=2", "algo.minibatches=steps")
LONG = (
    *("actors.envs=128", "actors.unroll=80"),
    *("learner.batch_slots=1", "learner.micro_batch=8192"),
)
DRAWN = 32  # transitions of a batch from replay
WARM_UPS = 3
SPIN = 1_000_000_000  # cycles of a GPU, about half a second
MESSAGE = "called a synchronizing CUDA operation"
ROOT = Path(__file__).parents[2]
Update = Callable[[], object]


def correctness(options: Options) -> Iterator[Finding]:
    """One update from the same parameters on the same batch, in fp32; and one in bf16."""
    for name in CASES:
        mine, reference = (
            gradients(name, place, "learner.precision=fp32") for place in (options.place, "cpu")
        )
        found = f"{name}: gradient against the CPU's, relative difference"
        yield Finding(found, difference(mine, reference))
        low = gradients(name, options.place, "learner.precision=bf16").values()
        yield Finding(f"{name}: bf16 is finite", all(bool(g.isfinite().all()) for g in low))


def difference(mine: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """The largest relative difference of all optimizers; NaN where one is, which `max` may hide."""
    each = [(mine[part] - values).norm() / values.norm() for part, values in reference.items()]
    return float(torch.stack(each).max())


def gradients(name: str, place: str, *more: str) -> dict[str, Tensor]:
    """Of one update from the parameters of the seed, on the CPU, by the optimizer's name."""
    trainer, update = make(name, place, *more)
    torch.manual_seed(0)
    with mock.patch("torch.randn", _randn_of_host(torch.randn)):  # SAC's actions
        update()
    return {part: optimizer.grads.cpu() for part, optimizer in trainer.optimizers().items()}


def make(name: str, place: str, *more: str) -> tuple[AnyTrainer, Update]:
    """A trainer, and an update of it on a batch that lies on its device."""
    target, *rest = CASES[name]
    config = resolve(target, [*rest, f"learner.device={place}", *more])
    info = probe(config.env)
    trainer = make_trainer(config, info)
    if not isinstance(trainer, Trainer):
        return trainer, drawn(trainer, info, DRAWN)
    batch = staged(trainer, info)
    reward = np.random.default_rng(1).normal(size=batch.arrays["reward"].shape)
    batch.arrays["reward"][...] = reward
    batch.wait_on_device()  # else the upload may follow the copy
    batch.tensors["reward"].copy_(torch.from_numpy(batch.arrays["reward"]))
    return trainer, lambda: trainer.step(batch)


def synchronisations(options: Options) -> Iterator[Finding]:
    """Of the host with the device, in an update and its report, after the first few.

    torch does not report copies of memory that is not pinned, for which the driver may wait, nor
    `torch.cuda.synchronize`. So the device is also occupied first: an update that waits for nothing
    ends before the device does.
    """
    if not options.small:
        value = torch.ones(1, device=options.place)
        yield Finding("one on purpose is found", len(waits_in(value.item)) == 1)
    for name in CASES:
        epochs = (*EPOCHS, *(() if options.small else LONG)) if name == "ppo" else ()
        trainer, update = make(name, options.place, "learner.precision=bf16", *epochs)

        def reported(trainer: AnyTrainer = trainer, update: Update = update) -> None:
            update()
            trainer.statistics()

        for _ in range(WARM_UPS):
            reported()
        places = waits_in(reported)
        note = ", ".join(f"{place} ({count})" for place, count in Counter(places).items())
        yield Finding(f"{name}: synchronisations", len(places), note)
        if not options.small:
            yield Finding(
                f"{name}: ends before the device does",
                runs_ahead(device_of(trainer.device), reported),
            )


def waits_in(call: Update) -> list[str]:
    """The places in our code at which ``call`` makes the host wait for a GPU."""
    places: list[str] = []

    def shown(message: Warning | str, *_: Any, **__: Any) -> None:
        if MESSAGE in str(message):
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT))]
            ours = [f for f in frames if f.filename != __file__] or frames
            where = Path(ours[-1].filename).relative_to(ROOT)
            places.append(f"{where}:{ours[-1].lineno}")

    watched = torch.cuda.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        if watched:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            if watched:
                torch.cuda.set_sync_debug_mode("default")
    return places


def runs_ahead(device: Device, call: Update) -> bool:
    """Whether a call on an occupied GPU ends before the GPU has computed what it asks for."""
    device.synchronize()
    computed = device.make_event()
    torch.cuda._sleep(SPIN)
    computed.record()  # before the call: what the host may not wait for
    call()
    return not computed.query()


def _randn_of_host(randn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Noise that is the same on each device."""
    return lambda *size, device="cpu": randn(*size).to(device)

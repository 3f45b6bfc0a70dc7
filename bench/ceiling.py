"""The learner's ceiling: its rate on data that is in place already.

The trainer, precision, micro-batches and threads are the config's. The data is made up, but valid,
and used again and again with a learning rate of next to nothing, so that the weights stay sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.algos.registry import algorithm
from penstock.algos.slots import STATE
from penstock.autotune.forms import with_training_form
from penstock.bench.rates import Work, as_json, rounds_of
from penstock.configs.schema import Config
from penstock.core.interfaces import TransitionSequences
from penstock.core.observations import MASK, ObservationPart, views
from penstock.core.specs import HEADER, SlotSpec
from penstock.device.choice import device_of, pick_device
from penstock.envs import EnvInfo, probe
from penstock.envs.checking.vector import draw
from penstock.learner.factory import make_trainer
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.trainer import Trainer
from penstock.transport.shm.store import Slot

LEARNING_RATE = 1e-9  # so small that the weights stay as they are
Array = npt.NDArray[Any]


def rounds(config: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Measure the learner of ``config`` for about ``seconds``, in the process that calls this.

    `stages.learner` has it called in a process of its own.

    Returns:
        The rounds as `rates.as_json` has them, in agent steps; whether a GPU trained, as
        ``on_gpu``; and whether tcmalloc gives the memory, as ``tcmalloc``.
    """
    settings = Config.model_validate(config)
    learner_rounds = rounds_of({"learner": work(settings)}, seconds)["learner"]
    return as_json(learner_rounds) | {
        "on_gpu": device_of(pick_device(settings.learner.device)).runs_behind,
        "tcmalloc": "tcmalloc" in Path("/proc/self/maps").read_text(),
    }


def work(config: Config) -> Work:
    """Returns an update on data in place, in this process; its amount is in agent steps.

    With replay, the amount is the agent steps whose samples, `replay.samples_per_insert` of each,
    make up a batch.
    """
    learner = config.learner.model_copy(update={"lr": LEARNING_RATE})
    config = config.model_copy(update={"learner": learner})
    info = probe(config.env)
    trainer = make_trainer(with_training_form(config, info)[0], info)
    settle = device_of(trainer.device).synchronize

    if isinstance(trainer, Trainer):
        batch = staged(trainer, info)
        return Work(lambda: trainer.step(batch), batch.steps, settle)

    draws = algorithm(config.algo).data(config.algo)
    batch_size = config.replay.batch_size
    samples_per_step = config.replay.samples_per_insert or 1.0
    if isinstance(draws, TransitionSequences):
        update = drawn_sequences(trainer, info, batch_size, draws)
        return Work(update, batch_size * draws.length / samples_per_step, settle)
    return Work(drawn(trainer, info, batch_size), batch_size / samples_per_step, settle)


def staged(trainer: Trainer, info: EnvInfo) -> StagingBatch:
    """Returns a staging batch of made-up unrolls, on the trainer's device."""
    payload = trainer.spec.zeros()
    columns = made_up(trainer.spec, payload, info)
    header = np.zeros((), HEADER)
    header["steps"] = columns["alive"].size
    slot = Slot(0, header, tuple(payload), columns)

    count = trainer.config.learner.batch_slots
    batch = StagingBatch(trainer.spec, count, trainer.device)
    batch.gather([slot] * count)
    return batch


def made_up(spec: SlotSpec, payload: Sequence[Array], info: EnvInfo) -> dict[str, Array]:
    """Fill ``payload`` with an unroll such as a sound actor might have played.

    Returns:
        The columns of the payload, as views of it.
    """
    columns = spec.views(payload)
    rng = np.random.default_rng(0)
    columns["obs"][...] = like(columns["obs"], rng, info.parts)
    action = columns["action"]
    drawn_actions = draw(info.action_space, action.shape[0] * action.shape[1], rng)
    action[...] = drawn_actions.reshape(action.shape)
    columns["behaviour_logp"][...] = -1.0
    columns["alive"][...] = True
    return columns


def drawn(trainer: OffPolicyTrainer, info: EnvInfo, size: int) -> Callable[[], object]:
    """Make ``size`` transitions up, on the trainer's device.

    Returns:
        A call that makes one update on them.
    """
    rng = np.random.default_rng(0)
    space = info.observation_space
    dtype = np.float32 if np.issubdtype(space.dtype, np.floating) else space.dtype
    empty = np.empty((size, *space.shape), dtype)

    # Values are drawn in this order, so that the batch is the same at each time.
    obs = like(empty, rng)
    next_obs = like(empty, rng)
    batch = {
        "obs": obs,
        "action": draw(info.action_space, size, rng),
        "reward": rng.random(size, np.float32),
        "next_obs": next_obs,
        "discount": np.full(size, 0.99, np.float32),
    }
    tensors = {name: torch.from_numpy(array).to(trainer.device) for name, array in batch.items()}
    return lambda: trainer.update(tensors)


def drawn_sequences(
    trainer: OffPolicyTrainer, info: EnvInfo, size: int, draws: TransitionSequences
) -> Callable[[], object]:
    """Make ``size`` sequences up, on the trainer's device, of full length and within an episode.

    Returns:
        A call that makes one update on them.
    """
    rng = np.random.default_rng(0)
    space = info.observation_space
    dtype = np.float32 if np.issubdtype(space.dtype, np.floating) else space.dtype
    shape = (draws.length, size)
    obs = like(np.empty((draws.length + 1, size, *space.shape), dtype), rng, info.parts)
    actions = draw(info.action_space, math.prod(shape), rng)
    batch = {
        "obs": obs[:-1],
        "action": actions.reshape(*shape, *actions.shape[1:]),
        "reward": rng.random(shape, np.float32),
        "next_obs": obs[1:],
        "discount": np.full(shape, 0.99, np.float32),
        "mask": np.ones(shape, np.bool_),
    }
    for column in trainer.spec.columns:
        if column.name == STATE:
            batch[STATE] = rng.random((size, *column.shape), np.float32)

    tensors: dict[str, Any] = {
        name: torch.from_numpy(array).to(trainer.device) for name, array in batch.items()
    }
    tensors["burn_in"] = draws.burn_in
    return lambda: trainer.update(tensors)


def like(obs: Array, rng: np.random.Generator, parts: Sequence[ObservationPart] = ()) -> Array:
    """Returns random observations of the shape and type of ``obs``.

    They are numbers around 0 where ``obs`` has floats, otherwise bytes below 100. Of observations
    with ``parts``, which are bytes, each part is filled by its own type; a mask allows all actions.
    """
    if parts:
        packed = np.zeros(obs.shape, np.uint8)
        for name, view in views(parts, packed).items():
            view[...] = 1 if name == MASK else like(view, rng)
        return packed

    if obs.dtype.kind == "f":
        return rng.standard_normal(obs.shape, np.float32).astype(obs.dtype)
    return rng.integers(0, 100, obs.shape).astype(obs.dtype)

"""The complete state of a learner as arrays: for a checkpoint, or another learner."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.configs.schedules import over_run
from penstock.core.params import Arrays
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.optimizers.flat_optimizer import learning_rate

# Names of the arrays that are no part of a trainer's `state_dict`.
WEIGHTS = "weights"
PROGRESS = "progress"


def state_tensors(trainer: BaseTrainer[Any]) -> list[torch.Tensor]:
    """Returns the tensors on the trainer's device that updates change and `take_state` copies."""
    optimizers = trainer.optimizers().values()
    tensors = [
        *trainer.published_tensors(),
        *trainer.tensors(),
        *(tensor for optimizer in optimizers for tensor in optimizer.tensors().values()),
    ]
    # A tensor may be part of several; by its identity it occurs once.
    return list({id(tensor): tensor for tensor in tensors}.values())


@torch.no_grad()
def weights_of(trainer: BaseTrainer[Any]) -> npt.NDArray[np.float32]:
    """Returns a copy of the weights for actors, float32 ``[size]``, in the layout's order."""
    weights: npt.NDArray[np.float32] = (
        torch.cat([tensor.flatten() for tensor in trainer.published_tensors()]).cpu().numpy()
    )
    return weights


@torch.no_grad()
def set_weights(trainer: BaseTrainer[Any], weights: npt.NDArray[np.float32]) -> None:
    """Write a vector of `weights_of` into the network."""
    targets = trainer.published_tensors()
    parts = torch.from_numpy(weights).split([target.numel() for target in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view(target.shape))


def take_state(trainer: BaseTrainer[Any]) -> Arrays:
    """Returns weights, optimizers, targets and counters as arrays, by name."""
    progress = json.dumps(trainer.progress.state_dict()).encode()
    return trainer.state_dict() | {
        WEIGHTS: weights_of(trainer),
        PROGRESS: np.frombuffer(progress, np.uint8),
    }


def put_state(trainer: BaseTrainer[Any], state: Arrays) -> None:
    """Restore the state of `take_state`, also of another learner."""
    trainer_state = dict(state)
    set_weights(trainer, trainer_state.pop(WEIGHTS))
    progress = json.loads(trainer_state.pop(PROGRESS).tobytes())
    trainer.load_state_dict(trainer_state)
    trainer.progress.join(progress)
    follow_lr_factor(trainer)


def learning_rate_of(trainer: BaseTrainer[Any]) -> float:
    """Returns the learning rate of the last update, with its schedule, scaling and rollbacks."""
    progress = trainer.progress
    cfg = over_run(trainer.config.learner, trainer.config.stop.env_steps)
    update = max(progress.learner_steps, 1)
    learners = next(iter(trainer.optimizers().values())).learners_in_step
    rate = learning_rate(cfg, progress.trained_steps, update, learners)
    return rate * progress.lr_factor


def follow_lr_factor(trainer: BaseTrainer[Any]) -> None:
    """Set the optimizers' learning-rate factor to that of the progress."""
    for optimizer in trainer.optimizers().values():
        optimizer.lr_factor = trainer.progress.lr_factor

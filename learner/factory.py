"""Makes the trainer of a config, on its device."""

from __future__ import annotations

import torch

from penstock.algos.registry import ALGORITHMS, algorithm
from penstock.algos.samples import network_shape
from penstock.configs.kinds import OTHERWISE, defaults
from penstock.configs.schema import Config
from penstock.core.interfaces import Unrolls
from penstock.core.role import RoleContext
from penstock.envs import EnvInfo
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.passes import trunk_dtype
from penstock.learner.trainer import Trainer
from penstock.models.fitting import kind_of
from penstock.models.summary import in_words
from penstock.profiling.ledger import TimeLedger

AnyTrainer = Trainer | OffPolicyTrainer


def make_trainer(config: Config, info: EnvInfo, ledger: TimeLedger | None = None) -> AnyTrainer:
    """Make the trainer of a config's algorithm.

    Args:
        config: of the run.
        info: the properties of its environments.
        ledger: time ledger of the thread that trains.
    """
    if isinstance(algorithm(config.algo).data(config.algo), Unrolls):
        return Trainer(config, info, ledger)
    return OffPolicyTrainer(config, info, ledger)


def network_of(config: Config, info: EnvInfo, trainer: AnyTrainer) -> str:
    """Returns a sentence on the network, the number format of its training, and its device."""
    parameters = sum(len(optimizer.values) for optimizer in trainer.optimizers().values())
    shape = network_shape(config, info)
    network = in_words(shape, config.model, parameters)

    dtype = trunk_dtype(config.learner.precision, trainer.device, shape)
    number_format = "bf16" if dtype is torch.bfloat16 else "fp32"
    return f"{network}, trained in {number_format} on {trainer.device}"


def kind_note(config: Config, info: EnvInfo) -> str:
    """Returns a sentence if the defaults for another kind of environment suit the spaces better.

    Otherwise it is empty, as it is for a kind that the user has chosen.
    """
    chosen = config.env.kind
    kind = kind_of(config, info)
    path = ALGORITHMS.specs[config.algo.name].defaults
    if chosen != OTHERWISE or path is None:
        return ""
    if defaults(path, kind).values == defaults(path, chosen).values:
        return ""

    has = "images" if kind == "pixels" else "actions of numbers"
    return (
        f"{config.env.id} has {has}, and the options that are not set have the defaults for "
        f"env.kind {chosen}; env.kind={kind} has the ones that suit it"
    )


def on_own_gpu(config: Config, ctx: RoleContext) -> Config:
    """Returns the config of one of several learners, with a GPU of its own.

    With more learners than GPUs, some share one. The config is unchanged if `learner.device` is
    neither auto nor cuda without an index, or there is no GPU.
    """
    learner = config.learner
    gpus = torch.cuda.device_count()
    if learner.most_count == 1 or learner.device not in ("auto", "cuda") or not gpus:
        return config
    section = learner.model_copy(update={"device": f"cuda:{ctx.learner % gpus}"})
    return config.model_copy(update={"learner": section})

"""Makes the trainer of a config, on its device."""

from __future__ import annotations

import torch

from penstock.algos.base import UnrollAlgorithm
from penstock.algos.registry import ALGORITHMS, algorithm
from penstock.algos.samples import network_shape, slot_spec
from penstock.configs.kinds import OTHERWISE, defaults
from penstock.configs.schedules import over_run, with_values
from penstock.configs.schema import Config
from penstock.core.interfaces import Unrolls
from penstock.core.machine import processor
from penstock.core.role import RoleContext
from penstock.device.choice import device_of, pick_device
from penstock.envs import EnvInfo
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.trainer import Trainer, trunk_dtype
from penstock.models.compute_form import ComputeForm, Options, UpdateSize, training_forms
from penstock.models.fitting import kind_of
from penstock.models.general import GeneralShape
from penstock.models.summary import in_words
from penstock.models.timed_forms import Task, time_forms
from penstock.profiling.ledger import TimeLedger

AnyTrainer = Trainer | OffPolicyTrainer

MOST_TIMED_ROWS = 1024  # of an update that is one pass, as long ones take too long to time
WHOLE = "; an update is always one pass, since its loss needs all of it"


def make_trainer(config: Config, info: EnvInfo, ledger: TimeLedger | None = None) -> AnyTrainer:
    """Make the trainer of the algorithm of ``config``; ``ledger`` is that of its thread."""
    fresh = isinstance(algorithm(config.algo).data(config.algo), Unrolls)
    return (Trainer if fresh else OffPolicyTrainer)(config, info, ledger)


def network_of(config: Config, info: EnvInfo, trainer: AnyTrainer) -> str:
    """A sentence on the network, the number format of its training, and its device."""
    count = sum(len(optimizer.values) for optimizer in trainer.optimizers().values())
    shape = network_shape(config, info)
    dtype = trunk_dtype(config.learner.precision, trainer.device, shape)
    number_format = "bf16" if dtype is torch.bfloat16 else "fp32"
    text = in_words(shape, config.model, count)
    return f"{text}, trained in {number_format} on {trainer.device}"


def kind_note(config: Config, info: EnvInfo) -> str:
    """A sentence where the defaults for another kind of environment would suit the spaces better;
    otherwise empty."""
    chosen, kind = config.env.kind, kind_of(config, info)
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
    """``config`` with a GPU for each of several learners; with more learners than GPUs, some share
    one.

    Where `learner.device` is auto, or cuda without an index.
    """
    learner = config.learner
    gpus = torch.cuda.device_count()
    if learner.most_count == 1 or learner.device not in ("auto", "cuda") or not gpus:
        return config
    own = learner.model_copy(update={"device": f"cuda:{ctx.learner % gpus}"})
    return config.model_copy(update={"learner": own})


def timed(config: Config, info: EnvInfo, kept: ComputeForm | None = None) -> tuple[Config, str]:
    """``config`` with the number format, the order of images and the pass size that suit the
    processor, where the options leave them open; and a sentence about the choice.

    Unchanged, with an empty sentence, on a GPU and where nothing is open. ``kept`` is the form of
    the run's checkpoint on this processor: it stays, where the options allow it.
    """
    learner = config.learner
    if device_of(pick_device(learner.device)).runs_behind:
        return config, ""
    shape, update = network_shape(config, info), update_size(config, info)
    whole = _is_whole(config)
    rows = min(update.rows, MOST_TIMED_ROWS) if whole else learner.micro_batch
    options = Options(learner.precision, learner.memory_format, rows)
    forms = training_forms(shape, options, update, has_bf16=processor().has_bf16)
    if len(forms) == 1:
        return config, ""
    if kept in forms:
        form, text = kept, f"{kept}: as the checkpoint's learner computed"
    else:
        recurrent = isinstance(shape, GeneralShape) and shape.state_size > 0
        unroll = config.actors.unroll + 1 if recurrent else 1
        seen = (tuple(info.observation_space.shape), slot_spec(config, info).columns[0].dtype)
        task = Task(shape, seen, config.model, True, learner.first_threads, unroll, update.rows)
        timing = time_forms(task, forms)
        form, text = timing.form, str(timing)
    names = "precision", "memory_format", "micro_batch"
    chosen = dict(zip(names, form, strict=True))
    changed = config.model_copy(update={"learner": learner.model_copy(update=chosen)})
    return changed, f"the learner computes in {text}{WHOLE if whole else ''}"


def _is_whole(config: Config) -> bool:
    """Whether each update is one pass, whatever `learner.micro_batch` is."""
    algo = algorithm(config.algo)
    if not isinstance(algo, UnrollAlgorithm):
        return False
    scheduled = over_run(config.algo, config.stop.env_steps)
    return algo.whole(algo.settled(with_values(scheduled, 0)))


def update_size(config: Config, info: EnvInfo) -> UpdateSize:
    """Observations of one update of a learner."""
    if not isinstance(algorithm(config.algo).data(config.algo), Unrolls):
        return UpdateSize(config.replay.batch_size)
    spec, updates = slot_spec(config, info), config.learner.updates_per_batch
    envs = config.learner.batch_slots * spec.envs
    if config.algo.by_steps(config.model.core != "none"):
        return UpdateSize(max(1, envs * spec.unroll // updates))
    return UpdateSize(max(1, envs // updates) * (spec.unroll + 1), spec.unroll + 1)

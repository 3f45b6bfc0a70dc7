"""The two kinds of algorithm: one trains on fresh unrolls, the other draws from replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.configs.algorithms import ActorCriticConfig, AlgoConfig
from penstock.configs.schema import Config
from penstock.core.interfaces import (
    Dataset,
    Environments,
    Recorder,
    SampleSpec,
    Transitions,
    Unrolls,
)
from penstock.core.observations import Spaces
from penstock.core.specs import Column
from penstock.models.acting.categorical import (
    ActionSampler,
    CategoricalSampler,
    MultiCategoricalSampler,
)
from penstock.models.acting.gaussian import GaussianSampler
from penstock.models.actions import Choices, Numbers, action_spec
from penstock.models.fitting import AnyShape, HeadShape, actor_critic_shape

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.algos.replay_update import ReplayUpdate, UpdateContext

Cfg = TypeVar("Cfg", bound=AlgoConfig)  # the section `algo` of the algorithm
Columns = dict[str, npt.NDArray[Any]]

AddOthers = Callable[["Tensor"], None]
"""Adds to a tensor, in place, those of the other learners."""
WHOLE = slice(None)
"""All environments of a batch."""

TEACHER_KL = "teacher_kl"
"""Name of a statistic: the divergence of the teachers from the policy that is trained, in nats."""


class RecordedColumns(NamedTuple):
    """Columns of rows "unroll" that one `Recorder` fills."""

    columns: Callable[[Config, Spaces], tuple[Column, ...]]
    """Returns the columns of a run, or none where the run does not need them. Each process computes
    them by itself, so the result may depend on the arguments alone."""
    make: Callable[[Config, Environments], Recorder]
    """Makes the recorder that fills these columns on one actor."""


def policy_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> ActionSampler:
    """Returns what draws the actions of an actor's environments by the outputs of an actor-critic.

    Raises UserError for an action space that an actor-critic cannot play. ``actor`` has no effect:
    every actor explores alike.
    """
    envs = config.actor_envs
    rng = np.random.default_rng(seed)

    match action_spec(config, spaces):
        case Choices(counts=(count,), shape=()):
            return CategoricalSampler(count, envs, rng)
        case Choices(counts=counts, shape=shape):
            return MultiCategoricalSampler(counts, shape, envs, rng)
        case Numbers(shape=shape, squashed=squashed):
            return GaussianSampler(shape, envs, squashed, rng)


@dataclass(frozen=True)
class UnrollAlgorithm(Generic[Cfg]):
    """An algorithm that trains on fresh unrolls: an `Algorithm` with its loss.

    It is an actor-critic unless it has a ``network`` and an ``action_sampler`` of its own.

    Functions that take a network or a batch import torch when they are called. The arguments that
    several of them have:

        net         the network that is trained, a `models.torch_heads.ActorCritic` by default
        batch       columns by name, tensors ``[T, E, ...]``; observations are ``[T + 1, E, ...]``
        cfg         the settings that `resolve_options` returned
        envs        the environments of a batch whose loss is computed, by slice or by index
        parts       slices of the environments, each as large as is to be computed at once
        add_others  adds to a tensor, in place, those of the other learners of the update
    """

    statistics: tuple[str, ...]
    """Names of the sums that `loss` returns. `TEACHER_KL` follows where the options are an
    `ActorCriticConfig` with a teacher."""
    columns: Callable[[Any, Any], tuple[Column, ...]]
    """(observation space, action space) -> the columns that actors record."""
    check: Callable[[Columns, Spaces], None]
    """Raises ValueError for columns of a slot that no sound actor records."""
    process: Callable[[Cfg, Columns], None]
    """Prepares a filled slot for training, in place."""
    loss: Callable[..., tuple[Tensor, Tensor]]
    """(net, batch, cfg, envs, add_others) -> the loss ``[]``, and `statistics` without a gradient.

    The batch also has the columns of `prepare`. Both results are sums over alive rows, so that
    those of micro-batches add up: gradient and statistics are divided by the alive rows of the
    whole update."""
    prepare: Callable[..., dict[str, Tensor]] | None = None
    """(net, batch, cfg, parts, add_others) -> further columns, computed once for each batch. With
    `moments`, the key ``moments`` has their sums over its alive rows, float64
    ``[len(moments)]``."""
    going_on: Callable[..., bool] | None = None
    """(net, batch, cfg, parts, add_others) -> whether the batch has another epoch."""
    whole: Callable[[Cfg], bool] = lambda cfg: False
    """Whether `loss` must see all environments of an update at once, however large; only then may
    it call ``add_others``."""
    moments: tuple[str, ...] = ()
    """Names of the sums that `prepare` returns for metrics: `diagnostics.MOMENTS` and any
    others."""
    by_epoch: tuple[str, ...] = ()
    """The names among `statistics` that are also reported of a batch's first minibatch, and by
    epoch."""
    resolve_options: Callable[[Cfg], Cfg] = lambda cfg: cfg
    """Returns the settings that all these functions get, given those of the config."""

    network: Callable[[Config, Spaces], AnyShape] = actor_critic_shape
    """Returns the shape of the network; UserError if none fits the environment."""
    action_sampler: Callable[[Config, Spaces, int, int], ActionSampler] = policy_sampler
    """(config, spaces, seed, actor) -> what draws the actions of the environments of an actor."""
    recorded: Mapping[str, RecordedColumns] = field(default_factory=dict)
    """Further columns with their recorders, in the form of `algos.recorded.RECORDED`, which has
    those of all algorithms."""

    def for_config(self, cfg: Cfg) -> Self:
        if isinstance(cfg, ActorCriticConfig) and cfg.teacher is not None:
            return replace(self, statistics=(*self.statistics, TEACHER_KL))
        return self

    def data(self, cfg: Cfg) -> Unrolls:
        return Unrolls()


def samples_of(batch: Mapping[str, Any]) -> int:
    """Returns the number of samples of a batch: its transitions, or the steps of its sequences
    after the burn-in."""
    if batch["reward"].ndim == 1:  # transitions, one of whose columns may be named so, too
        return len(batch["reward"])
    return int(batch["mask"][batch.get("burn_in", 0) :].sum())


@dataclass(frozen=True)
class ReplayAlgorithm(Generic[Cfg]):
    """An off-policy algorithm: an `Algorithm` with its update."""

    columns: Callable[[Any, Any], tuple[Column, ...]]
    """(observation space, action space) -> the columns that actors record."""
    check: Callable[[Columns, Spaces], None]
    """Raises ValueError for columns of a slot that no sound actor records."""
    process: Callable[[Cfg, Columns], None]
    """Prepares a filled slot for training, in place."""
    network: Callable[[Config, Spaces], HeadShape]
    """Returns the shape of the network that actors get."""
    action_sampler: Callable[[Config, Spaces, int, int], ActionSampler]
    """(config, spaces, seed, actor) -> what draws the actions of the environments of an actor."""
    make_update: Callable[[Cfg, UpdateContext], ReplayUpdate]
    """Makes the networks and optimizers on a learner; imports torch when it is called."""
    least_exploring: Callable[[Config, int], npt.NDArray[np.bool_] | None] = lambda config, actor: (
        None
    )
    """(config, actor) -> which environments of an actor are among those of the run that explore
    least, bool ``[envs]``; None where all explore alike. Their returns are the run's."""
    data: Callable[[Cfg], SampleSpec | Dataset] = lambda cfg: Transitions()
    """Returns the kind of data of which the update gets batches."""
    batch_columns: tuple[str, ...] = ()
    """Recorded columns that a batch of transitions has beside those of every batch."""
    recorded: Mapping[str, RecordedColumns] = field(default_factory=dict)
    """Further columns with their recorders, in the form of `algos.recorded.RECORDED`, which has
    those of all algorithms."""
    samples_of: Callable[[Mapping[str, Any]], int] = samples_of
    """Returns the number of samples of a batch, by which the gradient is divided."""

    def for_config(self, cfg: Cfg) -> Self:
        return self


class AlgorithmFactory(Protocol[Cfg]):
    """The object that `AlgorithmSpec.entry_point` names: an algorithm, which returns itself, or a
    factory that loads the algorithm which a config names."""

    def for_config(self, cfg: Cfg) -> UnrollAlgorithm[Cfg] | ReplayAlgorithm[Cfg]: ...

"""The two kinds of algorithm: one trains on fresh unrolls, the other draws from replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.configs.algorithms import AlgoConfig
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
from penstock.models.fitting import ActorCriticShape, HeadShape, actor_critic_shape

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.algos.replay_update import ReplayUpdate, UpdateContext

Cfg = TypeVar("Cfg", bound=AlgoConfig)  # the section `algo` of the algorithm
Columns = dict[str, npt.NDArray[Any]]


class RecordedColumns(NamedTuple):
    """Columns of rows "unroll" that one `Recorder` fills."""

    columns: Callable[[Config, Spaces], tuple[Column, ...]]
    """Those of a run; none where it does not need them. Every process must find the same ones."""
    make: Callable[[Config, Environments], Recorder]


@dataclass(frozen=True)
class UnrollAlgorithm(Generic[Cfg]):
    """An actor-critic that trains on fresh unrolls: an `Algorithm` with its loss.

    Functions that take a network or a batch import torch when they are called. The arguments that
    several of them have:

        net         the `models.torch_heads.ActorCritic` that is trained
        batch       columns by name, tensors ``[T, E, ...]``; observations are ``[T + 1, E, ...]``
        cfg         the settings that `settled` returned
        parts       slices of the environments, each as large as is to be computed at once
        add_others  adds to a tensor, in place, those of the other learners of the update
    """

    statistics: tuple[str, ...]
    """Names of the sums that `loss` returns."""
    columns: Callable[[Any, Any], tuple[Column, ...]]
    check: Callable[[Columns, Spaces], None]
    process: Callable[[Cfg, Columns], None]
    loss: Callable[..., tuple[Tensor, Tensor]]
    """(net, batch, cfg, envs, add_others) -> the loss and `statistics`, sums over alive rows of the
    environments ``envs`` of a batch."""
    prepare: Callable[..., dict[str, Tensor]] | None = None
    """(net, batch, cfg, parts, add_others) -> more columns, once for each batch; with `moments`,
    ``moments`` are sums over its alive rows, float64 ``[len(moments)]``."""
    going_on: Callable[..., bool] | None = None
    """(net, batch, cfg, parts, add_others) -> whether another epoch is to come."""
    whole: Callable[[Cfg], bool] = lambda cfg: False
    """Whether `loss` must see all environments of an update at once; only then may it call
    ``add_others``, which sums a tensor over the learners that share the update."""
    moments: tuple[str, ...] = ()
    """Names of the sums that `prepare` returns beside columns, for metrics: `diagnostics.MOMENTS`
    and any others."""
    by_epoch: tuple[str, ...] = ()
    """Which of `statistics` are also reported of a batch's first minibatch, and by epoch."""
    settled: Callable[[Cfg], Cfg] = lambda cfg: cfg
    """The settings that all these functions get, made of what the config says."""

    recorded: Mapping[str, RecordedColumns] = field(default_factory=dict)
    """Further columns with what fills them, as `algos.recorded.RECORDED` has them for all."""

    def for_config(self, cfg: Cfg) -> Self:
        return self

    def data(self, cfg: Cfg) -> Unrolls:
        return Unrolls()

    def network(self, config: Config, spaces: Spaces) -> ActorCriticShape:
        return actor_critic_shape(config, spaces)

    def action_sampler(
        self, config: Config, spaces: Spaces, seed: int, actor: int
    ) -> ActionSampler:
        envs, rng = config.actor_envs, np.random.default_rng(seed)
        match action_spec(config, spaces):
            case Choices(counts=(count,), shape=()):
                return CategoricalSampler(count, envs, rng)
            case Choices(counts=counts, shape=shape):
                return MultiCategoricalSampler(counts, shape, envs, rng)
            case Numbers(shape=shape, squashed=squashed):
                return GaussianSampler(shape, envs, squashed, rng)


@dataclass(frozen=True)
class ReplayAlgorithm(Generic[Cfg]):
    """An off-policy algorithm: an `Algorithm` with its update."""

    columns: Callable[[Any, Any], tuple[Column, ...]]
    check: Callable[[Columns, Spaces], None]
    process: Callable[[Cfg, Columns], None]
    network: Callable[[Config, Spaces], HeadShape]
    action_sampler: Callable[[Config, Spaces, int, int], ActionSampler]
    make_update: Callable[[Cfg, UpdateContext], ReplayUpdate]
    """Its networks and optimizers, on a learner; imports torch when it is called."""
    data: Callable[[Cfg], SampleSpec | Dataset] = lambda cfg: Transitions()
    """What the update gets batches of."""
    batch_columns: tuple[str, ...] = ()
    """Recorded columns that a batch of transitions has beside those of every batch."""
    recorded: Mapping[str, RecordedColumns] = field(default_factory=dict)
    """Further columns with what fills them, as `algos.recorded.RECORDED` has them for all."""

    def for_config(self, cfg: Cfg) -> Self:
        return self


class AlgorithmFactory(Protocol[Cfg]):
    """The object that `AlgorithmSpec.entry_point` names: an algorithm, which returns itself, or a
    factory that loads the algorithm which a config names."""

    def for_config(self, cfg: Cfg) -> UnrollAlgorithm[Cfg] | ReplayAlgorithm[Cfg]: ...

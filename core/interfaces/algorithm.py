"""Algorithms, as actors, connectors and learners use them, and a learner's updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from penstock.core.interfaces.data_source import DataSpec, StepResult, TrainingBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from penstock.configs.schema import Config
    from penstock.core.observations import Spaces
    from penstock.core.params import Floats
    from penstock.core.specs import Column

Cfg_contra = TypeVar("Cfg_contra", contravariant=True)  # the section `algo` of an algorithm
Shape_co = TypeVar("Shape_co", covariant=True)  # the shape of a network
Sampler_co = TypeVar("Sampler_co", covariant=True)  # the sampler of actions


class Algorithm(Protocol[Cfg_contra, Shape_co, Sampler_co]):
    """An algorithm without its update, which needs torch.

    Actors call `columns`, `network`, `action_sampler` and `process`; a connector calls `check`,
    then `process`; a learner calls `data` and `network`.
    """

    def data(self, cfg: Cfg_contra) -> DataSpec:
        """Returns the kind of data that the algorithm trains on.

        It determines the learner's `DataSource`.
        """

    def columns(self, observation_space: Any, action_space: Any) -> tuple[Column, ...]:
        """Returns the columns of a slot that actors record, for spaces of one environment."""

    def check(self, columns: dict[str, npt.NDArray[Any]], spaces: Spaces) -> None:
        """Check a slot that arrived over the network.

        ``columns`` are arrays ``[T, E, ...]`` of one slot. Raises ValueError for values that no
        correct actor records in an environment of ``spaces``.
        """

    def process(self, cfg: Cfg_contra, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Prepare a filled slot for training, in place: for example clip its raw rewards."""

    def network(self, config: Config, spaces: Spaces) -> Shape_co:
        """Returns the shape of the network. Raises UserError if none fits the environment."""

    def action_sampler(self, config: Config, spaces: Spaces, seed: int, actor: int) -> Sampler_co:
        """Make the object by which actor number ``actor`` chooses actions from the network's
        outputs.
        """


B_contra = TypeVar("B_contra", bound="TrainingBatch", contravariant=True)


class StepHooks:
    """What a learner does within `Update.step`, in the thread of the call.

    The methods do nothing unless they are overridden.
    """

    def before_backward(self) -> None:
        """Called before each backward pass, which needs no interpreter lock."""

    def after_update(self, updates_left: int) -> None:
        """Called after each update of a batch, of which ``updates_left`` follow.

        Only algorithms that train on unrolls call it.
        """


class Share(NamedTuple):
    """The minibatch of one update: a part of a batch of unrolls."""

    places: slice | Tensor
    """Its environments; of a division by steps its part of ``order``."""
    steps: int
    """The number of its agent steps."""
    order: Tensor | None = None
    """The steps of the batch in the order of the epoch, each ``row * environments + environment``.
    None in a division by environments."""


@dataclass
class BatchPlan:
    """How a batch is divided into updates, and how many of them were taken."""

    counts: Floats
    """This learner's samples of each update, float64 ``[updates]``."""
    shares: Sequence[Share] = ()
    """The minibatch of each update. Empty without a batch, and for a batch from replay, on which
    one update is taken as a whole."""
    updates_done: int = 0
    """The updates that `Update.step` has taken so far."""


class Update(Protocol[B_contra]):
    """Optimizer steps on batches, together with the other learners of the run."""

    def plan_updates(self, batch: B_contra | None) -> BatchPlan:
        """Divide a batch into updates; the counts are zeros without a batch."""

    def step(
        self, batch: B_contra | None, plan: BatchPlan, *, totals: Floats, hooks: StepHooks
    ) -> StepResult:
        """Take the updates of a planned batch.

        Args:
            batch: None where this learner has none, and others have one.
            plan: of this batch, by `plan_updates`.
            totals: the sum of the plans' counts over all learners.
            hooks: called meanwhile.

        Raises:
            GroupLostError: another learner has ended; `interrupted_result` says what was trained
                on.
        """

    def interrupted_result(self, plan: BatchPlan) -> StepResult:
        """Returns the result for a batch whose `step` raised GroupLostError, by its plan."""

"""The kinds of data that an algorithm trains on, and the source of a learner's batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

B = TypeVar("B", bound="TrainingBatch")


@dataclass(frozen=True)
class Unrolls:
    """Fresh unrolls, each trained on once."""


class Relabel(Protocol):
    """Rewrites transitions between their draw and the update.

    Hindsight replay does (Andrychowicz et al. 2017, arXiv 1707.01495).
    """

    def __call__(
        self,
        batch: dict[str, Any],
        future: Callable[[int], Mapping[str, Any]],
        rng: np.random.Generator,
    ) -> None:
        """Change or replace arrays of the batch; nothing else of it may change.

        Args:
            batch: arrays ``[B, ...]`` by name, see `penstock.replay.Batch`; ``keys`` must stay.
            future: ``future(horizon)`` is another batch of B rows: each is drawn evenly among the
                row itself and those that follow in its episode, at most ``horizon`` rows in all.
            rng: seeded by the run.
        """


@dataclass(frozen=True)
class Transitions:
    """Transitions drawn from replay repeatedly; rewards are sums over ``n_step`` rows."""

    n_step: int = 1
    relabel: Relabel | None = None


@dataclass(frozen=True)
class TransitionSequences:
    """Sequences of ``length`` steps drawn from replay, each within one episode.

    Starts lie every ``length - overlap`` steps. The first ``burn_in`` steps of a sequence only warm
    up a recurrent state, and do not count as trained on. With ``pad`` a sequence may end with its
    episode; without, the rest of an episode that is shorter than ``length`` is never drawn. Batches
    are time-major: see `penstock.replay.sequences.SequenceGather`.
    """

    length: int
    burn_in: int = 0
    overlap: int = 0
    pad: bool = True


SampleSpec = Transitions | TransitionSequences
"""The content of one sampled batch: transitions or sequences."""


@dataclass(frozen=True)
class Dataset:
    """Batches sampled from a replay snapshot, without actors.

    ``folder`` was written by `penstock.replay.Replay.save`. Rewards and actions are used as
    recorded.
    """

    folder: Path
    draws: SampleSpec = Transitions()


DataSpec = Unrolls | SampleSpec | Dataset
"""The data that an algorithm trains on; it determines the learner's data source."""


class TrainingBatch(Protocol):
    """Per-row data of every batch. A row is a transition, a sequence, or one environment's
    unroll."""

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        """Key of each row in its source, int64 ``[B]``. Replay ignores the priorities of rows that
        have been overwritten since."""

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """Importance weights ``[B]``; ones where all rows are alike."""

    @property
    def versions(self) -> npt.NDArray[np.integer[Any]]:
        """Version of the policy that chose each action, ``[B]``, or ``[T, B]`` where the batch is
        time-major; zeros where it was not recorded."""


class HostValues(Protocol):
    """An array that a device may still be computing."""

    def get(self) -> npt.NDArray[np.float32]:
        """The values on the host; waits for them."""


class StepResult(NamedTuple):
    """The result of training on a batch."""

    trained_steps: int
    """Agent steps that were trained on, once or more: those of the batch, or fewer where the group
    of learners was lost meanwhile.
    """
    publish_due: bool = False
    """Whether the weights must be published now."""
    errors: HostValues | None = None
    """Absolute TD errors, float32 ``[B]``, where the source samples by priority."""


class DataSource(Protocol[B]):
    """Provides batches and takes them back; used by one thread, that of the learner.

    Several batches may be out at a time. They are released in the order of `next`; until then their
    memory is not written to, and unrolls count as in flight.
    """

    def next(self, timeout_s: float) -> B | None:
        """The next batch, or None when there was none within ``timeout_s`` seconds.

        A source with a fixed number of batches also returns None while all of them are out.
        """

    def release(self, batch: B, result: StepResult) -> None:
        """Take back a batch, possibly several batches later.

        Frees its memory and updates the priorities of its rows that are still stored.
        """

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Write the source's part of a checkpoint.

        In the background, or, with ``beat``, blocking while calling ``beat``. Raises UserError
        where writing failed.
        """

    def restore(self, folder: Path, beat: Callable[[], None] = lambda: None) -> str:
        """Load what `save` wrote to ``folder``, calling ``beat``; called before the first `next`.

        Returns a sentence for the user, or "". Raises UserError for a snapshot that is damaged or
        does not fit the run.
        """

    def close(self) -> None:
        """Release memory and threads; batches must not be used afterwards."""

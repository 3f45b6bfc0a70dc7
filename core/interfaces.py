"""The seams of Penstock: every Protocol that an extension implements, with the order of the calls.

An implementation lives in the room named below and is registered there in one place; a contract
test runs over all implementations of a seam. torch is imported here for types alone.

| seam | implemented in | registered in |
|---|---|---|
| `DataSource` | `learner/sources/`, `launch/lockstep.py` | `learner.role.make_source` |
| `Update` | `learner/trainer.py`, `learner/offpolicy.py` | `learner.factory.make_trainer` |

A learner's loop (`learner.loop`) calls them in this order, in one thread:

    batch = source.next(timeout_s)                  # None: this learner has nothing in this turn
    counts = update.plan_updates(batch)
    totals = the sum of counts over all learners
    result = update.step(batch, totals)             # also without a batch, if others have one
    source.release(batch, result)                   # in the order of `next`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
B = TypeVar("B")  # a batch
B_contra = TypeVar("B_contra", contravariant=True)


class HostValues(Protocol):
    """An array that a device may still be computing."""

    def get(self) -> npt.NDArray[np.float32]:
        """The values on the host; waits for them."""


class StepResult(NamedTuple):
    """What became of a batch."""

    trained_steps: int
    """Agent steps that were trained on, once or more: those of the batch, or fewer where the group
    of learners was lost meanwhile."""
    publish_due: bool = False
    """Whether the weights are now to be published."""
    errors: HostValues | None = None
    """Absolute temporal differences, float32 ``[B]``, where the source samples by priority."""


class DataSource(Protocol[B]):
    """Gives batches and takes them back. One thread uses it, that of the learner."""

    def next(self, timeout_s: float) -> B | None:
        """The next batch, or None when there was none in time."""

    def release(self, batch: B, result: StepResult) -> None:
        """Take back a batch that `next` gave, possibly several batches later, and what became of
        it: its memory is free now, and its priorities may change."""

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Write what a checkpoint is to hold besides the learner's state: in the background, or,
        with a ``beat`` that is called meanwhile, until it is there. UserError where that failed."""

    def restore(self, folder: Path) -> str:
        """Go on with what `save` wrote there; a note for the user, or nothing to say. Before the
        first `next`."""

    def close(self) -> None:
        """Give everything back; batches are not used any more."""


class Update(Protocol[B_contra]):
    """Optimizer steps on batches, together with the other learners of the run."""

    def plan_updates(self, batch: B_contra | None) -> Floats:
        """Count what is about to be trained on: samples of each update, float64 ``[updates]``;
        zeros without a batch."""

    def step(self, batch: B_contra | None, totals: Floats) -> StepResult:
        """Take the updates of the batch that was planned last. ``totals``: `plan_updates`, summed
        over all learners, one of which may have no batch. Raises GroupLostError."""

    def interrupted(self, batch: B_contra) -> StepResult:
        """What became of a batch whose `step` raised GroupLostError."""

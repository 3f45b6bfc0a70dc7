"""Where a learner's batches come from: what its process needs to know of an algorithm's data.

Two stand behind the seam: `learner.sources.unrolls` for algorithms that train once on what actors
just played, `learner.sources.transitions` for those that draw from replay.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from penstock.learner.sync.gradient_sync import Floats
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore

B = TypeVar("B")


class DataSource(Protocol[B]):
    """Owns the store that actors fill. One thread uses it, that of the learner."""

    store: SlotStore

    def open(self, host: ShmHost) -> None:
        """Begin to take in what is published; ``host`` serves the store from now on."""

    def get(self, timeout_s: float) -> B | None:
        """The next batch, or None when there was none in time."""

    def plan_updates(self, batch: B | None) -> Floats:
        """Count what is about to be trained on: samples of each update, float64 ``[updates]``."""

    def train(self, batch: B | None, totals: Floats) -> bool:
        """Train on a batch and take it back; whether weights are due to be published.

        ``totals`` are what all learners have booked together, one of which may have no batch.
        """

    def resume(self, folder: Path) -> str:
        """Go on with what `save` wrote there; a note for the user, or nothing to say. Before
        `open`, and only where the run itself is resumed."""

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Write what a checkpoint is to hold besides the trainer: in the background, or, with a
        ``beat`` for as long as it takes, until it is there. UserError where that failed."""

    def stop(self) -> None:
        """Take nothing in any more but what is counted as in flight."""

    def in_flight_steps(self) -> int:
        """Agent steps that arrived and were not trained on; after `stop`."""

    def fill_fraction(self) -> float:
        """Share of the memory that is filled and waiting."""

    def figures(self) -> dict[str, float]:
        """Further figures for metrics.jsonl."""

    def close(self) -> None: ...

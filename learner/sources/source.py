"""Data sources that actors feed through a slot store.

`sources.unrolls` is for algorithms that train once on fresh unrolls, `sources.replay` for those
that draw from replay. `sources.dataset` has no actors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from penstock.core.interfaces import B, DataSource
from penstock.core.specs import SlotSpec
from penstock.learner.progress import Progress
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.store import SlotStore


class Consumer(Protocol):
    """The part of a trainer that a source uses."""

    spec: SlotSpec
    """The slots that actors fill."""
    progress: Progress
    """The counters of the run, which the source updates."""
    device: torch.device
    """The device on which batches are trained on."""


class ActorSource(DataSource[B], Protocol[B]):
    """A data source that owns the store which actors fill."""

    store: SlotStore

    def plan_checkpoints(self, folder: Path) -> str:
        """Decide whether checkpoints hold what is stored here, in ``folder``; called first of all.

        Returns a sentence for the user, or "".
        """

    def open(self, host: ShmHost) -> None:
        """Start to take in published slots; ``host`` serves the store from now on."""

    def stop(self) -> None:
        """Stop taking in slots, except those counted as in flight."""

    def serve(self, timeout_s: float) -> None:
        """Serve writers that end, for up to ``timeout_s`` seconds; called after `stop`."""

    def on_backward(self) -> None:
        """Called before each backward pass, which leaves the interpreter lock to other threads."""

    def in_flight_steps(self) -> int:
        """Returns the agent steps that arrived and were not trained on; called after `stop`."""

    def figures(self) -> dict[str, float]:
        """Returns figures for metrics.jsonl.

        ``queue_fill`` is the fraction of the memory that is filled and waiting.
        """

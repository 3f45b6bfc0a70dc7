"""The data source of algorithms that train on a replay snapshot, without actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.algos.registry import algorithm
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.interfaces import Dataset, StepResult
from penstock.learner.sources.batch_sampler import (
    BatchConsumer,
    BatchSampler,
    ReplayBatch,
    make_sampler,
    n_step_of,
    seed_of,
    sequences_of,
)
from penstock.profiling.ledger import TimeLedger
from penstock.replay import Replay
from penstock.replay.columns import Leaf
from penstock.replay.layout import Layout, layout_of_spec


class DatasetSource:
    """A `DataSource` of batches drawn from a snapshot that `Replay.save` wrote.

    The snapshot may be of a run (`replay.checkpoint`) or of the user's program. No step counts as
    produced or trained on: `stop.learner_steps` or `stop.minutes` ends the run.
    """

    def __init__(self, config: Config, consumer: BatchConsumer, ledger: TimeLedger) -> None:
        """Load the snapshot into memory. ``ledger`` is that of the training thread.

        Raises:
            UserError: the data does not fit the run or is too little, or nothing ends the run.
        """
        data = algorithm(config.algo).data(config.algo)
        assert isinstance(data, Dataset), data
        if config.stop.learner_steps is None and config.stop.minutes is None:
            raise UserError(
                "stop.env_steps counts what actors play, and a data set has none; set "
                "stop.learner_steps or stop.minutes"
            )

        sampler = make_sampler(config.replay, consumer.progress)
        self._replay = Replay.load_rows(
            data.folder,
            n_step=n_step_of(data.draws),
            discount=config.algo.discount,
            sampler=sampler,
            sequences=sequences_of(data.draws),
            seed=seed_of(config, consumer.progress),
        )
        self._batches = BatchSampler(
            self._replay,
            sampler=sampler,
            draws=data.draws,
            config=config,
            consumer=consumer,
            ledger=ledger,
        )
        try:
            self._check_fits(data.folder, config, consumer)
        except BaseException:
            self.close()
            raise

    def _check_fits(self, folder: Path, config: Config, consumer: BatchConsumer) -> None:
        """Raise UserError if the snapshot has other columns than the run, or too few steps."""
        needed = layout_of_spec(consumer.spec, config.transport.frame_stack or 1)
        if difference := _difference(needed, self._replay.layout):
            raise UserError(f"data set {folder} does not fit the run: {difference}")
        if len(self._replay) < config.replay.batch_size or not self._batches.ready:
            raise UserError(
                f"data set {folder} has {len(self._replay)} steps, too few for a batch of "
                f"{config.replay.batch_size}; lower replay.batch_size, or record more"
            )

    def next(self, timeout_s: float) -> ReplayBatch:
        """Draw a batch; there always is one."""
        return self._batches.draw()

    def release(self, batch: ReplayBatch, result: StepResult) -> None:
        self._batches.release(batch, result)

    def restore(self, folder: Path, beat: Callable[[], None] = lambda: None) -> str:
        return ""

    def save(self, folder: Path, beat: Callable[[], None] | None = None) -> None:
        """Does nothing: the data set is unchanged, and `state_dict` is part of the checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the draws, priorities included, as JSON values and arrays."""
        return {"sampler": self._replay.sampler.state_dict(), "draws": self._batches.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ReplayError if it is of another data set."""
        self._replay.sampler.load_state_dict(state["sampler"])
        self._batches.load_state_dict(state["draws"])

    def in_flight_steps(self) -> int:
        return 0

    def figures(self) -> dict[str, float]:
        return {"queue_fill": 1.0, "replay_size": len(self._replay)}

    def close(self) -> None:
        self._batches.close()
        self._replay.close()


def _difference(needed: Layout, stored: Layout) -> str:
    """Describe the first observation or action column that does not fit; empty if all fit."""
    stored_leaves = {leaf.name: leaf for leaf in _inputs(stored)}
    for leaf in _inputs(needed):
        other = stored_leaves.get(leaf.name)
        if other is None or (other.shape, other.dtype.kind) != (leaf.shape, leaf.dtype.kind):
            has = "missing" if other is None else str(other)
            return f"column {leaf.name} is {has}, and the run's networks need {leaf}"
    return ""


def _inputs(layout: Layout) -> list[Leaf]:
    """Returns the columns of observations and actions."""
    actions = [leaf for leaf in layout.other_leaves if leaf.name.split(".", 1)[0] == "action"]
    return [*(observation.leaf for observation in layout.observations), *actions]

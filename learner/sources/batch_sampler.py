"""Batches drawn from a replay, and how their priorities return to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.algos.hindsight import make_hindsight
from penstock.configs.schema import Config
from penstock.configs.sections import ReplayConfig
from penstock.core.interfaces import HostValues, Relabel, SampleSpec, StepResult, Transitions
from penstock.device.choice import device_of
from penstock.device.transfers import Download
from penstock.learner.progress import Progress
from penstock.learner.sources.source import Consumer
from penstock.profiling.ledger import Part, TimeLedger
from penstock.replay import Batch, Replay, Sampler, Sequences
from penstock.replay.factory import sampler_for
from penstock.replay.sequences import SequenceSampler


class ReplayBatch(NamedTuple):
    """A sampled batch of transitions or sequences."""

    data: Batch
    min_probability: float = 1.0
    """Smallest sampling probability of its rows; 1 without priorities."""
    beta: float = 0.0
    """Exponent of the importance weights."""
    tensors: Mapping[str, Tensor] | None = None
    """What the learner takes of ``data``, as tensors of the same memory, if it computes on the CPU:
    so its thread need not make them."""

    @property
    def keys(self) -> npt.NDArray[np.int64]:
        keys: npt.NDArray[np.int64] = self.data.keys
        return keys

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        weights: npt.NDArray[np.float32] = self.data.weights
        return weights

    @property
    def versions(self) -> npt.NDArray[np.integer[Any]]:
        versions: npt.NDArray[np.integer[Any]] | None = self.data.get("policy_version")
        return np.zeros(self.data.reward.shape, np.uint32) if versions is None else versions


class PendingErrors(NamedTuple):
    """TD errors that a GPU may still be computing; priorities follow from them."""

    keys: npt.NDArray[np.int64]
    """Keys of the rows in the replay."""
    errors: HostValues
    """Absolute TD errors, float32 ``[B]``."""


class BatchConsumer(Consumer, Protocol):
    """The part of an off-policy trainer that a source uses."""

    def tensors_of(self, batch: Batch) -> Mapping[str, Tensor]:
        """Returns what it takes of a batch, as tensors; on a CPU any thread may call it."""


class BatchSampler:
    """Samples a learner's batches from ``replay``, and returns their priorities to it."""

    def __init__(
        self,
        replay: Replay,
        sampler: Sampler,
        draws: SampleSpec,
        config: Config,
        consumer: BatchConsumer,
        ledger: TimeLedger,
        rank: int = 0,
    ) -> None:
        """Make the sampler of one source.

        Args:
            replay: from which batches are drawn.
            sampler: draws its rows.
            draws: the content of a batch.
            config: of the run.
            consumer: the trainer.
            ledger: time ledger of the thread that draws.
            rank: of the learner.
        """
        self._replay = replay
        self._sampler = sampler
        self._ledger = ledger
        self._batch_size = config.replay.batch_size
        self._consumer = consumer
        self._hindsight = make_hindsight(config, rank)
        self._relabel: Relabel | None = self._hindsight
        if self._relabel is None and isinstance(draws, Transitions):
            self._relabel = draws.relabel
        self._rng = np.random.default_rng(seed_of(config, consumer.progress, rank, number=1))
        """The random generator of `relabel`."""
        starts = replay.sampler
        self._sequence_starts = starts if isinstance(starts, SequenceSampler) else None
        """The rows at which complete sequences begin; None for transitions."""

        self._pending_errors: deque[PendingErrors] = deque()
        """Read one batch later, they cause no wait for a GPU."""
        self._used: list[ReplayBatch] = []
        """Batches that were trained on, kept until `set_priorities`: freeing one takes a while, and
        then the thread that draws does so."""

        self._runs_behind = device_of(consumer.device).runs_behind
        """Whether the device computes while the host goes on, as a GPU does."""
        draws_frames = (config.transport.frame_stack or 1) > 1
        plain = self._sequence_starts is None and self._relabel is None
        self.stacks_on_device = self._runs_behind and plain and draws_frames
        """Whether the learner makes stacks of frames on its device, and not the draw."""

    @property
    def ready(self) -> bool:
        """Whether there is anything to draw once enough rows are stored: one complete sequence."""
        if self._sequence_starts is None:
            return True
        with self._replay.lock:
            return len(self._sequence_starts) > 0

    def draw(self) -> ReplayBatch:
        """Draw the next batch. Raises ReplayError if too little is stored."""
        self._ledger.switch(Part.GATHER)
        beta: float = getattr(self._sampler, "beta", 0.0)
        data = self._replay.sample(self._batch_size, stacked=not self.stacks_on_device)
        if self._relabel is not None:
            future = partial(self._replay.future, data.keys, rng=self._rng)
            self._relabel(data, future, self._rng)

        probabilities = getattr(self._sampler, "probabilities", None)
        min_probability = 1.0 if probabilities is None else float(probabilities.min())
        # The learner itself copies the arrays to a GPU.
        tensors = None if self._runs_behind else self._consumer.tensors_of(data)
        return ReplayBatch(data, min_probability, beta, tensors)

    def release(self, batch: ReplayBatch, result: StepResult) -> None:
        """Set the priorities of those rows of a batch that are still stored, at once."""
        self.take_errors(batch, result)
        self.set_priorities()

    def take_errors(self, batch: ReplayBatch, result: StepResult) -> None:
        """Take the errors of a batch, from which `set_priorities` makes priorities.

        Any thread may call it.
        """
        if result.errors is not None:
            self._pending_errors.append(PendingErrors(batch.keys, result.errors))
        self._used.append(batch)

    def set_priorities(self) -> None:
        """Set priorities by the errors that were taken, without waiting for a GPU."""
        self._used.clear()
        # The errors of the current batch may still be computed; those before them are complete.
        incomplete = 1 if self._runs_behind else 0
        while len(self._pending_errors) > incomplete:
            keys, errors = self._pending_errors.popleft()
            values = errors.get()
            self._ledger.switch(Part.GATHER)
            self._replay.update_priorities(keys, values)

    def state_dict(self) -> dict[str, Any]:
        """Returns the random generator of `relabel` and the errors that are on their way, as JSON
        values and arrays."""
        errors = [[keys.copy(), np.array(errors.get())] for keys, errors in self._pending_errors]
        return {"rng": self._rng.bit_generator.state, "errors": errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of the same replay."""
        self._rng.bit_generator.state = state["rng"]
        for keys, errors in state["errors"]:
            self._pending_errors.append(PendingErrors(keys, Download(torch.tensor(errors))))

    def close(self) -> None:
        """Stop updating priorities, also for batches that are still out."""
        self._pending_errors.clear()
        self._used.clear()
        if self._hindsight is not None:
            self._hindsight.close()


def n_step_of(draws: SampleSpec) -> int:
    """Returns the number of rewards that are summed in a transition."""
    return draws.n_step if isinstance(draws, Transitions) else 1


def sequences_of(draws: SampleSpec) -> Sequences | None:
    """Returns the sequence settings of a replay; None for transitions."""
    if isinstance(draws, Transitions):
        return None
    return Sequences(draws.length, draws.overlap, draws.burn_in, draws.pad)


def seed_of(config: Config, progress: Progress, rank: int = 0, number: int = 0) -> int:
    """Returns a seed of a learner's draws at the run's present optimizer step.

    ``rank`` is that of the learner, and ``number`` tells its seeds apart. Seeds of other ranks and
    numbers are independent of it, and so are those of actors. For these there is a spawn key:
    without one, `SeedSequence` pads two words with zeros, and an actor's four words may end in two
    zeros.
    """
    seed = np.random.SeedSequence([config.run.seed, progress.learner_steps], spawn_key=(rank,))
    return int(seed.generate_state(number + 1)[number])


def make_sampler(replay: ReplayConfig, progress: Progress) -> Sampler:
    """Make the sampler of the section `replay`; its schedules follow the steps of the whole run."""
    return sampler_for(replay, lambda: progress.learner_steps)

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

from penstock.configs.schema import Config
from penstock.configs.sections import ReplayConfig
from penstock.core.interfaces import HostValues, SampleSpec, StepResult, Transitions
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
        reward = self.data.reward
        versions: npt.NDArray[np.integer[Any]] | None = self.data.get("policy_version")
        return np.zeros(reward.shape, np.uint32) if versions is None else versions


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
        self._replay, self._sampler, self._ledger = replay, sampler, ledger
        self._batch_size = config.replay.batch_size
        self._consumer = consumer
        starts = replay.sampler
        self._starts = starts if isinstance(starts, SequenceSampler) else None
        self._relabel = draws.relabel if isinstance(draws, Transitions) else None
        self._rng = np.random.default_rng(seed_of(config, consumer.progress, rank, 1))
        # TD errors that a GPU may still be computing, by the keys of their rows; read one batch
        # later, they cause no wait.
        self._errors: deque[tuple[npt.NDArray[np.int64], HostValues]] = deque()
        # Batches that were trained on, kept until `set_priorities`: freeing one takes a while, and
        # then the thread that draws does so.
        self._used: list[ReplayBatch] = []
        behind = device_of(consumer.device).runs_behind
        self._behind = int(behind)
        plain = self._starts is None and self._relabel is None
        self.stacks_on_device = behind and plain and (config.transport.frame_stack or 1) > 1

    @property
    def ready(self) -> bool:
        """Whether there is anything to draw once enough rows are stored: one complete sequence."""
        if self._starts is None:
            return True
        with self._replay.lock:
            return len(self._starts) > 0

    def draw(self) -> ReplayBatch:
        """Draw the next batch. Raises ReplayError if too little is stored."""
        sampler, replay = self._sampler, self._replay
        beta: float = getattr(sampler, "beta", 0.0)
        self._ledger.switch(Part.GATHER)
        data = replay.sample(self._batch_size, stacked=not self.stacks_on_device)
        if self._relabel is not None:
            self._relabel(data, partial(replay.future, data.keys, rng=self._rng), self._rng)
        probabilities = getattr(sampler, "probabilities", None)
        least = 1.0 if probabilities is None else float(probabilities.min())
        if self._behind:  # the learner copies the arrays to the GPU
            return ReplayBatch(data, least, beta)
        return ReplayBatch(data, least, beta, self._consumer.tensors_of(data))

    def release(self, batch: ReplayBatch, result: StepResult) -> None:
        """Set the priorities of those rows of a batch that are still stored, at once."""
        self.take_errors(batch, result)
        self.set_priorities()

    def take_errors(self, batch: ReplayBatch, result: StepResult) -> None:
        """Take the errors of a batch, from which `set_priorities` makes priorities.

        Any thread may call it.
        """
        if result.errors is not None:
            self._errors.append((batch.keys, result.errors))
        self._used.append(batch)

    def set_priorities(self) -> None:
        """Set priorities by the errors that were taken, without waiting for a GPU."""
        self._used.clear()
        while len(self._errors) > self._behind:
            keys, known = self._errors.popleft()
            values = known.get()  # computed before the current batch
            self._ledger.switch(Part.GATHER)
            self._replay.update_priorities(keys, values)

    def state_dict(self) -> dict[str, Any]:
        """Returns the random generator of `relabel` and the errors that are on their way, as JSON
        values and arrays."""
        errors = [[keys.copy(), np.array(known.get())] for keys, known in self._errors]
        return {"rng": self._rng.bit_generator.state, "errors": errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict` of the same replay."""
        self._rng.bit_generator.state = state["rng"]
        for keys, errors in state["errors"]:
            self._errors.append((keys, Download(torch.tensor(errors))))

    def close(self) -> None:
        """Stop updating priorities, also for batches that are still out."""
        self._errors.clear()
        self._used.clear()


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

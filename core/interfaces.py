"""The seams of Penstock: every Protocol that an extension implements, with the order of the calls.

An implementation lives in the room named below and is registered there in one place; a contract
test runs over all implementations of a seam. torch is imported here for types alone.
`transport/link.py` has one more, the `Link` of an actor to its learner, with types of its room.

| seam | implemented in | registered in |
|---|---|---|
| `DataSource` | `learner/sources/`, `launch/lockstep.py` | `learner.role.make_source` |
| `Update` | `learner/trainer.py`, `learner/offpolicy.py` | `learner.factory.make_trainer` |
| `GradientSync` | `learner/sync/` | `learner/group/elastic_group.py` |
| `Algorithm` | `algos/` | `algos.registry.ALGORITHMS` |
| `Inference` | `models/acting/inference.py` | `algos.acting.make_inference` |
| `Codec` | `learner/codecs/` | `learner.codecs.registry.CODECS` |
| `MetricSink` | `monitor/`, `launch/callbacks.py` | `monitor.sinks.SINKS` |

A learner's loop (`learner.loop`) calls source and update in this order, in one thread:

    batch = source.next(timeout_s)                  # None: this learner has nothing in this turn
    counts = update.plan_updates(batch)
    totals = the sum of counts over all learners
    result = update.step(batch, totals)             # also without a batch, if others have one
    source.release(batch, result)                   # in the order of `next`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from penstock.configs.reduce import ReduceConfig
    from penstock.configs.schema import Config
    from penstock.core.observations import Spaces
    from penstock.core.params import Array, Float32, Floats, ParamLayout, Stamp
    from penstock.core.specs import Column

B = TypeVar("B")  # a batch
B_contra = TypeVar("B_contra", contravariant=True)
M = TypeVar("M")  # a message
O_contra = TypeVar("O_contra", contravariant=True)  # an optimizer


@dataclass(frozen=True)
class Unrolls:
    """An algorithm trains once on each unroll, while it is fresh."""


@dataclass(frozen=True)
class Transitions:
    """An algorithm trains on transitions from replay, whose rewards are sums of ``n_step``."""

    n_step: int = 1


DataSpec = Unrolls | Transitions
"""Which data an algorithm trains on: by it the learner's data source is made."""

Cfg_contra = TypeVar("Cfg_contra", contravariant=True)  # the section `algo` of an algorithm
Shape_co = TypeVar("Shape_co", covariant=True)  # of a network
Sampler_co = TypeVar("Sampler_co", covariant=True)  # of actions


class Algorithm(Protocol[Cfg_contra, Shape_co, Sampler_co]):
    """What actors, connectors and learners know of an algorithm; the update itself needs torch.

    Actors call `columns`, `network`, `action_sampler` and `process`; a connector `check`, then
    `process`; a learner `data` and `network`.
    """

    def data(self, cfg: Cfg_contra) -> DataSpec:
        """Which data it trains on."""

    def columns(self, observation_space: Any, action_space: Any) -> tuple[Column, ...]:
        """What one slot holds."""

    def check(self, columns: dict[str, npt.NDArray[Any]], layout: ParamLayout) -> None:
        """Raise ValueError for values that no sound actor of the network ``layout`` records."""

    def process(self, cfg: Cfg_contra, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Prepare a filled slot for training, in place: raw rewards become what is trained on."""

    def network(self, config: Config, spaces: Spaces) -> Shape_co:
        """The network that actors get; UserError where none fits the environment."""

    def action_sampler(self, config: Config, spaces: Spaces, seed: int, actor: int) -> Sampler_co:
        """How actor number ``actor`` chooses actions by the network's outputs."""


class GradientSync(Protocol[M, O_contra]):
    """How one learner's updates become those of all: M is what learners say to each other, O an
    optimizer.

    A trainer that uses it in this order need not know how many learners there are:

        everyone = sync.sync_control(own)    # in every turn, with or without a batch of its own
        for each update of the batch:
            optimizer.zero_grad()
            ... backward of all but the last micro-batch ...
            sync.prepare_backward(optimizer, total)    # total: samples of all, from ``everyone``
            ... the last backward ...
            sync.step(optimizer, total, env_steps)

    A learner without samples does the same without the backward passes. Gradients are sums over
    samples, so that their sum over learners, divided by the total, is the mean over all samples.
    Every call may raise GroupLostError.
    """

    world: int
    """Learners that take part."""

    def sync_control(self, mine: M) -> M:
        """The sum of what all learners say. Every learner calls it in every turn."""

    def prepare_backward(self, optimizer: O_contra, total: float) -> None:
        """The next backward pass completes the gradients of ``optimizer``, sums over samples of
        which all learners together have ``total``."""

    def step(self, optimizer: O_contra, total: float, env_steps: int) -> Tensor:
        """Update the parameters; the norm of the gradient that did it (float32 ``[]``)."""

    def sum(self, values: Tensor) -> None:
        """Sum small values over the learners whose gradients are averaged, in place."""

    def all_reduce_min(self, value: float) -> float:
        """The least of what those learners say."""

    def close(self) -> None:
        """Part from the other learners, who notice."""


class SharedOptimizer(Protocol):
    """An optimizer of some parameters, whose steps are taken together with all learners."""

    @property
    def values(self) -> Tensor:
        """All parameters, float32 ``[size]``."""

    def zero_grad(self) -> None:
        """Before the backward passes of a step."""

    def prepare_backward(self, total: float) -> None:
        """The next backward pass completes the gradients, sums over ``total`` samples of all
        learners."""

    def step(self, total: float, env_steps: int) -> Tensor:
        """Update the parameters, at the learning rate after ``env_steps``; the norm of the gradient
        that did it (float32 ``[]``), not finite where the step was skipped."""


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


class Inference(Protocol):
    """Computes the actions of an actor's environments.

    A group is a fixed number E of environments that are stepped together and whose steps are rows
    of one slot; groups are numbered from 0. Calls come from one thread, for each group in this
    order:

        refresh(weights, stamp)         once before all else; later between two unrolls
        state(group)                    where an unroll begins, if the state is recorded
        begin(group, observations)      then, until the unroll is full:
        finish(group)                       step the environments
        reset(group, first)                 if some environment's next observation is a first one
        begin(group, observations) ...
        close()                         last

    Between `begin` and `finish` of a group the caller may step another group. RuntimeError is
    raised by a `begin` without weights, by a `finish` without `begin`, and, between the two, by
    `begin`, `state` and `reset` of that group and by `refresh`.
    """

    @property
    def recorded(self) -> tuple[str, ...]:
        """Columns of the slot that `finish` returns beside the actions. They are written after
        the actions, so that one named "action" replaces these."""

    @property
    def stamp(self) -> Stamp | None:
        """Of the weights that compute; None before the first `refresh`."""

    def begin(self, group: int, observations: Array) -> None:
        """Start to compute the actions for ``observations`` ``[E, *shape]``, of the dtype that
        slots have. They stay as they are until `finish` has returned."""

    def finish(self, group: int) -> tuple[Array, tuple[Array, ...]]:
        """Wait for what `begin` started.

        Returns: the actions, int32 ``[E, *shape]`` for choices or float32 ``[E, *shape]`` for a
            Box; and the columns named by `recorded`, each ``[E, *shape]``, computed by the same
            weights in the same precision. All are views, valid until the group's next `begin`.
        """

    def state(self, group: int) -> Float32:
        """The recurrent state before the group's next `begin`, float32 ``[E, size]``; zeros at
        first, size 0 for a network without memory. A view, valid until that `begin`."""

    def reset(self, group: int, first: npt.NDArray[np.bool_]) -> None:
        """Set the state to zeros in the environments, bool ``[E]``, whose next observation is the
        first of an episode."""

    def refresh(self, weights: Float32, stamp: Stamp) -> None:
        """Compute by ``weights`` from now on, a flat vector float32 ``[layout.size]``, which is
        copied. No group may be within an unroll, so that each unroll has one policy version.

        Raises ValueError for a vector of another size.
        """

    def close(self) -> None:
        """Release what it holds; also after an error."""


class GradientPart(NamedTuple):
    """One parameter in the flat gradient vector: its values ``start`` up to ``stop``.

    ``is_bias`` if it has fewer than two dimensions. ``rows`` is the size of its first dimension,
    where it is seen as a matrix; 1 if that does not matter.
    """

    name: str
    start: int
    stop: int
    is_bias: bool
    rows: int = 1


class Bucket(NamedTuple):
    """A slice of the flat gradient vector, of whole parameters, in their order."""

    start: int
    stop: int
    parts: tuple[GradientPart, ...]

    @property
    def size(self) -> int:
        """Values in it."""
        return self.stop - self.start


class Collective(Protocol):
    """What a codec may ask of a group of ranks.

    All ranks call the same methods in the same order, from one thread. Tensors are contiguous, of
    any dtype, and have the same shape on all ranks. A rank that is gone or late makes a call raise
    RuntimeError, after which the group is of no use.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int:
        """Ranks in the group."""

    def all_reduce(self, tensor: Tensor) -> None:
        """It becomes its sum over ranks, bitwise the same on all."""

    def all_reduce_max(self, tensor: Tensor) -> None:
        """It becomes its maximum over ranks. Not for NaN, which gloo may lose."""

    def all_to_all(self, out: Tensor, given: Tensor) -> None:
        """Row r of ``given`` ``[world, k]`` goes to rank r; row r of ``out`` is what r gave."""

    def all_gather(self, out: Tensor, given: Tensor) -> None:
        """Row r of ``out`` ``[world, k]`` is what rank r gave, each of the same size."""


class CodecContext(NamedTuple):
    """What a codec is made for: one rank's part in one group, and one optimizer's gradients."""

    cfg: ReduceConfig
    """``learner.reduce``; `configs.reduce.CodecOptions.of` takes a codec's own options from it."""
    parts: Sequence[GradientPart]
    """They make up the flat vector without gaps."""
    size: int
    """Values of the flat vector."""
    device: torch.device
    """Of gradients and of all that is kept for them."""
    world: int
    rank: int
    momentum: float = 0.9
    """The optimizer's, for a codec that applies it in the optimizer's place."""
    grad_clip: float | None = None
    """The optimizer's bound on the norm of a gradient, for such a codec."""


class CodecFactory(Protocol):
    """What `CodecSpec.home` names: a class of codecs, or a function that makes one."""

    def __call__(self, context: CodecContext) -> Codec: ...


class Codec(Protocol):
    """Sums gradients over ranks, in a form of its own on the wire.

    One codec belongs to one rank of a group; a group of another size needs a new one. In each
    optimizer step all ranks call, from one thread,

        begin(update)
        reduce(bucket, grads, ring)        for every bucket of `buckets`, in their order

    and between two steps any of `nbytes`, `residuals` and `reset`. A rank without samples takes
    part with zeros, and so sends what it held back in earlier steps.

    A gradient that is not finite (or whose norm is not, in float32) ends as values that are not
    finite on all ranks, and leaves the residuals as they were: the optimizer skips the step, and
    the next one is sound.
    """

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The flat vector in slices, in the order in which a backward pass completes them."""

    def begin(self, update: int) -> None:
        """Before the buckets of a step; ``update`` counts the optimizer steps of the run so far."""

    def reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        """Turn ``grads`` into their sum over ranks, in place, bitwise the same on all ranks.

        ``grads``: float32 ``[bucket.size]``, this rank's share of the mean gradient.
        """

    def nbytes(self, update: int) -> int:
        """Payload bytes that this rank sends in the step ``update``, by theory."""

    def residuals(self) -> Mapping[str, Tensor]:
        """What this rank holds back for later steps, by name: float32 ``[size]``, the codec's own
        memory. It goes into checkpoints, and is written in place when one is loaded: with the same
        residuals and updates, another codec of this kind goes on as this one would."""

    def reset(self) -> None:
        """The members of the group have changed: hold nothing back any more."""


Json = Mapping[str, Any]
"""A JSON object. Its values are None, bool, int, float, str, and lists and objects of these."""


@dataclass(frozen=True)
class RunEvent:
    """Something that happened to a run."""

    kind: str
    """One of `monitor.events.KINDS`, "evaluation", or another word that a role has reported."""
    text: str
    """One sentence; empty where only ``result`` matters."""
    role: str | None = None
    """The process that the event is about, such as "actor-3"."""
    incarnation: int | None = None
    """Which start of that process, counted from 0."""
    data: Json = field(default_factory=dict)
    """What `logs/events.jsonl` holds beside the text."""
    reported: bool = False
    """Whether the process chose kind and text itself. Such an event is limited in rate, is shown,
    and has no ``result``."""
    result: Json | None = None
    """All of an "evaluation" (a line of `evaluations.jsonl`), of a "checkpoint" (the fields of
    `launch.callbacks.Saved`), or of the "end" (`summary.json`); None for every other event."""


class MetricSink(Protocol):
    """Receives how a run goes: a file, a view, a service, the user's callbacks.

    Derive from it and override the methods that the sink needs; the others do nothing.

    All calls come from the supervisor's thread, and no process is watched during a call: return
    within milliseconds. `metrics`, `event`, `note` and `tick` come in any order. The event "end"
    follows them, then `close`; while the other sinks close, `event` and `note` may still come. A
    fault of the supervisor itself may end the run without "end" and `close`.

    Any method may raise OSError, whose `filename` names what could not be written. The user is
    shown that, and the run goes on. Any other exception ends the run as a fault of the supervisor.
    """

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        """One interval of the run (`run.interval_s`), or the figures that are known at its end.

        Args:
            metrics: figures by name, with the units of docs/metrics.md; names may be unknown. None
                is a figure that is not known, NaN or infinite. Must not be changed.
            final: the figures hold for the whole run, not for an interval. They come at most a few
                times, at the end.
        """
        return

    def event(self, event: RunEvent) -> bool:
        """Something has happened. Returns whether to end the run."""
        return False

    def note(self, text: str) -> None:
        """A sentence to show to the user now. It is that of an event which `event` got before."""
        return

    def tick(self) -> None:
        """About every 0.1 s: do what has become due."""
        return

    def close(self) -> None:
        """Write what is left and release everything. A second call does nothing."""
        return

"""How the updates of several learners are combined; `pace.py` says who makes it, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.core.params import Arrays, Floats

M = TypeVar("M")  # a message
O_contra = TypeVar("O_contra", contravariant=True)  # an optimizer


class GradientSync(Protocol[M, O_contra]):
    """Combines the updates of several learners. M is the control message, O the optimizer.

    The order of calls does not depend on the number of learners:

        control = sync.sync_control(own)     # in every turn, with or without a batch of its own
        for each update of the batch:
            optimizer.zero_grad()
            ... backward of all but the last micro-batch ...
            sync.prepare_backward(optimizer, total)    # total: samples of all, from ``control``
            ... the last backward ...
            sync.step(optimizer, total, env_steps)

    A learner without samples makes the same calls without the backward passes. Gradients are sums
    over samples, so that their sum over learners, divided by the total, is the mean over all
    samples. All methods but `close` may raise `learner.sync.gradient_sync.GroupLostError`.
    """

    world: int
    """The number of learners that take part."""

    rounds: int
    """Calls of `sync_control` in this run in which all members of a group took part.

    Learners agree on it when they form a group; 0 where there is none.
    """

    @property
    def unsent(self) -> Floats:
        """Counters of this learner that `sync_control` returned without sending them to the others.

        float64 ``[counters]``; they are counted again when the group is lost.
        """

    def sync_control(self, mine: M) -> M:
        """Exchange control messages; every learner calls it in every turn.

        Returns the sum of ``mine`` over all learners, or the pace's own view of it.
        """

    def prepare_backward(self, optimizer: O_contra, total: float) -> None:
        """Announce that the next backward pass completes the gradients of ``optimizer``.

        They are sums over samples; all learners together have ``total`` samples.
        """

    def step(self, optimizer: O_contra, total: float, env_steps: int) -> Tensor:
        """Update the parameters at the learning rate after ``env_steps`` agent steps.

        Returns the gradient norm, float32 ``[]``; not finite where the step was skipped.
        """

    def all_reduce(self, values: Tensor) -> None:
        """Sum small values over the learners whose gradients are averaged, in place."""

    def all_reduce_min(self, value: float) -> float:
        """Returns the minimum of ``value`` over the learners whose gradients are averaged."""

    def state_dict(self, *, saves: bool) -> Arrays | None:
        """Returns the state of all learners for a checkpoint; None if it is not available.

        All learners call it in the same turn; only one has ``saves`` and writes it. Without the
        state no checkpoint can be written.
        """

    def load_state_dict(self, state: Arrays) -> None:
        """Restore a `state_dict`; ignored if it was saved by another number of learners."""

    def close(self) -> None:
        """Leave the group; the other learners detect it."""


class SharedOptimizer(Protocol):
    """An optimizer of some parameters that takes its steps together with all learners."""

    @property
    def values(self) -> Tensor:
        """All parameters, float32 ``[size]``."""

    def zero_grad(self) -> None:
        """Clear the gradients, before the backward passes of a step."""

    def prepare_backward(self, total: float) -> None:
        """Announce that the next backward pass completes the gradients.

        They are sums over ``total`` samples of all learners.
        """

    def step(self, total: float, env_steps: int) -> Tensor:
        """Update the parameters at the learning rate after ``env_steps`` agent steps.

        Returns the gradient norm, float32 ``[]``; not finite where the step was skipped.
        """

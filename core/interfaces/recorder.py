"""Columns of a slot beside those of the policy and of every environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.core.params import Array


class Step(NamedTuple):
    """A step of E environments, which are rows of each array; they must not be changed or kept."""

    actions: Array
    next_observations: Array
    """What the policy sees next, ``[E, *shape]``, packed: stacks of frames are whole."""
    rewards: npt.NDArray[Any]
    """Raw, ``[E]``."""
    ended: npt.NDArray[np.bool_]
    """Whether the step ended an episode, also one that ended with a life."""
    alive: npt.NDArray[np.bool_]
    """Whether the step was a decision; the others only reset."""


class Recorder(Protocol):
    """Computes the values of its columns, for all unrolls of one actor.

    Calls come from the actor's thread: `record` after each step, in order; the others between two
    unrolls.
    """

    def record(self, step: Step) -> tuple[Array, ...]:
        """Returns the values of each column for this step, ``[E, *shape]``.

        The caller copies them before the next call.
        """

    def state_dict(self) -> Any:
        """Returns what a run that is saved exactly keeps, as JSON values and copies of arrays."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`. Raises ValueError if it has another shape."""

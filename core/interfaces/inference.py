"""How an actor's actions are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.core.params import Array, Float32, Stamp

ReadWeights = Callable[["Float32", "Stamp | None"], "Stamp | None"]
"""`Link.read_weights` of the policy that acts."""


class ReadPolicy(Protocol):
    """`Link.read_weights`, of any policy that the learner publishes."""

    def __call__(
        self, out: Float32, newer_than: Stamp | None, policy_id: int = 0
    ) -> Stamp | None: ...


class Inference(Protocol):
    """Computes the actions of an actor's E environments, which are stepped together.

    Calls come from one thread, in this order:

        refresh(read)               before all else, until it returns a stamp; later between unrolls
        state()                     where an unroll begins, if the state is recorded
        decide(observations)        then, until the unroll is full:
        take_rewards(rewards)           what the decision was paid
        reset(first)                    if some environment's next observation is a first one
        decide(observations) ...
        forget()                    between two unrolls, where another learner was joined
        state_dict()                between two unrolls, if the run is saved exactly
        close()                     last

    `decide` raises RuntimeError while there are no weights.
    """

    @property
    def recorded(self) -> tuple[str, ...]:
        """Columns of the slot that `decide` returns beside the actions.

        They are written after the actions, so that one named "action" replaces these.
        """

    @property
    def stamp(self) -> Stamp | None:
        """The stamp of the weights of the last `decide`, or of those that a later `refresh` read.

        None before there are any. It may change with any `decide`: a row is recorded with the
        version that chose its action.
        """

    def refresh(self, read: ReadWeights) -> Stamp | None:
        """Use the newest weights of the learner from now on.

        ``read`` copies them into a flat vector float32 ``[layout.size]`` if they are newer than a
        stamp. With weights of version 0, before the first update, actions may be random
        (`ActionSampler.untrained`).

        Returns the stamp of the present weights; None if there are none yet. Raises ValueError for
        weights of another size.
        """

    def decide(self, observations: Array) -> tuple[Array, tuple[Array, ...]]:
        """Compute the actions for ``observations`` ``[E, *shape]``, with the dtype of slots.

        Returns: the actions, int32 ``[E, *shape]`` for choices or float32 ``[E, *shape]`` for a
        Box; and the columns named by `recorded`, each ``[E, *shape]``, computed by the same weights
        in the same precision. All are views, valid until the next `decide`.
        """

    def state(self) -> Float32:
        """Returns the recurrent state before the next `decide`, float32 ``[E, size]``.

        It is zeros at first; a network without memory has size 0. It is a view, which is valid
        until that `decide`.
        """

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        """Take what the actions of the last `decide` were paid, raw ``[E]``.

        It goes into the recurrent state if the network reads it.
        """

    def reset(self, first: npt.NDArray[np.bool_]) -> None:
        """Set the recurrent state to zeros in the environments marked in ``first``, bool ``[E]``.

        Their next observation is the first of an episode.
        """

    def forget(self) -> None:
        """Forget the weights: those of another learner may have the same stamp. States stay."""

    def state_dict(self) -> dict[str, Any]:
        """Returns recurrent states and random generators, as JSON values and copies of arrays.

        It is called between two unrolls. Weights are not part of it.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError if it has another shape."""

    def close(self) -> None:
        """Release all resources; also called after an error."""

"""How an actor's actions are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.core.params import Array, Float32, Stamp


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
        state_dict()                    between two unrolls, if the run is saved exactly
        close()                         last

    Between `begin` and `finish` of a group the caller may step another group. RuntimeError is
    raised by a `begin` without weights, by a `finish` without `begin`, and, between the two, by
    `begin`, `state` and `reset` of that group and by `refresh`.
    """

    @property
    def recorded(self) -> tuple[str, ...]:
        """Columns of the slot that `finish` returns beside the actions.

        They are written after the actions, so that one named "action" replaces these.
        """

    @property
    def stamp(self) -> Stamp | None:
        """The stamp of the present weights; None before the first `refresh`."""

    def begin(self, group: int, observations: Array) -> None:
        """Start to compute the actions for ``observations`` ``[E, *shape]``, with the dtype of
        slots.

        The array must not change until `finish` has returned.
        """

    def finish(self, group: int) -> tuple[Array, tuple[Array, ...]]:
        """Wait for the computation that `begin` started.

        Returns: the actions, int32 ``[E, *shape]`` for choices or float32 ``[E, *shape]`` for a
        Box; and the columns named by `recorded`, each ``[E, *shape]``, computed by the same weights
        in the same precision. All are views, valid until the group's next `begin`.
        """

    def state(self, group: int) -> Float32:
        """The recurrent state before the group's next `begin`, float32 ``[E, size]``.

        Zeros at first; size 0 for a network without memory. A view, valid until that `begin`.
        """

    def reset(self, group: int, first: npt.NDArray[np.bool_]) -> None:
        """Set the recurrent state to zeros in the environments marked in ``first``, bool ``[E]``.

        Their next observation is the first of an episode.
        """

    def refresh(self, weights: Float32, stamp: Stamp) -> None:
        """Use ``weights`` from now on, a flat vector float32 ``[layout.size]``, which is copied.

        No group may be within an unroll, so that each unroll has one policy version. Of version 0,
        before the first update, actions may be random (`ActionSampler.untrained`). Raises
        ValueError for a vector of another size.
        """

    def state_dict(self) -> dict[str, Any]:
        """Between two unrolls: recurrent states and random generators, as JSON values and copies of
        arrays. Weights are not part of it.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError where it has another shape."""

    def close(self) -> None:
        """Release all resources; also called after an error."""

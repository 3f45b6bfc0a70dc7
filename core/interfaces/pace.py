"""When and by whom parameters are updated across learners."""

from __future__ import annotations

from typing import Protocol, TypeVar

C_contra = TypeVar("C_contra", contravariant=True)  # a context
G_contra = TypeVar("G_contra", contravariant=True)  # a group
S_co = TypeVar("S_co", covariant=True)  # a sync


class Pace(Protocol[G_contra, S_co]):
    """Joins one learner with the others. G is a connected group, S a `GradientSync`.

    A learner makes its pace once and calls, all in the thread that trains,

        pace = factory(context)                  # opens no connection
        while the run goes on:
            sync = pace.join(group, source)      # None: the run ends before
            ... the calls of `GradientSync` ...  # until GroupLostError, or the end
            sync.close()

    What the learner does around it depends on `PaceSpec.server`. Without a server ``group`` is
    connected when `join` is called, and all its members call it. Then all take the state of
    the member ``source``, and `GradientSync.load_state_dict` follows. With a server ``group`` is
    None, and `join` is called once: the pace connects to the servers, and takes their state or
    gives them its own.

    A learner that is the only one of its run has no pace.
    """

    def join(self, group: G_contra | None, source: int = 0) -> S_co | None:
        """Make the sync of one group.

        Args:
            group: the connected members; None for a pace with a server.
            source: position in ``group`` of the member whose state all take.

        Returns:
            The sync; None if the run ends before there is one.

        Raises:
            GroupLostError: a member of the group has ended, so that there will be a new one.
            RunEndedError: a part is lost that only the start of another run replaces.
            UserError: something that the user must correct, such as options that differ.
        """


class PaceFactory(Protocol[C_contra, G_contra, S_co]):
    """The kind of object that `PaceSpec.entry_point` names: a class, or a function."""

    def __call__(self, context: C_contra) -> Pace[G_contra, S_co]: ...

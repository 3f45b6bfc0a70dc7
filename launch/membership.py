"""Which learners train together, and for which learner each actor plays.

`GroupMembership` decides the first, and `ActorAssignment` the second. Both are pure functions of
events, as `decisions`.

A learner *joins* when it is ready to enter a group. Until a learner has *entered* a group, which
means that it has received the group's state, a group contains all learners but the spare ones: the
run's checkpoint may be with one of them alone. Afterwards every change forms a new group, of a
higher epoch, from the living learners that have joined. Only learners that have entered a group
hold the trained state, so a run does not continue with other learners alone.

An actor plays for its *home* learner while that runs, otherwise for the learner with the fewest
actors. Homes are divided among all learners, so a spare learner gets its share when it is ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.core.control import Message
from penstock.core.role_spec import RoleSpec
from penstock.launch.supervisor_messages import Effect, Send


class AssignedStream(NamedTuple):
    """An actor's samples for one life of one learner."""

    learner: int
    """Rank of the learner."""
    life: int
    """Number of the learner's lives that had ended when the stream began."""


Streams = dict[int, AssignedStream]
"""The streams of one process of an actor, by incarnation."""


class GroupMembership:
    """The group of learners that train together, each by its rank."""

    def __init__(self, learners: Sequence[RoleSpec]) -> None:
        """Begin without a group; ``learners`` are all of the run, also spare ones."""
        self._names = {spec.learner: spec.name for spec in learners}
        self._initial_ranks = {spec.learner for spec in learners if not spec.spare}
        """The learners that form the first group."""
        self.set_learners(learners)
        self.members: set[int] = set()
        """The living learners that have joined."""
        self._ranks_with_state: set[int] = set()
        """The learners that have entered a group, and so hold the trained state."""
        self.begun = False
        """Whether any learner has entered a group."""
        self.epoch = 0
        """Number of the last group."""

    def set_learners(self, learners: Sequence[RoleSpec]) -> None:
        """Take the specs of the same learners, which may be on other hosts from now on."""
        self._meets_at = {spec.learner: spec.meets_at for spec in learners}

    def on_join(self, rank: int) -> list[Effect]:
        """A learner is ready to enter a group; returns the messages that announce a new one."""
        self.members.add(rank)
        return self._announce_group()

    def on_entered(self, rank: int) -> None:
        """A learner has entered a group and received its state."""
        self._ranks_with_state.add(rank)
        self.begun = True

    def on_leave(self, rank: int) -> list[Effect]:
        """A learner has ended; returns the messages that announce a group without it."""
        self._ranks_with_state.discard(rank)
        if rank not in self.members:
            return []

        self.members.remove(rank)
        return self._announce_group()

    def dissolve(self) -> None:
        """Begin anew, as before the first group: no learner holds the trained state any more."""
        self.members = set()
        self._ranks_with_state = set()
        self.begun = False

    def on_group_failed(self, epoch: int) -> list[Effect]:
        """The group of ``epoch`` was not formed, or failed although all members live.

        Returns: the messages that announce the next group; none if there is a newer one already.
        """
        return self._announce_group() if epoch == self.epoch else []

    def holds_run(self, rank: int, running: set[int]) -> bool:
        """Returns whether learners among ``running``, beside that of ``rank``, hold the state.

        Before the first group every learner is expected to get it from the checkpoint.
        """
        holders = running & self._ranks_with_state if self.begun else running
        return bool(holders - {rank})

    def _announce_group(self) -> list[Effect]:
        """Form a new group, if that is possible; returns the messages to its members."""
        if not self.begun and not self._initial_ranks <= self.members:
            return []

        self.epoch += 1
        members = sorted(self.members)

        message: Message = {"kind": "group", "epoch": self.epoch, "members": members}
        # Learners on several hosts meet at the first member.
        meeting_address = self._meets_at[members[0]] if members else None
        if meeting_address is not None:
            message["meets_at"] = meeting_address
        return [Send(self._names[rank], message) for rank in members]


class ActorAssignment:
    """The learner for which each actor plays.

    An actor's samples for one life of one learner are a stream, identified by its incarnation.
    """

    def __init__(self, actors: Sequence[RoleSpec], learners: Sequence[RoleSpec]) -> None:
        """Assign each actor to its home learner, or to another one if that is spare.

        Args:
            actors: the actors, each with the rank of its home learner.
            learners: all learners, also spare ones.
        """
        self._home_of = {spec.name: spec.learner for spec in actors}
        """The home learner of each actor, by the actor's name."""
        self._assigned_to = dict(self._home_of)
        """The learner for which each actor plays now."""

        self.set_learners(learners)
        self._present = set(self._addresses)
        """The learners that run, or are about to."""
        self._ended_lives: Counter[int] = Counter()
        """Number of lives of each learner that have ended."""
        self._streams: dict[str, Streams] = {}
        """The streams of each actor's process."""

        # A spare learner is away at first, as one that has ended.
        for spec in learners:
            if spec.spare:
                self.on_learner_end(spec.learner)

    def set_learners(self, learners: Sequence[RoleSpec]) -> None:
        """Take the specs of the same learners, which may be on other hosts from now on."""
        self._addresses = {spec.learner: spec.address for spec in learners}

    def on_learner_end(self, rank: int) -> list[str]:
        """A learner has ended; returns the names of the actors that are moved to another one."""
        self._ended_lives[rank] += 1
        self._present.discard(rank)
        if not self._present:
            return []

        moved = [name for name, learner in self._assigned_to.items() if learner == rank]
        for name in moved:
            # The learner with the fewest actors is next; of several, that of the lowest rank.
            load = Counter(self._assigned_to.values())
            self._assigned_to[name] = min(self._present, key=lambda rank: (load[rank], rank))
        return moved

    def on_learner_ready(self, rank: int) -> list[str]:
        """A learner is ready; returns the names of the actors that are moved to it.

        Those are its own, and all actors that have no living learner.
        """
        if rank in self._present:
            return []

        moved = [
            name
            for name, learner in self._assigned_to.items()
            if self._home_of[name] == rank or learner not in self._present
        ]
        self._present.add(rank)
        self._assigned_to |= dict.fromkeys(moved, rank)
        return moved

    def begin_stream(self, name: str, incarnation: int) -> Send | None:
        """An actor starts a stream.

        Returns: the message that tells the actor its learner; None if that is what it takes by
        itself, the first life of its home learner.
        """
        rank = self._assigned_to[name]
        life = self._ended_lives[rank]
        self._streams.setdefault(name, {})[incarnation] = AssignedStream(rank, life)
        if rank == self._home_of[name] and life == 0:
            return None

        message = {
            "kind": "learner",
            "index": rank,
            "address": self._addresses.get(rank),
            "incarnation": incarnation,
        }
        return Send(name, message)

    def on_actor_end(self, name: str) -> Streams:
        """An actor has ended, or is presumed dead; returns its streams by incarnation."""
        return self._streams.pop(name)

    def learner_of(self, streams: Streams, incarnation: int) -> int | None:
        """Returns the learner of a stream that has ended, if that life of it goes on.

        Args:
            streams: those of the actor, from `on_actor_end`.
            incarnation: identifies the stream.

        Returns:
            The learner's rank; None if that life of it has ended, or the stream is not known.
        """
        stream = streams.get(incarnation)
        if stream is None or stream.life != self._ended_lives[stream.learner]:
            return None
        return stream.learner

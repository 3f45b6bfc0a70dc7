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

from penstock.core.control import Message
from penstock.core.role_spec import RoleSpec
from penstock.launch.supervisor_messages import Effect, Send

Streams = dict[int, tuple[int, int]]
"""The streams of one process of an actor: learner and life of the learner, by incarnation."""


class GroupMembership:
    """The group of learners that train together, each by its rank."""

    def __init__(self, learners: Sequence[RoleSpec]) -> None:
        self._names = {spec.learner: spec.name for spec in learners}
        self._first = {spec.learner for spec in learners if not spec.spare}
        self.respec(learners)
        self.members: set[int] = set()
        self._knowing: set[int] = set()
        self.begun = False
        """Whether any learner has entered a group."""
        self.epoch = 0

    def respec(self, learners: Sequence[RoleSpec]) -> None:
        """Take the specs of the same learners, which may be on other hosts from now on."""
        self._meets_at = {spec.learner: spec.meets_at for spec in learners}

    def join(self, rank: int) -> list[Effect]:
        """A learner is ready to enter a group; returns the messages that announce a new one."""
        self.members.add(rank)
        return self._tell()

    def entered(self, rank: int) -> None:
        """A learner has entered a group and received its state."""
        self._knowing.add(rank)
        self.begun = True

    def leave(self, rank: int) -> list[Effect]:
        """A learner has ended; returns the messages that announce a group without it."""
        self._knowing.discard(rank)
        if rank not in self.members:
            return []

        self.members.remove(rank)
        return self._tell()

    def dissolve(self) -> None:
        """Begin anew, as before the first group: no learner holds the trained state any more."""
        self.members, self._knowing, self.begun = set(), set(), False

    def failed(self, epoch: int) -> list[Effect]:
        """The group of ``epoch`` was not formed, or failed although all members live.

        Returns: the messages that announce the next group; none if there is a newer one already.
        """
        return self._tell() if epoch == self.epoch else []

    def holds_run(self, rank: int, running: set[int]) -> bool:
        """Returns whether learners among ``running``, beside that of ``rank``, hold the state.

        Before the first group every learner is expected to get it from the checkpoint.
        """
        return bool((running & self._knowing if self.begun else running) - {rank})

    def _tell(self) -> list[Effect]:
        """Form a new group, if that is possible; returns the messages to its members."""
        if not self.begun and not self._first <= self.members:
            return []

        self.epoch += 1
        members = sorted(self.members)

        # Learners on several hosts meet at the first member.
        leader = self._meets_at[members[0]] if members else None
        message: Message = {"kind": "group", "epoch": self.epoch, "members": members}
        if leader is not None:
            message["meets_at"] = leader
        return [Send(self._names[rank], message) for rank in members]


class ActorAssignment:
    """The learner for which each actor plays.

    An actor's samples for one life of one learner are a stream, identified by its incarnation.
    """

    def __init__(self, actors: Sequence[RoleSpec], learners: Sequence[RoleSpec]) -> None:
        self._homes = {spec.name: spec.learner for spec in actors}
        self.respec(learners)
        self._present = set(self._addresses)
        self._assigned = dict(self._homes)
        self._lives: Counter[int] = Counter()  # number of lives of each learner that have ended
        self._streams: dict[str, Streams] = {}

        for spec in learners:
            if spec.spare:  # it is away at first, as one that has ended
                self.leave(spec.learner)

    def respec(self, learners: Sequence[RoleSpec]) -> None:
        """Take the specs of the same learners, which may be on other hosts from now on."""
        self._addresses = {spec.learner: spec.address for spec in learners}

    def leave(self, rank: int) -> list[str]:
        """A learner has ended; returns the names of the actors that are moved to another one."""
        self._lives[rank] += 1
        self._present.discard(rank)
        if not self._present:
            return []

        moved = [name for name, assigned in self._assigned.items() if assigned == rank]
        for name in moved:
            load = Counter(self._assigned.values())
            self._assigned[name] = min(self._present, key=lambda rank: (load[rank], rank))
        return moved

    def enter(self, rank: int) -> list[str]:
        """A learner is ready; returns the names of the actors that are moved to it.

        Those are its own, and all actors that have no living learner.
        """
        if rank in self._present:
            return []

        moved = [
            name
            for name, assigned in self._assigned.items()
            if self._homes[name] == rank or assigned not in self._present
        ]
        self._present.add(rank)
        self._assigned |= dict.fromkeys(moved, rank)
        return moved

    def begin(self, name: str, incarnation: int) -> Send | None:
        """An actor starts a stream.

        Returns: the message that tells the actor its learner; None if that is what it takes by
        itself, the first life of its home learner.
        """
        rank = self._assigned[name]
        self._streams.setdefault(name, {})[incarnation] = rank, self._lives[rank]
        if rank == self._homes[name] and not self._lives[rank]:
            return None

        place = {"index": rank, "address": self._addresses.get(rank), "incarnation": incarnation}
        return Send(name, {"kind": "learner", **place})

    def part(self, name: str) -> Streams:
        """An actor has ended, or is presumed dead; returns its streams by incarnation."""
        return self._streams.pop(name)

    def learner_of(self, streams: Streams, incarnation: int) -> int | None:
        """Returns the learner of a stream that has ended; None if that learner has ended too.

        Args:
            streams: those of the actor, from `part`.
            incarnation: identifies the stream.
        """
        rank, lives = streams.get(incarnation, (-1, 0))
        return rank if lives == self._lives[rank] else None

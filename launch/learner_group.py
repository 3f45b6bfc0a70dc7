"""Which learners train together, and which learner each actor plays for: pure, as `decisions` is.

A learner *joins* when it could enter a group. Until somebody has *entered* one, that is, has taken
its state, groups are of all: the run's checkpoint may be with one of them alone. From then on every
change makes a new one, of a higher epoch, of those that have joined and live; and only who has
entered knows what has been learned, so that others keep no run going.

An actor plays for its *home* learner while that one is there, else for the one with the fewest
actors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from penstock.core.role_spec import RoleSpec
from penstock.launch.supervisor_messages import Effect, Send

Streams = dict[int, tuple[int, int]]
"""Of one process of an actor, by incarnation: the learner and its life."""


class GroupMembership:
    """The learners of a run, by rank."""

    def __init__(self, learners: Sequence[RoleSpec]) -> None:
        self._names = {spec.learner: spec.name for spec in learners}
        self.members: set[int] = set()
        self._knowing: set[int] = set()
        self.begun = False
        """Whether anybody has entered a group."""
        self.epoch = 0

    def join(self, rank: int) -> list[Effect]:
        """A learner could enter a group."""
        self.members.add(rank)
        return self._tell()

    def entered(self, rank: int) -> None:
        """A learner stands in a group, in its state."""
        self._knowing.add(rank)
        self.begun = True

    def leave(self, rank: int) -> list[Effect]:
        """A learner has ended."""
        self._knowing.discard(rank)
        if rank not in self.members:
            return []
        self.members.remove(rank)
        return self._tell()

    def failed(self, epoch: int) -> list[Effect]:
        """The group of ``epoch`` did not come about, or broke though all of it live."""
        return self._tell() if epoch == self.epoch else []

    def holds_run(self, rank: int, running: set[int]) -> bool:
        """Whether the others that run hold what has been learned."""
        return bool((running & self._knowing if self.begun else running) - {rank})

    def _tell(self) -> list[Effect]:
        """A new group to its members, if there may be one now."""
        if not self.begun and len(self.members) < len(self._names):
            return []
        self.epoch += 1
        members = sorted(self.members)
        message = {"kind": "group", "epoch": self.epoch, "members": members}
        return [Send(self._names[rank], message) for rank in members]


class Seats:
    """The learner of each actor.

    An actor's samples for one life of one learner are a stream, which its incarnation tells apart.
    """

    def __init__(self, actors: Sequence[RoleSpec], learners: Sequence[RoleSpec]) -> None:
        self._homes = {spec.name: spec.learner for spec in actors}
        self._addresses = {spec.learner: spec.address for spec in learners}
        self._present = set(self._addresses)
        self._seats = dict(self._homes)
        self._lives: Counter[int] = Counter()  # of each learner, that have ended
        self._streams: dict[str, Streams] = {}

    def leave(self, rank: int) -> list[str]:
        """A learner has ended; the actors that now play for another one."""
        self._lives[rank] += 1
        self._present.discard(rank)
        if not self._present:
            return []
        moved = [name for name, seat in self._seats.items() if seat == rank]
        for name in moved:
            load = Counter(self._seats.values())
            self._seats[name] = min(self._present, key=lambda rank: (load[rank], rank))
        return moved

    def enter(self, rank: int) -> list[str]:
        """A learner is ready; the actors that are to play for it from now on."""
        if rank in self._present:
            return []
        seats, homes = self._seats.items(), self._homes
        moved = [n for n, seat in seats if homes[n] == rank or seat not in self._present]
        self._present.add(rank)
        self._seats |= dict.fromkeys(moved, rank)
        return moved

    def begin(self, name: str, incarnation: int) -> Send | None:
        """An actor begins a stream; what to tell it, unless it is of its home learner's first."""
        rank = self._seats[name]
        self._streams.setdefault(name, {})[incarnation] = rank, self._lives[rank]
        if rank == self._homes[name] and not self._lives[rank]:
            return None
        place = {"index": rank, "address": self._addresses.get(rank), "incarnation": incarnation}
        return Send(name, {"kind": "learner", **place})

    def part(self, name: str) -> Streams:
        """An actor has ended, or is presumed dead: its streams, by incarnation."""
        return self._streams.pop(name)

    def learner_of(self, streams: Streams, incarnation: int) -> int | None:
        """The learner to tell of the end of a stream; None where that learner has ended itself."""
        rank, lives = streams.get(incarnation, (-1, 0))
        return rank if lives == self._lives[rank] else None

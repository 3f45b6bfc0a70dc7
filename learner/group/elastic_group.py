"""Elastic group: how this learner joins a group of learners, again after each change.

The supervisor names the members of each epoch: the first one when all learners with which the run
begins have reported that they are ready, a new one whenever a member has ended or another one wants
to join. A learner whose group was lost, or that is sent a newer one, leaves and meets the others in
the next; there all take the state of the most advanced. On several machines there is no supervisor
of all: there is one group, and its end is the end of the run.

What a group does depends on its pace (`core.interfaces.Pace`), which makes the sync of each group.
A pace with a parameter server has no group and joins its server by itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.control import Message
from penstock.core.params import Arrays
from penstock.core.role import RoleContext, RunEndedError, StoreAddress
from penstock.learner.base_trainer import BaseTrainer
from penstock.learner.group.process_group import (
    LearnerGroup,
    hello_of,
    meet,
    use_interface,
)
from penstock.learner.group.remote_store import (
    AGAIN,
    REREAD_S,
    could_not_meet,
    interface_of,
    interface_with,
    open_store,
    who_has_gone,
)
from penstock.learner.state import put_state, state_tensors, take_state
from penstock.learner.sync.gradient_sync import (
    GradientSync,
    GroupLostError,
    SingleLearner,
)
from penstock.learner.sync.pace import Pace, PaceContext
from penstock.learner.sync.registry import make_pace
from penstock.profiling.status import Phase

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Seconds for the reductions that are queued on a GPU; less than `MEET_S`, as the others wait.
SETTLE_S = 1.0
# Members that the supervisor names are alive, and join within so many seconds.
MEET_S = 4.0
# Seconds between two looks at the supervisor's messages.
POLL_S = 0.005
# The network interface of learners that are all on one host.
LOOPBACK = "lo"
# Prefix of the files, or of the keys in a store, by which the learners of an epoch meet.
MEETING = "group-"


class MemberPosition(NamedTuple):
    """How far a member is in the run. The largest one is the most advanced."""

    generation: int
    """How often its run was resumed."""
    rounds: int
    """Rounds in which it has exchanged its counts with all learners."""
    learner_steps: int
    """Its optimizer steps."""
    minus_taken_back: int
    """Minus the batches that it had to undo when the last group was lost."""


class ElasticGroup:
    """Joins groups and makes the sync of ``trainer``, one for each epoch."""

    def __init__(
        self,
        ctx: RoleContext,
        config: Config,
        trainer: BaseTrainer[Any],
        stored: Arrays,
    ) -> None:
        """``stored`` is what `state` returned when the run was saved, on the rank that resumes."""
        self._ctx = ctx
        self._config = config
        self._trainer = trainer
        self._stored = stored

        # The present group.
        self._group: LearnerGroup | None = None
        """The group that was entered last."""
        self.epoch = 0
        """The epoch of that group."""
        self.sync: GradientSync = SingleLearner()
        """The connection with its members, until `leave`."""
        self._pace: Pace | None = None
        """What makes the syncs. It is made for the first group; a single learner has none."""
        self._rounds = 0
        """Rounds in which all learners have exchanged their counts."""

        # The supervisor's messages, which any thread that waits may read.
        self._lock = threading.Lock()
        self._named: Message | None = None
        """The newest group that the supervisor has named."""
        self._other_messages: list[Message] = []
        """Messages that are not about the group, until `messages` returns them."""
        self._saver: int | None = None
        """The learner that saves the run, which the supervisor names at the end."""
        self._saved = False
        """Whether that learner has saved it."""

        # Attempts to join.
        self._tried_epoch = -1
        """The last epoch whose group was tried."""
        self._failing_since_s: float | None = None
        """When the first of the attempts that failed in a row did so."""
        self._meetings: dict[str, Store] = {}
        """Stores that this learner serves for learners of other hosts, by address."""
        self._remote: Store | None = None
        """The store of learners on several machines, each with a supervisor of its own."""
        self._next_poll_s = 0.0
        """When `raise_if_lost` looks next."""

    @property
    def leads(self) -> bool:
        """Whether this learner saves the run.

        The first member does, or the learner that was named at the end, when there may be no group
        any more.
        """
        if self._saver is not None:
            return self.is_named
        return self._ctx.learner == 0 if self._group is None else self._group.rank == 0

    @property
    def is_named(self) -> bool:
        """Whether the supervisor has named this learner to save the run at its end."""
        return self._ctx.learner == self._saver

    @property
    def has_new_members(self) -> bool:
        """Whether the supervisor has named other members than those of the present group."""
        named, group = self._named, self._group
        return group is not None and named is not None and named["epoch"] > group.epoch

    def messages(self) -> list[Message]:
        """Returns the supervisor's messages since the last call, without those about the group."""
        with self._lock:
            self._read_messages()
            messages, self._other_messages = self._other_messages, []
        return messages

    def _look(self) -> None:
        """Read the supervisor's messages, and leave those that are not about the group to
        `messages`."""
        with self._lock:
            self._read_messages()

    def _read_messages(self) -> None:
        """Sort the supervisor's new messages; called under the lock."""
        for message in self._ctx.messages():
            if message["kind"] == "group":
                self._named = message
            elif message["kind"] == "saver":
                self._saver, self._saved = message["rank"], message["saved"]
            else:
                self._other_messages.append(message)

    def _ended_members(self, epoch: int, members: Sequence[int]) -> list[int]:
        """Returns which ``members`` of an epoch are missing in a newer group, as they have ended.

        Called by any thread that waits for them.
        """
        self._look()
        named = self._named
        if named is None or named["epoch"] <= epoch:
            return []
        return sorted({*members}.difference(named["members"]))

    def raise_if_lost(self) -> None:
        """Raise GroupLostError if a member has ended: queued reductions would wait forever."""
        now_s = time.monotonic()
        if self._group is None or now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + POLL_S
        if ended := self._ended_members(self._group.epoch, self._group.members):
            raise GroupLostError(f"rank {', '.join(map(str, ended))} has ended")

    def join(self, why: str = "") -> bool:
        """Join the newest group, in the state of its most advanced member.

        The former `sync` is closed.

        Args:
            why: why the former group was lost. It is reported to the supervisor, which cannot see
                that a group of living members has broken.

        Returns:
            False if the run ends before.

        Raises:
            RunEndedError: the only group of learners on several machines was lost.
            UserError: something that the user must correct, such as options that differ.
        """
        if self._config.learner.most_count == 1:
            return True
        if self._pace is None:
            self._pace = make_pace(PaceContext(self._ctx, self._config, self._trainer))
        if self._config.learner.served:
            return self._join_servers(self._pace)

        is_first = self._group is None
        self.leave()
        if self._ctx.store is not None:
            return self._join_remote(self._ctx.store, is_first=is_first)

        use_interface(self._interface())
        if is_first:
            self._ctx.report("join")
        elif not self.has_new_members:
            self._ctx.report("group_failed", epoch=self._tried_epoch, message=why)
        while (named := self._wait_for_group()) is not None:
            store = self._meeting_store(named)
            if store and self._enter(store, named["epoch"], named["members"], timeout_s=MEET_S):
                return True
        return False

    def leave(self) -> None:
        """Leave the others, which detect it."""
        self._rounds = max(self._rounds, self.sync.rounds)
        self._trainer.progress.rollback(self.sync.unsent)
        with self._trainer.queue.leave_group(SETTLE_S):
            self.sync.close()
        self.sync = SingleLearner()

    def takes_over(self) -> bool:
        """Wait at the end for the learner that saves the run.

        Returns whether it has died, so that this one must save.
        """
        while self._saver is not None and not (self._saved or self.leads):
            self._ctx.status.beat()
            if self._ctx.channel.closed:
                return False
            time.sleep(POLL_S)
            self.messages()
        return self.leads and not self._saved

    def state(self, *, last: bool) -> Arrays | None:
        """Returns what each member keeps for itself, for a checkpoint; all call it in one turn.

        None if a server did not send its part, so that no checkpoint can be written.

        Args:
            last: whether the run ends, so that the learner that writes it is named only later.
        """
        may_lead = last and self._ctx.store is None  # on several machines rank 0 writes all
        return self.sync.state_dict(saves=self.leads or may_lead)

    def _join_servers(self, pace: Pace) -> bool:
        """Join a parameter server. Returns False if the run ends before."""
        sync = pace.join(None)
        if sync is None:
            return False
        self.sync = self._trainer.sync = sync
        return True

    def _join_remote(self, address: StoreAddress, *, is_first: bool) -> bool:
        """Enter the only group of learners on several machines.

        Returns False if the run ends before.

        Raises:
            RunEndedError: that group was lost.
        """
        ctx = self._ctx
        members = range(self._config.learner.most_count)
        if not is_first:
            assert self._remote is not None
            gone = who_has_gone(self._remote, address, members, ctx.learner, self._continues)
            if ctx.stopping():
                return False
            raise RunEndedError(f"{gone}; {AGAIN}")

        use_interface(self._config.learner.reduce.interface or interface_of(address, os.environ))
        timeout_s = self._config.run.start_timeout_s
        self._remote = open_store(address, ctx.learner, timeout_s, self._continues)
        if self._remote is None:
            return False
        try:
            return self._enter(self._remote, epoch=0, members=[*members], timeout_s=timeout_s)
        except UserError:
            time.sleep(REREAD_S)  # the others read from this store what is wrong
            raise

    def _wait_for_group(self) -> Message | None:
        """Wait until the supervisor has named a new group. Returns None at the end of the run."""
        self._ctx.status.phase = Phase.REDUCING
        while self._continues():
            self._look()
            if self._named is not None and self._named["epoch"] > self._tried_epoch:
                return self._named
            time.sleep(POLL_S)
        return None

    def _enter(self, store: Store, epoch: int, members: list[int], *, timeout_s: float) -> bool:
        """Meet the members and take the state of the most advanced.

        Args:
            store: where they meet.
            epoch: of the group.
            members: ranks of the learners.
            timeout_s: longest wait for a member, in seconds.

        Returns:
            False if that failed, which is reported to the supervisor.
        """
        trainer = self._trainer
        self._tried_epoch = epoch
        group: LearnerGroup | None = None
        sync: GradientSync | None = None
        failure = ""
        try:
            self._meet(store, epoch, members, timeout_s=timeout_s)
            group = self._connect(store, epoch, members)
            positions = self._gather_positions(group)
            source = positions.index(max(positions))
            for optimizer in trainer.optimizers().values():
                optimizer.learners_in_step = group.world

            assert self._pace is not None
            sync = self._pace.join(group, source)
            assert sync is not None
            self._broadcast_state(group, sync, source, rounds=positions[source].rounds)
        except GroupLostError as error:
            failure = str(error)

        # A group is closed out here, where nothing refers to it any more.
        if failure or sync is None:
            if sync is not None:
                sync.close()
            elif group is not None:
                group.close()
            elif dist.is_initialized():
                dist.destroy_process_group()
            self._report_failure(epoch, failure)
            return False

        self._group = group
        self.sync = trainer.sync = sync
        self.epoch = epoch
        self._failing_since_s = None
        reduce_timeout_s = self._config.learner.reduce.timeout_s
        trainer.queue.join_group(state_tensors(trainer), reduce_timeout_s)
        self._ctx.report("entered")
        return True

    def _meet(self, store: Store, epoch: int, members: list[int], *, timeout_s: float) -> None:
        """Wait until all members are present, with the same options.

        Raises:
            GroupLostError: there is a newer group, or a member is missing after ``timeout_s``.
            UserError: options differ.
        """

        def is_newest() -> bool:
            self._look()
            named = self._named
            return self._continues() and (named is None or named["epoch"] <= epoch)

        hello = hello_of(self._config, self._trainer.device)
        meet(store, members, self._ctx.learner, hello, timeout_s, is_newest)

    def _connect(self, store: Store, epoch: int, members: list[int]) -> LearnerGroup:
        """Connect with the members that are present. Raises GroupLostError."""

        def is_lost() -> bool:
            return bool(self._ended_members(epoch, members))

        # On one host, the end of a member closes its connections.
        on_several_hosts = self._ctx.meets_at is not None
        return LearnerGroup(
            store,
            epoch,
            members,
            me=self._ctx.learner,
            device=self._trainer.device,
            cfg=self._config.learner.reduce,
            is_lost=is_lost if on_several_hosts else None,
        )

    def _gather_positions(self, group: LearnerGroup) -> list[MemberPosition]:
        """Exchange how far each member is. Returns it in the order of the group."""
        progress = self._trainer.progress
        position = MemberPosition(
            progress.generation,
            self._rounds,
            progress.learner_steps,
            -self._trainer.queue.taken_back,
        )
        return [MemberPosition(*values) for values in group.gather(position)]

    def _report_failure(self, epoch: int, failure: str) -> None:
        """Tell the supervisor that the group of an epoch could not be formed.

        Raises:
            UserError: there is no supervisor of all, as learners are on several machines.
            RuntimeError: no group could be formed for too long.
        """
        if self._ctx.stopping():
            return
        if (address := self._ctx.store) is not None:
            raise could_not_meet(address, failure)

        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        patience_s = self._config.learner.reduce.timeout_s + self._config.run.hang_timeout_s
        if now_s - self._failing_since_s > patience_s:
            raise RuntimeError(
                f"no group of learners could be formed for {patience_s:g} s: {failure}"
            )
        self._ctx.report("group_failed", epoch=epoch, message=failure)

    def _broadcast_state(
        self, group: LearnerGroup, sync: GradientSync, source: int, *, rounds: int
    ) -> None:
        """Take the most advanced member's state, and this member's part of a checkpoint.

        Args:
            group: the connected members.
            sync: of this group.
            source: position of the most advanced member.
            rounds: in which that member has taken part.
        """
        trainer, progress = self._trainer, self._trainer.progress
        state = take_state(trainer) if group.rank == source else None
        received = group.broadcast(state, source)
        if group.rank != source:
            put_state(trainer, received)
            # The source completed the last round, and so received this learner's counts.
            if rounds > self._rounds:
                progress.acknowledge()
        sync.rounds = self._rounds = rounds
        trainer.on_regroup()
        progress.share_window(group.world)

        stored = group.broadcast(self._stored, source)
        self._stored = {}
        for optimizer in trainer.optimizers().values():
            optimizer.recount()
        # Members draw other random numbers, unless a checkpoint has those of each.
        if group.rank != source:
            seed = np.random.SeedSequence([self._config.run.seed, group.epoch, group.rank])
            torch.manual_seed(int(seed.generate_state(1)[0]))
        sync.load_state_dict(stored)

    def _interface(self) -> str | None:
        """Returns the network interface for the other learners of this supervisor."""
        if self._ctx.meets_at is None:
            return LOOPBACK
        return self._config.learner.reduce.interface or interface_with(self._ctx.meets_at)

    def _meeting_store(self, named: Message) -> Store | None:
        """Open the store in which the members of a group meet.

        It is a file if all are on this host; else the first member serves it, which may take a
        moment. Returns None if it could not be opened, which is reported to the supervisor.
        """
        epoch = named["epoch"]
        meets_at = named.get("meets_at")
        if meets_at is None:
            path = self._ctx.runtime_dir / f"{MEETING}{epoch}"
            return dist.FileStore(str(path), len(named["members"]))  # type: ignore[attr-defined]

        store = self._meetings.get(meets_at)
        if store is None:
            host, _, port = meets_at.rpartition(":")
            serves = meets_at == self._ctx.meets_at
            rank = 0 if serves else 1
            try:
                store = open_store(StoreAddress(host, int(port)), rank, MEET_S, self._continues)
            except UserError as error:
                self._tried_epoch = epoch
                self._report_failure(epoch, str(error))
            if store is None:
                return None
            # It serves until this process ends; as a client, each group has a connection.
            if serves:
                self._meetings[meets_at] = store
        return dist.PrefixStore(f"{MEETING}{epoch}", store)  # type: ignore[attr-defined]

    def _continues(self) -> bool:
        """Beat while waiting; returns whether the run continues."""
        self._ctx.status.beat()
        return not self._ctx.stopping()

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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.control import Message
from penstock.core.params import Arrays
from penstock.core.role import RoleContext, RunEndedError
from penstock.core.role import Store as Where
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
LOOK_S = 0.005
# The network interface of learners that are all on one host.
LOOPBACK = "lo"
# Prefix of the files, or of the keys in a store, by which the learners of an epoch meet.
MEETING = "group-"


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
        self._named: Message | None = None  # the newest group that the supervisor has named
        self._tried = -1  # the last epoch whose group was tried
        self._pace: Pace | None = None  # made for the first group; a single learner has none
        self._others: list[Message] = []
        self._lock = threading.Lock()  # of what messages change
        self._group: LearnerGroup | None = None
        self.epoch = 0
        """Of the last group that was entered."""
        self._rounds = 0  # in which all learners have exchanged their counts
        self._saver: int | None = None  # named by the supervisor at the end
        self._saved = False  # by that learner
        self._meetings: dict[str, Store] = {}  # that this learner serves, by address
        self._remote: Store | None = None  # the store of learners on several machines
        self._failing_since_s: float | None = None
        self._look_s = 0.0  # when `raise_if_lost` looks next
        self.sync: GradientSync = SingleLearner()

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

    def messages(self) -> list[Message]:
        """Returns the supervisor's messages since the last call, without those about the group."""
        with self._lock:
            self._read()
            others, self._others = self._others, []
        return others

    def _look(self) -> None:
        """Read the supervisor's messages, and leave those that are not about the group to
        `messages`."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        for message in self._ctx.messages():
            if message["kind"] == "group":
                self._named = message
            elif message["kind"] == "saver":
                self._saver, self._saved = message["rank"], message["saved"]
            else:
                self._others.append(message)

    @property
    def changed(self) -> bool:
        """Whether the supervisor has named other members than those of the present group."""
        named, group = self._named, self._group
        return group is not None and named is not None and named["epoch"] > group.epoch

    def _ended(self, epoch: int, members: Sequence[int]) -> list[int]:
        """The members that a newer group, named by the supervisor, is without; called by any
        thread that waits for them."""
        self._look()
        named = self._named
        if named is None or named["epoch"] <= epoch:
            return []
        return sorted({*members}.difference(named["members"]))

    def raise_if_lost(self) -> None:
        """Raise GroupLostError if a member has ended: queued reductions would wait forever."""
        now_s = time.monotonic()
        if self._group is None or now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        if ended := self._ended(self._group.epoch, self._group.members):
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
        first = self._group is None
        self.leave()
        if self._ctx.store is None:
            use_interface(self._interface())
            if first:
                self._ctx.report("join")
            elif not self.changed:
                self._ctx.report("group_failed", epoch=self._tried, message=why)
            while (named := self._wait_for_word()) is not None:
                store = self._meeting(named)
                if store and self._enter(store, named["epoch"], named["members"], MEET_S):
                    return True
            return False
        return self._join_remote(first)

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
            time.sleep(LOOK_S)
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

    def _wait_for_word(self) -> Message | None:
        """Wait until the supervisor has named a new group; None at the end."""
        self._ctx.status.phase = Phase.REDUCING
        while self._stays():
            self._look()
            if self._named is not None and self._named["epoch"] > self._tried:
                return self._named
            time.sleep(LOOK_S)
        return None

    def _enter(self, store: Store, epoch: int, members: list[int], timeout_s: float) -> bool:
        """Meet the members and take the state of the most advanced.

        Returns False where that failed, which is reported to the supervisor.
        """
        ctx, trainer, cfg = self._ctx, self._trainer, self._config.learner

        def waiting() -> bool:
            self._look()
            named = self._named
            return self._stays() and (named is None or named["epoch"] <= epoch)

        def ended() -> bool:
            return bool(self._ended(epoch, members))

        self._tried = epoch
        group: LearnerGroup | None = None
        sync: GradientSync | None = None
        failure = ""
        try:
            hello = hello_of(self._config, trainer.device)
            meet(store, members, ctx.learner, hello, timeout_s, waiting)
            group = LearnerGroup(
                store,
                epoch,
                members,
                ctx.learner,
                trainer.device,
                cfg.reduce,
                is_lost=ended if ctx.meets_at is not None else None,
            )
            progress = trainer.progress
            place = [progress.generation, self._rounds, progress.learner_steps]
            places = group.gather([*place, -trainer.queue.taken_back])
            source = places.index(max(places))
            for optimizer in trainer.optimizers().values():
                optimizer.learners = group.world
            assert self._pace is not None
            sync = self._pace.join(group, source)
            assert sync is not None
            self._broadcast_state(group, sync, source, rounds=places[source][1])
        except GroupLostError as error:
            failure = str(error)
        if failure or sync is None:  # out here, where nothing refers to the group any more
            if sync is not None:
                sync.close()
            elif group is not None:
                group.close()
            elif dist.is_initialized():
                dist.destroy_process_group()
            self._failed(epoch, failure)
            return False
        self._group, self.sync, trainer.sync = group, sync, sync
        self.epoch = epoch
        self._failing_since_s = None
        trainer.queue.join_group(state_tensors(trainer), cfg.reduce.timeout_s)
        ctx.report("entered")
        return True

    def _join_remote(self, first: bool) -> bool:
        """Enter the only group on several machines; False where the run ends before.

        Raises RunEndedError where that group was lost.
        """
        ctx, members = self._ctx, range(self._config.learner.most_count)
        assert ctx.store is not None

        if not first:
            assert self._remote is not None
            gone = who_has_gone(self._remote, ctx.store, members, ctx.learner, self._stays)
            if ctx.stopping():
                return False
            raise RunEndedError(f"{gone}; {AGAIN}")
        use_interface(self._config.learner.reduce.interface or interface_of(ctx.store, os.environ))
        timeout_s = self._config.run.start_timeout_s
        self._remote = open_store(ctx.store, ctx.learner, timeout_s, self._stays)
        try:
            return self._remote is not None and self._enter(
                self._remote, 0, list(members), timeout_s
            )
        except UserError:
            time.sleep(REREAD_S)
            raise

    def _failed(self, epoch: int, failure: str) -> None:
        if self._ctx.stopping():
            return
        if (store := self._ctx.store) is not None:
            raise could_not_meet(store, failure)
        now_s = time.monotonic()
        self._failing_since_s = self._failing_since_s or now_s
        patience_s = self._config.learner.reduce.timeout_s + self._config.run.hang_timeout_s
        if now_s - self._failing_since_s > patience_s:
            raise RuntimeError(
                f"no group of learners could be formed for {patience_s:g} s: {failure}"
            )
        self._ctx.report("group_failed", epoch=epoch, message=failure)

    def _broadcast_state(
        self, group: LearnerGroup, sync: GradientSync, source: int, rounds: int
    ) -> None:
        """Take the most advanced member's state, after ``rounds`` rounds, and the own part of a
        checkpoint.
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
        trainer.regrouped()
        progress.share_window(group.world)
        stored = group.broadcast(self._stored, source)
        self._stored = {}
        for optimizer in trainer.optimizers().values():
            optimizer.recount()
        if group.rank != source:
            seed = np.random.SeedSequence([self._config.run.seed, group.epoch, group.rank])
            torch.manual_seed(int(seed.generate_state(1)[0]))
        sync.load_state_dict(stored)

    def _interface(self) -> str | None:
        """Returns the network interface for the other learners of this supervisor."""
        if self._ctx.meets_at is None:
            return LOOPBACK
        return self._config.learner.reduce.interface or interface_with(self._ctx.meets_at)

    def _meeting(self, named: Message) -> Store | None:
        """The store in which the members of a group meet: a file where all are on this host, else
        served by the first member, which may take a moment. None where that was in vain, which is
        reported to the supervisor.
        """
        epoch, meets_at = named["epoch"], named.get("meets_at")
        if meets_at is None:
            path = self._ctx.runtime_dir / f"{MEETING}{epoch}"
            return dist.FileStore(str(path), len(named["members"]))  # type: ignore[attr-defined]
        served = self._meetings.get(meets_at)
        if served is None:
            host, _, port = meets_at.rpartition(":")
            where, leads = Where(host, int(port)), meets_at == self._ctx.meets_at
            try:
                served = open_store(where, 0 if leads else 1, MEET_S, self._stays)
            except UserError as error:
                self._tried = epoch
                self._failed(epoch, str(error))
            if served is None:
                return None
            if leads:  # it serves until this process ends; as a client, each group has a connection
                self._meetings[meets_at] = served
        return dist.PrefixStore(f"{MEETING}{epoch}", served)  # type: ignore[attr-defined]

    def _stays(self) -> bool:
        self._ctx.status.beat()
        return not self._ctx.stopping()

"""The learner's process: memory for the actors, batches for the trainer, weights for all.

Batches come from an `ActorSource`, which owns the store. The process opens its socket only when the
first weights are on the board, so that an attached actor finds everything there. `StreamTracker`
counts the streams and connectors that feed the learner.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from penstock.algos.registry import algorithm
from penstock.algos.samples import has_small_images
from penstock.autotune.forms import with_training_form
from penstock.configs.errors import UserError
from penstock.configs.for_actors import for_actors
from penstock.configs.policy_lag import batches_ahead, lent_by_batch
from penstock.configs.schema import Config
from penstock.core.control import Message
from penstock.core.cores import most_actors
from penstock.core.interfaces import Dataset, Transitions, TransitionSequences, Unrolls, Welcome
from penstock.core.memory import TRIM_S, give_back_memory
from penstock.core.notes import note_logger
from penstock.core.params import Arrays, Floats
from penstock.core.role import LOST_SHIM, RoleContext, RunEndedError, learner_socket
from penstock.device.choice import device_of
from penstock.envs import probe
from penstock.envs.make import FirstIndex
from penstock.envs.space_json import brief_spaces
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager, form_of_checkpoint
from penstock.learner.factory import (
    AnyTrainer,
    kind_note,
    make_trainer,
    network_of,
    on_own_gpu,
)
from penstock.learner.group.elastic_group import ElasticGroup
from penstock.learner.loop import TrainingLoop
from penstock.learner.nonfinite import DIVERGED, NonFiniteGuard
from penstock.learner.offpolicy import OffPolicyTrainer
from penstock.learner.publisher import Publisher
from penstock.learner.sources.replay import ReplayDataSource
from penstock.learner.sources.source import ActorSource
from penstock.learner.sources.unrolls import UnrollSource
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync, GroupLostError
from penstock.learner.torch_trace import TorchTrace
from penstock.profiling.device import DeviceClock
from penstock.profiling.ledger import Part, TimeLedger
from penstock.profiling.status import Phase, StatusPage
from penstock.replay import Accounting
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.weights_board import WeightsBoard

logger = note_logger(__name__)

WAIT_S = 0.2
MESSAGES_S = 0.05  # seconds between two reads of the control socket; each costs a system call
ARRIVAL_S = 5.0  # longest time that slots of a dead actor may still be on their way
RECEIVED = ("slots", "steps", "raw_nbytes", "coded_nbytes")
REMOTE_ACTORS = 16  # actors with memory from the start, where actors join from elsewhere
SPARE_LANES = 32  # beyond the actors of a run: connectors, actors started by hand, replaced actors


def run(ctx: RoleContext) -> None:
    """Train until asked to stop; reports metrics, the reason to stop, and the final accounting."""
    config = ctx.config
    assert config is not None
    ctx.status.begin(Phase.ENVIRONMENT)
    info = probe(config.env, config.actors.env_threads, FirstIndex.LEARNER + ctx.learner)
    ctx.status.begin(Phase.STARTING)
    logger.info("%s", info.how)
    if ctx.learner == 0 and (note := kind_note(config, info)):
        logger.info("%s", note)
    kept = None if ctx.resume == "no" else form_of_checkpoint(ctx.run_dir)
    own, note = with_training_form(on_own_gpu(config, ctx), info, kept)
    trainer = make_trainer(own, info, ctx.ledger)
    logger.info("%s", network_of(own, info, trainer))
    if note and ctx.learner == 0:
        logger.info("%s", note)
    checkpoints = CheckpointManager(ctx.run_dir, trainer, ctx.report, ctx.event)
    # A parameter server takes the state of the learner that joins first. Otherwise learner 0
    # resumes, unless the other learners have the state already; on several machines it joins first.
    served = config.learner.served and ctx.store is None
    if served or (ctx.learner == 0 and not ctx.group_begun):
        # Under a server, a learner that restarts takes time and returns from the last checkpoint.
        how = "auto" if served and ctx.incarnation and ctx.resume == "no" else ctx.resume
        if not checkpoints.resume(how, repair=ctx.learner == 0) and how == "auto":
            logger.info("%s has no checkpoint: this run starts fresh", ctx.run_dir)
    group = ElasticGroup(ctx, config, trainer, checkpoints.stored)
    if not group.join():
        return
    with LearnerProcess(ctx, config, trainer, checkpoints, group) as process:
        ctx.report("ready")
        process.work()
        process.finish()


def make_source(
    config: Config,
    trainer: AnyTrainer,
    accounting: Accounting,
    first: int,
    most: int,
    ledger: TimeLedger,
    status: StatusPage,
    rank: int = 0,
) -> ActorSource[Any]:
    """Make the source of batches for ``trainer``.

    Args:
        config: of the run.
        trainer: the consumer of the batches.
        accounting: counts arrived and trained steps.
        first: actors at the start, for which there is memory.
        most: actors later. Memory for unrolls grows with them, that of a replay is all made now.
        ledger: of the calling thread.
        status: where the thread that prepares batches ahead keeps its ledger.
        rank: of the learner.
    """
    lanes = most + SPARE_LANES
    feeder = status.ledger("feeder") if batches_ahead(config) else None
    match algorithm(config.algo).data(config.algo):
        case Unrolls():
            return UnrollSource(config, trainer, accounting, first, lanes, ledger, feeder=feeder)
        case Transitions() | TransitionSequences():
            assert isinstance(trainer, OffPolicyTrainer)
            return ReplayDataSource(
                config,
                trainer,
                accounting,
                most,
                lanes,
                ledger,
                first=first,
                feeder=feeder,
                rank=rank,
            )
        case Dataset(folder=folder):
            raise UserError(
                f"{config.algo.name} trains on the data set {folder}, without actors, which only "
                "the lockstep mode can; set transport.kind=inproc"
            )


class LearnerProcess(TrainingLoop[Any]):
    """One learner's work between "ready" and its end."""

    def __init__(
        self,
        ctx: RoleContext,
        config: Config,
        trainer: AnyTrainer,
        checkpoints: CheckpointManager,
        group: ElasticGroup,
    ) -> None:
        self._ctx = ctx
        self._group = group
        self._config = config
        self._checkpoints = checkpoints
        self._accounting = Accounting(trainer.spec.unroll * trainer.spec.envs)
        first = max(config.first_actors, REMOTE_ACTORS if config.transport.bind else 0)
        most = max(first, most_actors(config))
        source = make_source(
            config, trainer, self._accounting, first, most, ctx.ledger, ctx.status, ctx.learner
        )
        self._shard = checkpoints.shard(ctx.learner)
        resumes = trainer.progress.generation and checkpoints.resumes_same_env()
        if resumes and (note := source.restore(self._shard)):
            logger.info("%s", note)
        self._board = WeightsBoard.create(trainer.layout.size)
        publisher = Publisher(trainer.published(), self._board)
        nonfinite = NonFiniteGuard(trainer, ctx.event)
        self._actor_source = source
        super().__init__(trainer, source, publisher, nonfinite, ctx.ledger, ctx.status)
        self._by_batch = lent_by_batch(config)
        self._publish()
        self._publisher.flush(wait=True)
        welcome = Welcome(
            ctx.run_id,
            self._progress.generation,
            trainer.spec,
            trainer.layout,
            for_actors(config, bool(trainer.scales), has_small_images(config, trainer.info)),
            brief_spaces(*trainer.info.spaces),
        )
        socket = learner_socket(ctx.runtime_dir, ctx.learner)
        self._host = ShmHost(socket, welcome, self._board, self._actor_source.store)
        self._reason: str | None = None  # why this learner would stop
        self._over = False  # whether no learner takes the place of this one
        self._kept: Arrays | None = {}  # state of the group's members, for the last checkpoint
        self._next_report_s = self._next_messages_s = 0.0
        self._trim_s = time.monotonic() + TRIM_S
        self._others = StreamTracker(self._accounting)
        self._torch_trace = TorchTrace()
        self._requests = checkpoints.begin_evaluation_requests()
        # of the learner: on a GPU that of its stream, else of this thread
        self._seconds = ctx.ledger
        self._clock: DeviceClock | None = None
        device = device_of(trainer.device)
        if device.runs_behind:
            self._seconds = ctx.status.ledger("gpu", Part.WAIT)
            self._clock = DeviceClock(
                ctx.ledger, self._seconds, partial(device.make_event, timed=True)
            )
            trainer.queue.meanwhile = self._while_computing

    def __enter__(self) -> LearnerProcess:
        self._actor_source.open(self._host)
        return self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        self._source.close()
        self._host.close(over=self._over and error is None)
        self._actor_source.store.close()
        self._board.close()

    def work(self) -> None:
        """Train until a stop condition is met or the supervisor asks to stop."""
        self._next_report_s = time.monotonic() + self._config.run.interval_s
        going = True
        while going:
            self._ctx.status.beat()
            self._ctx.holds_state = self._group.sync.world == 1
            if self._ctx.shim_died and not self._ctx.stopping():
                self._save_and_end()
            lost = None
            try:
                going = self.turn()
            except GroupLostError as error:
                lost = str(error)
            if lost is not None:  # out here, where nothing refers to the lost group any more
                going = self._regroup(lost)
            self._torch_trace.turn()
            if time.monotonic() >= self._next_report_s:
                self._report()
        self._report(last=True)

    def _save_and_end(self) -> None:
        """Save for the process that replaces this one, whose shim has died. Returns where the
        supervisor has died too, and nothing will replace it."""
        self._hear()
        if self._ctx.stopping():
            return
        self._trainer.queue.drain()
        self._ledger.switch(Part.SAVE)
        self._ctx.status.phase = Phase.SAVING
        self.keep(save=True)
        raise RunEndedError(LOST_SHIM)

    def finish(self) -> None:
        """Wait until all producers have ended, count remaining steps, save, report."""
        self._ledger.switch(Part.OTHER)
        self._actor_source.stop()
        while not self._ctx.stopping():
            self._ctx.status.beat()
            self._actor_source.serve(WAIT_S)
        in_flight = self._actor_source.in_flight_steps()
        self._hear()
        self._others.close_streams(everything_arrived=True)
        self._progress.arrived(self._accounting)
        with suppress(GroupLostError):
            last = ControlMessage(np.zeros(0), self._progress.growth())
            self._progress.commit(last.growth, self._group.sync.sync_control(last).growth)
        counts = self._progress.counts() | self._others.figures() | self._nonfinite.figures()
        self._ctx.report("final", accounting=self._accounting.to_dict(in_flight), **counts)
        self._ctx.status.phase = Phase.SAVING
        self._ledger.switch(Part.SAVE)
        if leads := self._group.leads:
            self._save()
        self._group.leave()
        self._source.save(self._shard, self._ctx.status.beat)
        if not leads and self._group.takes_over():
            self._save()
        self._checkpoints.close(self._config.run.grace_s / 2)

    @property
    def sync(self) -> GradientSync:
        return self._group.sync

    @property
    def leads(self) -> bool:
        return self._group.leads

    def must_stop(self) -> bool:
        self._meanwhile()
        self._show_counts()
        self._ctx.status.phase = Phase.WAITING
        self._reason = DIVERGED if self.diverged else self._progress.stop_reason()
        return self._reason is not None or self._ctx.stopping()

    def next_batch(self) -> Any:
        """The next batch; None after so long without one that the other learners proceed."""
        wait_s = self._config.learner.reduce.wait_s if self._group.sync.world > 1 else 0.0
        deadline_s = time.monotonic() + wait_s
        self._ledger.switch(Part.WAIT)
        while (batch := self._source.next(WAIT_S)) is None:
            self._ctx.status.beat()
            self._meanwhile()
            if self._ctx.stopping() or time.monotonic() >= deadline_s:
                break
        self._ledger.switch(Part.COUNT)
        return batch

    def control(self, counts: Floats, stop: bool) -> ControlMessage:
        if time.monotonic() >= self._next_messages_s:
            self._hear()
        self._progress.arrived(self._accounting)
        self._requests.turn()
        evaluates = self._group.leads and self._requests.due() is not None
        if evaluates and self.sync.world == 1:
            self._save_for_evaluation({})
            evaluates = False
        return ControlMessage(
            counts,
            self._progress.growth(),
            stop=stop,
            nan=self._nonfinite.due,
            # The states of several learners are collected for an ordinary checkpoint only.
            checkpoint=evaluates or (self._group.leads and self._checkpoints.due()),
            regroup=self._group.changed,
        )

    def _publish(self) -> None:
        super()._publish()
        if self._config.transport.max_policy_lag == 0:  # all actors wait for these weights
            self._publisher.flush(wait=True)

    def before_backward(self) -> None:
        self._actor_source.backward_begins()

    def after_update(self, updates_left: int) -> None:
        """Serve attaching and leaving actors, which no thread does where slots are lent by batch.

        When the batch in training has as many updates left as the next one may lag, publish the
        weights, and lend the slots of the next.
        """
        if not self._by_batch:
            return
        self._host.poll(0.0)
        lag = self._config.transport.max_policy_lag
        if not lag or updates_left != lag:  # without lag weights are published after the batch
            return
        self._trainer.queue.drain()  # may raise, where a wait for the copy would not end
        before = self._ledger.part
        self._ledger.switch(Part.PUBLISH)
        self._publish()
        self._publisher.flush(wait=True)
        self._actor_source.store.lend_up_to(self._config.learner.batch_slots)
        self._ledger.switch(before)

    def keep(self, *, save: bool) -> None:
        """Collect what each learner keeps for itself, and ``save`` the run."""
        self._kept = self._group.state(last=not save)
        if save:
            try:
                if self._group.leads:
                    self._save()
                self._source.save(self._shard)
                self._checkpoints.on_order_done()
            except (UserError, RunEndedError) as error:  # a full disk may have room later
                self._checkpoints.postpone(str(error))
                logger.info("this checkpoint could not be saved, and the run continues: %s", error)
        self._nonfinite.keep()

    def stopped(self) -> None:
        if self._reason is not None or self._ctx.store is not None:
            # On several machines each supervisor learns it from its own learner, which may have
            # reached the limit as the learners agreed to stop.
            reason = self._reason or self._progress.stop_reason() or "stopped"
            self._ctx.report("stop", reason=reason, error=self.diverged)
        elif self._ctx.stopping():  # stopped by a signal from elsewhere than the supervisor?
            self._ctx.report("stop", reason="terminated")

    def _save_for_evaluation(self, group: Arrays) -> None:
        """Write the checkpoint that is due for the evaluator."""
        self._ledger.switch(Part.SAVE)
        self._ctx.status.phase = Phase.SAVING
        try:
            self._checkpoints.save_for_evaluation(group)
        except UserError as error:
            self._requests.put_off()
            logger.info("a checkpoint for an evaluation could not be saved: %s", error)
        self._ledger.switch(Part.COUNT)

    def _save(self) -> None:
        """Save the run. Raises UserError where it cannot be written, and RunEndedError where a
        part of its state is missing."""
        if self._kept is None:
            raise RunEndedError(
                "the parameter server did not send its state: checkpoints/last is not replaced"
            )
        group = self._group
        self._checkpoints.save(self._kept, epoch=group.epoch, is_named=group.is_named)
        if self._requests.due() is not None:
            self._save_for_evaluation(self._kept)

    def _regroup(self, why: str) -> bool:
        """Join the other learners again; False where the run ends."""
        self._ledger.switch(Part.REDUCE)
        self._kept = {}  # belonged to the former members
        self._publisher.drop()  # may be of a reduction that was lost
        self._checkpoints.forget_best()
        if not self._group.join(why):
            return False
        self._nonfinite.begin_anew()
        self._publish()
        return True

    def _show_counts(self) -> None:
        """Write the counts on the status page, from where a learner that is killed is accounted."""
        self._ctx.status.produced_steps = self._accounting.produced
        self._ctx.status.trained_steps = self._accounting.trained

    def _meanwhile(self) -> None:
        """Periodic work while this thread waits; not a heartbeat, since a GPU may hang."""
        self._publisher.flush()
        if self._clock is not None:
            self._clock.settle()

    def _while_computing(self) -> None:
        """Periodic work while a GPU computes; raises GroupLostError where it will never end."""
        self._meanwhile()
        self._group.raise_if_lost()

    def _report(self, *, last: bool = False) -> None:
        self._ledger.switch(Part.COUNT)
        self._meanwhile()
        self._next_report_s = time.monotonic() + self._config.run.interval_s
        self._hear()
        self._others.close_streams()
        self._progress.arrived(self._accounting)
        statistics = self._trainer.statistics(wait=last)
        self._nonfinite.tell_skipped()
        if time.monotonic() >= self._trim_s:
            self._trim_s = time.monotonic() + TRIM_S
            give_back_memory()
        self._show_counts()  # so that the page never shows less than the metrics
        self._ctx.report("metrics", **self._metrics(), **statistics)

    def _metrics(self) -> dict[str, Any]:
        return (
            self._progress.interval(self._seconds)
            | self._others.figures()
            | {"actors_alive": self._host.actors + self._others.actors}
            | self._actor_source.figures()
            | self._nonfinite.figures()
        )

    def _hear(self) -> None:
        self._next_messages_s = time.monotonic() + MESSAGES_S
        messages = self._group.messages()
        self._others.hear(messages)
        self._torch_trace.hear(messages)
        self._requests.hear(messages)
        self._checkpoints.handle_messages(messages)
        for message in messages:
            if message["kind"] == "threads":  # of the thread that trains, which is this one
                torch.set_num_threads(message["threads"])
            elif message["kind"] == "over":
                self._over = True


class StreamTracker:
    """Tracks the streams and connectors that feed a learner, from the supervisor's messages.

    Call `hear` with every message, and `close_streams` at every report.
    """

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self._connectors: dict[tuple[int, int], Message] = {}
        """The latest message of each connector, by index and incarnation."""
        self._ended: deque[tuple[float, Message]] = deque()  # with the time of arrival

    def hear(self, messages: Iterable[Message]) -> None:
        now_s = time.monotonic()
        for message in messages:
            if message["kind"] == "actor_ended":
                self._ended.append((now_s, message))
            elif message["kind"] == "connector":
                self._ended += [(now_s, stream) for stream in message.pop("streams", ())]
                self._connectors[message["index"], message["incarnation"]] = message

    def close_streams(self, *, everything_arrived: bool = False) -> None:
        """Count the final steps of ended streams, once nothing of them can arrive any more."""
        now_s = time.monotonic()
        while self._ended and (everything_arrived or now_s - self._ended[0][0] > ARRIVAL_S):
            _, end = self._ended.popleft()
            self._accounting.ended(
                end["actor"],
                end["incarnation"],
                end["sequence"],
                end["produced_steps"],
                trusted=end.get("kind") == "actor_ended",
            )

    @property
    def actors(self) -> int:
        """The number of actors of the connectors, in their newest incarnations."""
        newest = dict(sorted(self._connectors))  # the last incarnation of each index remains
        return sum(self._connectors[key]["actors"] for key in newest.items())

    def figures(self) -> dict[str, dict[str, int]]:
        """What was not trained on, by reason: agent steps, and for ``rejected`` messages.

        With connectors also ``received``, the totals over the wire of these and their predecessors.
        """
        connectors = self._connectors.values()
        rejected: Counter[str] = Counter()
        for connector in connectors:
            rejected.update(connector["rejected"])
        figures = {
            "dropped": dict(self._accounting.dropped),
            "lost": dict(self._accounting.lost),
            "rejected": dict(rejected),
        }
        if connectors:
            figures["received"] = {name: sum(c[name] for c in connectors) for name in RECEIVED}
        return figures

"""The learner's process: memory for the actors, batches for the trainer, weights for all.

`run` is the main function of the role. It makes the trainer, resumes, joins the other learners, and
then `LearnerProcess` trains. Batches come from an `ActorSource`, which owns the store. The process
opens its socket only when the first weights are on the board, so that an attached actor finds
everything there. `StreamTracker` counts the streams and connectors that feed the learner.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

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
from penstock.envs import EnvInfo, probe
from penstock.envs.make import FirstIndex
from penstock.envs.seats import check_options, ranking_note
from penstock.envs.self_driven import HOW
from penstock.envs.space_json import brief_spaces
from penstock.learner.chairs import new_session
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager, form_of_checkpoint
from penstock.learner.factory import (
    AnyTrainer,
    kind_note,
    make_trainer,
    network_of,
    on_own_gpu,
)
from penstock.learner.group.elastic_group import ElasticGroup
from penstock.learner.league import League, make_league
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

# Longest wait for a batch, in seconds, between two heartbeats.
WAIT_S = 0.2
# Seconds between two reads of the control socket; each costs a system call.
MESSAGES_S = 0.05
# Longest time that slots of a dead actor may still be on their way.
ARRIVAL_S = 5.0
# Totals over the wire in a connector's message.
RECEIVED = ("slots", "steps", "raw_nbytes", "coded_nbytes")
# Actors that have memory from the start, if actors join from elsewhere.
REMOTE_ACTORS = 16
# Lanes beyond the actors of a run: for connectors, actors started by hand, and replaced actors.
SPARE_LANES = 32


def run(ctx: RoleContext) -> None:
    """Train until asked to stop; reports metrics, the reason to stop, and the final accounting."""
    config = ctx.config
    assert config is not None
    ctx.status.begin(Phase.ENVIRONMENT)
    info = probe(config.env, config.actors.env_threads, FirstIndex.LEARNER + ctx.learner)
    ctx.status.begin(Phase.STARTING)
    check_options(config, info.seating)
    logger.info("%s", HOW if config.actors.games else info.how)
    if ctx.learner == 0:
        for note in (kind_note(config, info), ranking_note(config, info.seating)):
            if note:
                logger.info("%s", note)

    trainer = _make_trainer(ctx, config, info)
    league = make_league(trainer, ctx.run_dir, ctx.event, rank=ctx.learner)
    checkpoints = CheckpointManager(ctx.run_dir, trainer, ctx.report, ctx.event, league)
    _resume(ctx, config, checkpoints)
    group = ElasticGroup(ctx, config, trainer, checkpoints.resumed_group_state)
    if not group.join():
        return
    if league is not None:
        league.open(new_session(), beat=ctx.status.beat, stopping=ctx.stopping)
    with LearnerProcess(ctx, config, trainer, checkpoints, group, league) as process:
        ctx.report("ready")
        process.work()
        process.finish()


def _make_trainer(ctx: RoleContext, config: Config, info: EnvInfo) -> AnyTrainer:
    """Make the trainer on this learner's device, in the fastest form of its network.

    Logs what network it is; the first learner also how the form was chosen.
    """
    saved_form = None if ctx.resume == "no" else form_of_checkpoint(ctx.run_dir)
    own_config, note = with_training_form(on_own_gpu(config, ctx), info, saved_form)
    trainer = make_trainer(own_config, info, ctx.ledger)
    logger.info("%s", network_of(own_config, info, trainer))
    if note and ctx.learner == 0:
        logger.info("%s", note)
    return trainer


def _resume(ctx: RoleContext, config: Config, checkpoints: CheckpointManager) -> None:
    """Resume the run, if it is this learner that does.

    A parameter server takes the state of the learner that joins first. Otherwise learner 0 resumes,
    unless the other learners have the state already; on several machines it joins first.
    """
    served = config.learner.served and ctx.store is None
    if not served and (ctx.learner != 0 or ctx.group_begun):
        return

    how = ctx.resume
    if served and ctx.incarnation and ctx.resume == "no":
        # Under a server, a learner that restarts takes time and returns from the last checkpoint.
        how = "auto"
    if not checkpoints.resume(how, repair=ctx.learner == 0) and how == "auto":
        logger.info("%s has no checkpoint: this run starts fresh", ctx.run_dir)


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
    """Make the source of batches for a trainer: what its algorithm trains on decides which.

    Args:
        config: of the run.
        trainer: the consumer of the batches.
        accounting: counts arrived and trained steps.
        first: actors at the start, for which there is memory.
        most: most actors later. Memory for unrolls grows with them; that of a replay is made now.
        ledger: of the calling thread.
        status: where the thread that prepares batches ahead keeps its ledger.
        rank: of the learner.

    Raises:
        UserError: the algorithm trains on a data set, without actors.
    """
    # Games play through the lane of a connector.
    lanes = SPARE_LANES if config.actors.games else most + SPARE_LANES
    feeder = status.ledger("feeder") if batches_ahead(config) else None
    match algorithm(config.algo).data(config.algo):
        case Unrolls():
            return UnrollSource(
                config,
                trainer,
                accounting,
                actors=first,
                lanes=lanes,
                ledger=ledger,
                feeder=feeder,
            )
        case Transitions() | TransitionSequences():
            assert isinstance(trainer, OffPolicyTrainer)
            return ReplayDataSource(
                config,
                trainer,
                accounting,
                actors=most,
                lanes=lanes,
                ledger=ledger,
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
    """One learner's work between "ready" and its end.

    Use it as a context; then call `work`, and `finish` after it.
    """

    def __init__(
        self,
        ctx: RoleContext,
        config: Config,
        trainer: AnyTrainer,
        checkpoints: CheckpointManager,
        group: ElasticGroup,
        league: League | None = None,
    ) -> None:
        """Make the memory for actors and restore the replay; `__enter__` opens the socket."""
        self._ctx = ctx
        self._group = group
        self._config = config
        self._checkpoints = checkpoints
        self._accounting = Accounting(trainer.spec.unroll * trainer.spec.envs)
        self._streams = StreamTracker(self._accounting)
        self._by_batch = lent_by_batch(config)
        """Whether slots are lent by batch, so that no thread serves the host."""

        first = max(config.first_actors, REMOTE_ACTORS if config.transport.bind else 0)
        source = make_source(
            config,
            trainer,
            self._accounting,
            first=first,
            most=max(first, most_actors(config)),
            ledger=ctx.ledger,
            status=ctx.status,
            rank=ctx.learner,
        )
        self._actor_source = source
        self._replay_folder = checkpoints.replay_folder(ctx.learner)
        plan = source.plan_checkpoints(self._replay_folder)
        if plan and ctx.learner == 0:
            logger.info("%s", plan)
        resumes_replay = trainer.progress.generation and checkpoints.resumes_same_env()
        if resumes_replay:
            note = source.restore(self._replay_folder, ctx.status.beat)
            if note:
                logger.info("%s", note)

        self._board = WeightsBoard.create(trainer.layout.size)
        super().__init__(
            trainer,
            source,
            Publisher(trainer.published_tensors(), self._board),
            NonFiniteGuard(trainer, ctx.event),
            ledger=ctx.ledger,
            status=ctx.status,
            league=league,
        )
        self._publish()
        self._publisher.flush(wait=True)
        self._host = self._make_host()

        self._stop_reason: str | None = None
        """Why this learner would stop; None while it would not."""
        self._run_is_over = False
        """Whether no learner takes the place of this one after its end."""
        self._group_state: Arrays | None = {}
        """The state of the group's members, for the last checkpoint; None if a server did not send
        its part."""
        self._requests = checkpoints.begin_evaluation_requests()
        self._torch_trace = TorchTrace()

        # Times of CLOCK_MONOTONIC at which periodic work is due.
        self._next_report_s = 0.0
        self._next_messages_s = 0.0
        self._trim_s = time.monotonic() + TRIM_S

        self._time_ledger = ctx.ledger
        """The learner's time: of this thread, or on a GPU of the stream."""
        self._clock: DeviceClock | None = None
        device = device_of(trainer.device)
        if device.runs_behind:
            self._time_ledger = ctx.status.ledger("gpu", Part.WAIT)
            make_event = partial(device.make_event, timed=True)
            self._clock = DeviceClock(ctx.ledger, self._time_ledger, make_event)
            ctx.ledger.follow(self._clock.mark)
            trainer.queue.call_while_waiting(self._while_computing)

    def _make_host(self) -> ShmHost:
        """Make the socket at which actors of this host attach; it tells them what they need."""
        ctx, config, trainer = self._ctx, self._config, self._trainer
        boards = [self._board, *(() if self._league is None else self._league.boards)]
        welcome = Welcome(
            run_id=ctx.run_id,
            generation=self._progress.generation,
            spec=trainer.spec,
            layout=trainer.layout,
            config=for_actors(
                config,
                scaled=bool(trainer.scales),
                filtered=has_small_images(config, trainer.info),
                embedded=any(part.choices for part in trainer.info.parts),
            ),
            spaces=brief_spaces(*trainer.info.spaces),
            chairs=len(boards) - 1,
        )
        socket = learner_socket(ctx.runtime_dir, ctx.learner)
        return ShmHost(socket, welcome, boards, self._actor_source.store)

    def __enter__(self) -> LearnerProcess:
        self._actor_source.open(self._host)
        return self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        self._source.close()
        self._host.close(over=self._run_is_over and error is None)
        self._actor_source.store.close()
        self._board.close()
        if self._league is not None:
            self._league.close()

    def work(self) -> None:
        """Train until a stop condition is met or the supervisor asks to stop."""
        self._next_report_s = time.monotonic() + self._config.run.interval_s
        continues = True
        while continues:
            self._ctx.status.beat()
            self._ctx.holds_state = self._group.sync.world == 1
            if self._ctx.shim_died and not self._ctx.stopping():
                self._save_and_end()

            # It joins another group outside of the handler: the exception refers to the lost one,
            # whose connections close with the last reference.
            loss: str | None = None
            try:
                continues = self.turn()
            except GroupLostError as error:
                loss = str(error)
            if loss is not None:
                continues = self._regroup(loss)

            self._torch_trace.turn()
            if time.monotonic() >= self._next_report_s:
                self._report()
        self._report(last=True)

    def _save_and_end(self) -> None:
        """Save for the process that replaces this one, whose shim has died.

        Returns if the supervisor has died too, and nothing will replace it.

        Raises:
            RunEndedError: the run is saved.
        """
        self._handle_messages()
        if self._ctx.stopping():
            return

        self._trainer.queue.drain()
        self._ledger.switch(Part.SAVE)
        self._ctx.status.phase = Phase.SAVING
        self.capture_state(save=True)
        raise RunEndedError(LOST_SHIM)

    def finish(self) -> None:
        """Wait until all producers have ended, count remaining steps, save, report."""
        self._ledger.switch(Part.OTHER)
        self._actor_source.stop()
        while not self._ctx.stopping():
            self._ctx.status.beat()
            self._actor_source.serve(WAIT_S)

        # Everything has arrived now, so that the counts are the last ones.
        in_flight = self._actor_source.in_flight_steps()
        self._handle_messages()
        self._streams.close_streams(everything_arrived=True)
        self._progress.count_env_steps(self._accounting)
        with suppress(GroupLostError):
            last = ControlMessage(np.zeros(0), self._progress.growth())
            self._progress.commit(last.growth, self._group.sync.sync_control(last).growth)
        counts = self._progress.counts() | self._streams.figures() | self._nonfinite.figures()
        self._ctx.report("final", accounting=self._accounting.to_dict(in_flight), **counts)

        # One learner saves the run, and another one if that has died; each saves its own replay.
        self._ctx.status.phase = Phase.SAVING
        self._ledger.switch(Part.SAVE)
        if leads := self._group.leads:
            self._save()
        self._group.leave()
        self._source.save(self._replay_folder, self._ctx.status.beat)
        if not leads and self._group.takes_over():
            self._save()
        self._checkpoints.close(self._config.run.grace_s / 2)

    @property
    def sync(self) -> GradientSync:
        return self._group.sync

    @property
    def leads(self) -> bool:
        return self._group.leads

    def begin_turn(self) -> bool:
        """Do what is due in every turn. Returns whether this learner must stop training."""
        self._do_periodic_work()
        self._show_counts()
        self._ctx.status.phase = Phase.WAITING
        self._stop_reason = DIVERGED if self.diverged else self._progress.stop_reason()
        return self._stop_reason is not None or self._ctx.stopping()

    def next_batch(self) -> Any:
        """Wait for the next batch, for up to `WAIT_S` seconds.

        One of several learners waits for up to `learner.reduce.wait_s`; after that the others
        proceed without it. Returns None if there is no batch.
        """
        wait_s = self._config.learner.reduce.wait_s if self._group.sync.world > 1 else 0.0
        deadline_s = time.monotonic() + wait_s

        self._ledger.switch(Part.WAIT)
        while (batch := self._source.next(WAIT_S)) is None:
            self._ctx.status.beat()
            self._do_periodic_work()
            if self._ctx.stopping() or time.monotonic() >= deadline_s:
                break

        self._ledger.switch(Part.COUNT)
        return batch

    def make_control_message(self, counts: Floats, stop: bool) -> ControlMessage:
        """Bring messages, counts and requests up to date, and make this turn's control message.

        Args:
            counts: this learner's samples of each update, float64 ``[updates]``.
            stop: whether this learner must stop.
        """
        if time.monotonic() >= self._next_messages_s:
            self._handle_messages()
        self._progress.count_env_steps(self._accounting)
        self._requests.turn()

        # A learner alone writes the evaluator's checkpoint at once. The states of several learners
        # are collected for an ordinary checkpoint only.
        evaluation_due = self._group.leads and self._requests.due() is not None
        if evaluation_due and self.sync.world == 1:
            self._save_for_evaluation({})
            evaluation_due = False
        return ControlMessage(
            counts,
            self._progress.growth(),
            stop=stop,
            nan=self._nonfinite.needs_rollback,
            checkpoint=evaluation_due or (self._group.leads and self._checkpoints.is_due()),
            regroup=self._group.has_new_members,
        )

    def _publish(self) -> None:
        super()._publish()
        if self._config.transport.max_policy_lag == 0:  # all actors wait for these weights
            self._publisher.flush(wait=True)

    def before_backward(self) -> None:
        self._actor_source.on_backward()

    def after_update(self, updates_left: int) -> None:
        """Do what no other thread does where slots are lent by batch: serve actors, and lend slots.

        Actors that attach or leave are served after each update. When the batch in training has as
        many updates left as the next one may lag, its weights are published, and the slots of the
        next one are lent.
        """
        if not self._by_batch:
            return
        self._host.poll(0.0)

        # Without any lag weights are published, and slots lent, after the batch.
        max_lag = self._config.transport.max_policy_lag
        if not max_lag or updates_left != max_lag:
            return

        # If the group is lost this raises, while a wait for the copy of the weights would not end.
        self._trainer.queue.drain()
        part = self._ledger.part
        self._ledger.switch(Part.PUBLISH)
        self._publish()
        self._publisher.flush(wait=True)
        self._actor_source.store.set_quota(self._config.learner.batch_slots)
        self._ledger.switch(part)

    def capture_state(self, *, save: bool) -> None:
        """Collect what each learner keeps for itself, and ``save`` the run.

        A run that cannot be saved continues, as a full disk may have room later.
        """
        self._group_state = self._group.state(last=not save)

        if save:
            try:
                if self._group.leads:
                    self._save()
                self._source.save(self._replay_folder)
                self._checkpoints.on_order_done()
            except (UserError, RunEndedError) as error:
                self._checkpoints.postpone(str(error))
                logger.info("this checkpoint could not be saved, and the run continues: %s", error)

        # A rollback returns to this state.
        self._nonfinite.copy_state()

    def on_stop(self) -> None:
        """Report why the run stops."""
        # On several machines each supervisor learns the reason from its own learner, which may have
        # reached the limit as the learners agreed to stop.
        if self._stop_reason is not None or self._ctx.store is not None:
            reason = self._stop_reason or self._progress.stop_reason() or "stopped"
            self._ctx.report("stop", reason=reason, error=self.diverged)
        elif self._ctx.stopping():  # stopped by a signal from elsewhere than the supervisor?
            self._ctx.report("stop", reason="terminated")

    def _save_for_evaluation(self, group_state: Arrays) -> None:
        """Write the checkpoint that is due for the evaluator."""
        self._ledger.switch(Part.SAVE)
        self._ctx.status.phase = Phase.SAVING
        try:
            self._checkpoints.save_for_evaluation(group_state)
        except UserError as error:
            self._requests.postpone()
            logger.info("a checkpoint for an evaluation could not be saved: %s", error)
        self._ledger.switch(Part.COUNT)

    def _save(self) -> None:
        """Save the run.

        Raises:
            UserError: the checkpoint cannot be written.
            RunEndedError: a part of the run's state is missing.
        """
        if self._group_state is None:
            raise RunEndedError(
                "the parameter server did not send its state: checkpoints/last is not replaced"
            )

        group = self._group
        self._checkpoints.save(self._group_state, epoch=group.epoch, is_named=group.is_named)
        if self._requests.due() is not None:
            self._save_for_evaluation(self._group_state)

    def _regroup(self, why: str) -> bool:
        """Join the other learners again, after the group was lost.

        Returns False if the run ends.
        """
        self._ledger.switch(Part.REDUCE)
        # The state belonged to the former members, and weights may be of a reduction that was lost.
        self._group_state = {}
        self._publisher.drop()
        self._checkpoints.reread_best()
        if not self._group.join(why):
            return False

        self._nonfinite.reset_states()
        self._publish()
        return True

    def _show_counts(self) -> None:
        """Write the counts on the status page, from where a learner that is killed is accounted."""
        self._ctx.status.produced_steps = self._accounting.produced
        self._ctx.status.trained_steps = self._accounting.trained

    def _do_periodic_work(self) -> None:
        """Publish weights that have arrived from the device, and read its clock.

        This is no heartbeat, since a GPU may hang.
        """
        self._publisher.flush()
        if self._clock is not None:
            self._clock.settle()

    def _while_computing(self) -> None:
        """Do periodic work while a GPU computes; raises GroupLostError if it will never end."""
        self._do_periodic_work()
        self._group.raise_if_lost()

    def _report(self, *, last: bool = False) -> None:
        """Report the metrics of the interval; the ``last`` report waits for all of a GPU's."""
        self._ledger.switch(Part.COUNT)
        self._do_periodic_work()
        self._next_report_s = time.monotonic() + self._config.run.interval_s
        self._handle_messages()
        self._streams.close_streams()
        self._progress.count_env_steps(self._accounting)
        statistics = self._trainer.statistics(wait=last)
        self._nonfinite.report_skipped()

        if time.monotonic() >= self._trim_s:
            self._trim_s = time.monotonic() + TRIM_S
            give_back_memory()
        # The page is written before the metrics, so that it never shows less than they do.
        self._show_counts()
        self._ctx.report("metrics", **self._metrics(), **statistics)

    def _metrics(self) -> dict[str, Any]:
        """Returns the figures of the interval, by their names in metrics.jsonl."""
        return (
            self._progress.interval(self._time_ledger)
            | self._streams.figures()
            | {"actors_alive": self._host.actors + self._streams.actors}
            | self._actor_source.figures()
            | self._nonfinite.figures()
            | ({} if self._league is None else self._league.figures())
        )

    def _handle_messages(self) -> None:
        """Read the supervisor's messages, and pass them on to all whom they may concern."""
        self._next_messages_s = time.monotonic() + MESSAGES_S
        messages = self._group.messages()

        self._streams.handle_messages(messages)
        self._torch_trace.handle_messages(messages)
        self._requests.handle_messages(messages)
        self._checkpoints.handle_messages(messages)

        for message in messages:
            if message["kind"] == "threads":
                # torch's threads belong to the one that calls them: this one, which trains.
                torch.set_num_threads(message["threads"])
            elif message["kind"] == "over":
                self._run_is_over = True


class EndedStream(NamedTuple):
    """The end of a stream, of which slots may still be on their way."""

    at_s: float
    """When its message arrived (CLOCK_MONOTONIC)."""
    message: Message


class StreamTracker:
    """Tracks the streams and connectors that feed a learner, from the supervisor's messages.

    Call `handle_messages` with every message, and `close_streams` at every report.
    """

    def __init__(self, accounting: Accounting) -> None:
        self._accounting = accounting
        self._connectors: dict[tuple[int, int], Message] = {}
        """The latest message of each connector, by index and incarnation."""
        self._ended: deque[EndedStream] = deque()
        """Streams whose final steps are not counted yet, in the order of their ends."""

    def handle_messages(self, messages: Iterable[Message]) -> None:
        """Note which streams have ended, and what connectors have received."""
        now_s = time.monotonic()
        for message in messages:
            if message["kind"] == "actor_ended":
                self._ended.append(EndedStream(now_s, message))
            elif message["kind"] == "connector":
                streams = message.pop("streams", ())
                self._ended += [EndedStream(now_s, stream) for stream in streams]
                self._connectors[message["index"], message["incarnation"]] = message

    def close_streams(self, *, everything_arrived: bool = False) -> None:
        """Count the final steps of ended streams, once nothing of them can arrive any more.

        That is `ARRIVAL_S` after their end, or now if ``everything_arrived``.
        """
        now_s = time.monotonic()
        while self._ended and (everything_arrived or now_s - self._ended[0].at_s > ARRIVAL_S):
            message = self._ended.popleft().message
            self._accounting.ended(
                actor=message["actor"],
                incarnation=message["incarnation"],
                next_sequence=message["sequence"],
                produced_steps=message["produced_steps"],
                trusted=message.get("kind") == "actor_ended",
            )

    @property
    def actors(self) -> int:
        """The number of actors, or of seats of games, of the connectors."""
        return sum(connector["actors"] for connector in self._newest_connectors())

    def _newest_connectors(self) -> list[Message]:
        """The latest messages of the connectors in their newest incarnations."""
        # Of the sorted keys, the dictionary keeps the last incarnation of each index.
        newest = dict(sorted(self._connectors))
        return [self._connectors[key] for key in newest.items()]

    def figures(self) -> dict[str, Any]:
        """Returns what was not trained on, by the names in metrics.jsonl.

        ``dropped`` and ``lost`` are agent steps by reason, ``rejected`` are messages by reason.
        With connectors there is also ``received``: the totals over the wire of these and their
        predecessors. Where games play there are also the ``games`` that are connected, and
        ``seats_held``, the number of their seats that wait until the learner takes what was played.
        """
        connectors = self._connectors.values()
        rejected: Counter[str] = Counter()
        for connector in connectors:
            rejected.update(connector["rejected"])

        figures: dict[str, Any] = {
            "dropped": dict(self._accounting.dropped),
            "lost": dict(self._accounting.lost),
            "rejected": dict(rejected),
        }
        if connectors:
            figures["received"] = {
                name: sum(connector[name] for connector in connectors) for name in RECEIVED
            }
        services = [connector for connector in self._newest_connectors() if "games" in connector]
        if services:
            figures["games"] = sum(service["games"] for service in services)
            figures["seats_held"] = sum(service["held"] for service in services)
        return figures

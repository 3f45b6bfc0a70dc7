"""The connector: a process that receives from actors over ZeroMQ for one learner.

It attaches to the learner's memory like an actor, with a lane whose slots it grants to the actors
of other hosts. Its work is in `transport.zmq.receiver`; here are its start and end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from penstock import __version__
from penstock.configs.policy_lag import lent_by_batch
from penstock.configs.schema import Config
from penstock.core import descriptors
from penstock.core.interfaces import SlotProcessor, Welcome
from penstock.core.memory import TRIM_S, give_back_memory, keep_freed_memory
from penstock.core.role import EXIT_REJOIN, RoleContext, learner_socket
from penstock.profiling.status import Phase
from penstock.transport.addresses import check_bind, connector_addresses, run_bind
from penstock.transport.shm.link import attach_lane
from penstock.transport.wire import describe_other_version
from penstock.transport.zmq.listener import turned_away_note
from penstock.transport.zmq.receiver import TICK_S, ActorShare, Receiver

# The most ended streams in a report: so many fit one message to the supervisor.
STREAMS_PER_REPORT = 1000
# The length to which the latest message of a reason is cut in an event.
LAST_CHARACTERS = 200


def run(ctx: RoleContext, prepare: Callable[[Welcome], SlotProcessor] | None = None) -> None:
    """Receive until asked to stop: the main function of a connector.

    Exits with EXIT_REJOIN when the learner is gone.

    Args:
        ctx: of this role.
        prepare: makes, from the learner's description, the function that checks and changes a
            received slot's columns in place before the learner sees them.
    """
    assert ctx.config is not None
    assert ctx.address is not None
    keep_freed_memory()
    descriptors.raise_limit()  # each actor takes a descriptor

    transport = ctx.config.transport
    curve = ctx.curve or (Path(transport.curve) if transport.curve else None)
    check_bind(ctx.address, keys=curve is not None, insecure=transport.insecure)
    link = attach_lane(ctx)
    if link is None:
        return

    receiver = Receiver(
        link,
        ctx.address,
        learner_socket(ctx.runtime_dir, ctx.learner),
        share=_share(ctx, ctx.config),
        curve=curve,
        dtype=ctx.config.weights.dtype,
        silence_s=ctx.config.run.hang_timeout_s,
        process=prepare(link.welcome) if prepare else None,
        ledger=ctx.ledger,
        by_batch=lent_by_batch(ctx.config),
    )
    try:
        _serve(ctx, receiver, ctx.config.run.interval_s, ctx.config.run.grace_s)
    finally:
        receiver.close()
        link.close()
    if not ctx.stopping():
        raise SystemExit(EXIT_REJOIN)


def _share(ctx: RoleContext, config: Config) -> ActorShare:
    """Return which actors this connector receives from."""
    addresses = connector_addresses(
        config, run_bind(config.transport, ctx.runtime_dir), ctx.learner
    )
    # Connectors are counted over all learners.
    index = ctx.index - ctx.learner * len(addresses)
    return ActorShare(addresses, index, learners=config.learner.most_count)


def _serve(ctx: RoleContext, receiver: Receiver, interval_s: float, grace_s: float) -> None:
    """Receive until asked to stop or the learner is gone, then end within ``grace_s`` seconds.

    Counters and refusals are reported every ``interval_s`` seconds.
    """
    ctx.report("ready")
    ctx.status.phase = Phase.RECEIVING
    refusals = Refusals(ctx, receiver)
    next_report_s = time.monotonic() + interval_s
    next_trim_s = time.monotonic() + TRIM_S

    while not ctx.stopping() and not receiver.learner_gone():
        ctx.status.beat()
        receiver.turn(TICK_S)
        if time.monotonic() >= next_report_s:
            next_report_s += interval_s
            _report(ctx, receiver)
            refusals.report()
        if time.monotonic() >= next_trim_s:
            next_trim_s += TRIM_S
            give_back_memory()

    # Receive the messages on their way, and report all streams as ended.
    ctx.status.phase = Phase.STOPPING
    run_is_over = any(message["kind"] == "over" for message in ctx.messages())
    receiver.drain(grace_s / 2, ctx.status.beat, over=run_is_over)
    receiver.grants.end_all()
    refusals.report()
    deadline_s = time.monotonic() + grace_s / 4
    while not _report(ctx, receiver) and time.monotonic() < deadline_s:
        time.sleep(0.01)


class Refusals:
    """Reports what a receiver has refused since the last report, as events.

    What cannot be sent to the supervisor now is part of the next report.
    """

    def __init__(self, ctx: RoleContext, receiver: Receiver) -> None:
        self._ctx = ctx
        self._receiver = receiver
        # What was reported already.
        self._rejected: Counter[str] = Counter()  # messages by reason
        self._releases: set[str] = set()
        self._turned_away = 0  # connections

    def report(self) -> None:
        """Report messages, releases and connections, until the supervisor takes no more events."""
        if self._report_messages() and self._report_releases():
            self._report_connections()

    def _report_messages(self) -> bool:
        """Send an event for each reason of refused messages; return whether all were sent."""
        receiver = self._receiver
        unreported = receiver.rejected - self._rejected
        for reason, count in unreported.items():
            last = receiver.last_rejected.get(reason, "")[:LAST_CHARACTERS]
            text = f"{self._ctx.name} refused messages: {reason}"
            if reason == "version" and last:
                text = describe_other_version("a peer", last, "the learner")
            if not self._ctx.event("rejected", text, reason=reason, count=count, last=last):
                return False
            self._rejected[reason] += count
        return True

    def _report_releases(self) -> bool:
        """Send an event, once, for each other release of an actor; return whether all were sent."""
        for release in sorted(self._receiver.other_releases - self._releases):
            text = (
                f"an actor has Penstock {release}, and the learner {__version__}; if it cannot "
                "play, use the same release on both sides"
            )
            if not self._ctx.event("note", text, release=release):
                return False
            self._releases.add(release)
        return True

    def _report_connections(self) -> None:
        """Send an event with the number of connections that were turned away."""
        turned_away = self._receiver.turned_away
        count = turned_away - self._turned_away
        if count > 0:
            text = turned_away_note(self._ctx.name)
            if self._ctx.event("refused", text, reason="descriptors", count=count):
                self._turned_away = turned_away


def _report(ctx: RoleContext, receiver: Receiver) -> bool:
    """Report the counters and the ended streams; return whether all streams were reported."""
    ended = receiver.grants.ended
    streams = [stream.final_counters() for stream in islice(ended, STREAMS_PER_REPORT)]
    reported = ctx.report(
        "connector",
        index=ctx.index,
        incarnation=ctx.incarnation,
        **receiver.figures(),
        streams=streams,
    )

    if reported:
        for _ in streams:
            ended.popleft()
    return reported and not ended

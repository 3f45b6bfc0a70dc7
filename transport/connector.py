"""The connector: a process that receives from actors over ZeroMQ for one learner.

It attaches to the learner's memory like an actor does, with a lane whose slots it grants on to the
actors of other hosts. What it does there is `transport.receiver`; here are its start and end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from penstock.core.memory import keep_freed_memory
from penstock.core.role import EXIT_REJOIN, RoleContext, learner_socket
from penstock.profiling.status import Phase
from penstock.transport.base import LearnerGoneError, Welcome
from penstock.transport.receiver import TICK_S, Process, Receiver
from penstock.transport.shm.link import ShmLink
from penstock.transport.sockets import check_bind

STREAMS_PER_REPORT = 1000  # what fits a message to the supervisor


def run(ctx: RoleContext, prepare: Callable[[Welcome], Process] | None = None) -> None:
    """Receive until told to stop; exits with EXIT_REJOIN when the learner is gone.

    ``prepare`` makes, from what the learner says of itself, the function that checks and changes
    a received slot's columns in place before the learner sees them.
    """
    assert ctx.config is not None
    assert ctx.address is not None
    keep_freed_memory()
    transport = ctx.config.transport
    curve = ctx.curve or (Path(transport.curve) if transport.curve else None)
    check_bind(ctx.address, keys=curve is not None, insecure=transport.insecure)
    path = learner_socket(ctx.runtime_dir, ctx.learner)
    link = _attach(ctx, path)
    if link is None:
        return
    receiver = Receiver(
        link,
        ctx.address,
        path,
        curve=curve,
        dtype=ctx.config.weights.dtype,
        silence_s=ctx.config.run.hang_timeout_s,
        process=prepare(link.welcome) if prepare else None,
        ledger=ctx.ledger,
    )
    try:
        _serve(ctx, receiver, ctx.config.run.interval_s, ctx.config.run.grace_s)
    finally:
        receiver.close()
        link.close()
    if not ctx.stopping():
        raise SystemExit(EXIT_REJOIN)


def _attach(ctx: RoleContext, path: Path) -> ShmLink | None:
    """A lane at the learner, as soon as it listens; None when told to stop before."""
    while not ctx.stopping():
        ctx.status.beat()
        try:
            return ShmLink(path, None, want=0, lane=True)
        except (OSError, LearnerGoneError):
            time.sleep(0.05)
    return None


def _serve(ctx: RoleContext, receiver: Receiver, interval_s: float, grace_s: float) -> None:
    """Work until told to stop or the learner is gone, then take in what is on its way."""
    ctx.report("ready")
    ctx.status.phase = Phase.RECEIVING
    report_at = time.monotonic() + interval_s
    while not ctx.stopping() and not receiver.learner_gone():
        ctx.status.beat()
        receiver.turn(TICK_S)
        if time.monotonic() >= report_at:
            report_at += interval_s
            _report(ctx, receiver)
    ctx.status.phase = Phase.STOPPING
    receiver.drain(grace_s / 2, ctx.status.beat)
    receiver.grants.end_all()
    deadline_s = time.monotonic() + grace_s / 4
    while not _report(ctx, receiver) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _report(ctx: RoleContext, receiver: Receiver) -> bool:
    """Tell the counters, and the streams that have ended; whether all of them are told."""
    ended = receiver.grants.ended
    streams = [stream.end() for stream in ended[:STREAMS_PER_REPORT]]
    told = ctx.report(
        "connector", incarnation=ctx.incarnation, **receiver.figures(), streams=streams
    )
    if told:
        del ended[: len(streams)]
    return told and not ended

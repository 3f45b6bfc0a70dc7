"""The relay: one process per actor host that brings the learner's weights to all its actors.

It asks for weights, one version at a time, and shows them on a board in shared memory; so a hundred
actors of a host cost the learner's link one copy, and reading weights costs them no message.
"""

from __future__ import annotations

import time

from penstock.core.interfaces import LearnerGoneError
from penstock.core.params import Stamp
from penstock.core.role import EXIT_REJOIN, RoleContext, relay_socket
from penstock.profiling.ledger import Part
from penstock.profiling.status import Phase
from penstock.transport.shm.host import ShmHost
from penstock.transport.shm.weights_board import WeightsBoard
from penstock.transport.zmq.client import Client

TICK_S = 0.05
MAX_NBYTES_PER_S = 32e6  # of weights: what a host may take of the learner's link and processor


def run(ctx: RoleContext) -> None:
    """Serve weights at `relay_socket` until told to stop.

    Exits with EXIT_REJOIN when the learner is gone or was replaced.
    """
    assert ctx.address is not None
    patience_s = ctx.config.run.hang_timeout_s if ctx.config else 60.0
    client = Client(ctx, ctx.address, patience_s=patience_s)
    try:
        client.join()
        _serve(ctx, client)
    except LearnerGoneError:
        if not ctx.stopping():
            raise SystemExit(EXIT_REJOIN) from None
    finally:
        client.close()


def _serve(ctx: RoleContext, client: Client) -> None:
    board = WeightsBoard.create(client.welcome.layout.size)
    host = ShmHost(relay_socket(ctx.runtime_dir, ctx.learner), client.welcome, board)
    host.watch(client.socket.FD, lambda: None)
    ctx.report("ready")
    ctx.status.phase = Phase.RECEIVING
    ledger = ctx.ledger
    have: Stamp | None = None
    ask_at = 0.0
    try:
        while not ctx.stopping():
            ledger.switch(Part.RECEIVE)
            if time.monotonic() >= ask_at:
                client.ask_weights(have)
            client.pump(0)  # before waiting: the descriptor tells of new events only
            fresh = client.take_weights()
            if fresh is not None:
                have, values = fresh
                ledger.switch(Part.PUBLISH)
                board.publish(values, have)
                ledger.switch(Part.RECEIVE)
                ask_at = time.monotonic() + values.nbytes / MAX_NBYTES_PER_S
                continue
            ledger.switch(Part.WAIT)
            host.poll(max(0.001, min(TICK_S, ask_at - time.monotonic())) if have else TICK_S)
    finally:
        ctx.status.phase = Phase.STOPPING
        host.close()
        board.close()

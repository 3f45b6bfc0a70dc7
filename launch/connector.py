"""The connector with the run's algorithm in it: rooms below this one do not know each other."""

from __future__ import annotations

from functools import partial

from penstock import algos
from penstock.core.role import RoleContext
from penstock.transport.link import Welcome
from penstock.transport.zmq import connector
from penstock.transport.zmq.receiver import Process


def run(ctx: RoleContext) -> None:
    """`penstock.transport.zmq.connector.run`, checking and preparing each slot that comes in."""
    config = ctx.config
    assert config is not None

    def prepare(welcome: Welcome) -> Process:
        return partial(algos.receive, config.algo, welcome.layout)

    connector.run(ctx, prepare)

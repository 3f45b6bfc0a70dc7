"""The connector with the run's algorithm in it: rooms below this one do not know each other."""

from __future__ import annotations

from functools import partial

from penstock import algos
from penstock.core.role import RoleContext
from penstock.transport import connector


def run(ctx: RoleContext) -> None:
    """`penstock.transport.connector.run`, preparing each slot that comes in for training."""
    assert ctx.config is not None
    connector.run(ctx, partial(algos.process, ctx.config.algo))

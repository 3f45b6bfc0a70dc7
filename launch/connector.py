"""The connector with the run's algorithm in it: rooms below this one do not know each other."""

from __future__ import annotations

from penstock.algos.samples import make_receive
from penstock.core.interfaces import SlotProcessor, Welcome
from penstock.core.role import RoleContext
from penstock.transport.registry import TRANSPORTS, connector_of


def run(ctx: RoleContext) -> None:
    """The connector of the run's transport, checking and preparing each slot that comes in."""
    config = ctx.config
    assert config is not None

    def prepare(welcome: Welcome) -> SlotProcessor:
        return make_receive(config.algo, welcome.layout)

    connector_of(TRANSPORTS.elsewhere(config.transport.kind))(ctx, prepare)

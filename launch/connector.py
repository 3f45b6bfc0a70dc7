"""The connector's main function, which gives it the run's algorithm."""

from __future__ import annotations

from penstock.algos.samples import make_receive
from penstock.core.interfaces import SlotProcessor, Welcome
from penstock.core.role import RoleContext
from penstock.transport.registry import TRANSPORTS, connector_of


def run(ctx: RoleContext) -> None:
    """Run the connector of the run's transport; it checks and prepares each received slot."""
    config = ctx.config
    assert config is not None

    def prepare(welcome: Welcome) -> SlotProcessor:
        return make_receive(config.algo, welcome.layout)

    connector_of(TRANSPORTS.elsewhere(config.transport.kind))(ctx, prepare)

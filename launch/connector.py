"""The connector's main function, which gives it the run's algorithm."""

from __future__ import annotations

import sys

from penstock.algos.samples import make_receive
from penstock.core.interfaces import SlotProcessor, Welcome
from penstock.core.role import RoleContext
from penstock.envs import EnvInfo
from penstock.envs.space_json import from_json
from penstock.transport.registry import TRANSPORTS, connector_of


def run(ctx: RoleContext) -> None:
    """Run the connector of the run's transport, until the role is stopped.

    The connector checks each received slot and prepares it by the run's algorithm.
    """
    config = ctx.config
    assert config is not None

    def prepare(welcome: Welcome) -> SlotProcessor:
        """Make what processes slots, by the spaces in the learner's welcome."""
        assert welcome.spaces is not None, "the learner is of this release"
        # The learner's own spaces may be of any size.
        observations, actions = (from_json(space, sys.maxsize) for space in welcome.spaces)
        env = config.env
        own_spaces = observations, actions
        info = EnvInfo.of_spaces(env.id, own_spaces, 1, "of the learner", env.embed_above)
        return make_receive(config.algo, info)

    run_connector = connector_of(TRANSPORTS.other_hosts_spec(config.transport.kind))
    run_connector(ctx, prepare)

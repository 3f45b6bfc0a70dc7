"""Actors that play nothing: they write made-up unrolls into their slots, as fast as these are lent.

In a run they stand in the place of actors (their specs name `run`), where a game and a policy on
the host's cores could not feed the learner that is measured.
"""

from __future__ import annotations

import time

import numpy as np

from penstock.actors.join import find_learner, join_learner
from penstock.algos.samples import slot_spec
from penstock.bench.ceiling import Array, made_up
from penstock.core.interfaces import Link
from penstock.core.params import Stamp
from penstock.core.role import RoleContext
from penstock.envs import probe
from penstock.profiling.ledger import Part
from penstock.profiling.status import Phase

GRANT_S = 0.5


def run(ctx: RoleContext) -> None:
    """The main function of the role."""
    found = find_learner(ctx)
    info = probe(found.config.env)
    spec = slot_spec(found.config, info)
    link = join_learner(ctx, found, spec, ctx.index)
    if link is None:
        return
    ctx.report("ready")
    ctx.status.begin_stream(ctx.incarnation, 0)
    columns = made_up(spec, spec.zeros(), info)
    weights = np.empty(link.welcome.layout.size, np.float32)
    stamp: Stamp | None = None
    while not ctx.leaving():
        ctx.status.beat()
        ctx.ledger.switch(Part.WAIT)
        ctx.status.phase = Phase.WAITING
        stamp = link.read_weights(weights, stamp) or stamp
        if stamp is not None:
            _write(ctx, link, columns, stamp)
    link.close()


def _write(ctx: RoleContext, link: Link, columns: dict[str, Array], stamp: Stamp) -> None:
    """Fill one slot, if one is lent in time."""
    status, began_s = ctx.status, time.monotonic()
    with link.slot(GRANT_S) as slot:
        if slot is None:
            return
        ctx.ledger.switch(Part.WRITE)
        status.phase = Phase.ENVIRONMENT
        for name, values in columns.items():
            np.copyto(slot.columns[name], values)
        slot.columns["policy_version"][...] = stamp.version
        steps = int(columns["alive"].size)
        header = slot.header
        header["actor"], header["incarnation"] = ctx.index, ctx.incarnation
        header["generation"], header["version"] = stamp
        header["sequence"], header["steps"] = status.sequence, steps
        header["produced_steps"] = status.produced_steps + steps
        header["started_s"], header["published_s"] = began_s, time.monotonic()
    status.sequence += 1
    status.produced_steps += steps
    status.played_steps += steps

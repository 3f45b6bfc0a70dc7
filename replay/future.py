"""Rows that come later in the same episodes, for relabelling with hindsight: the "future" strategy
of Andrychowicz et al. 2017, arXiv 1707.01495, section 4.5."""

from __future__ import annotations

import numpy as np

from penstock.replay.nstep import Rows, continues, ended, take
from penstock.replay.sequence_gather import follow
from penstock.replay.table import NONE, Table


def draw_future(table: Table, rows: Rows, horizon: int, rng: np.random.Generator) -> Rows:
    """For each of ``rows`` [B] one drawn evenly among itself and the rows that follow it in its
    episode, as far as they are stored, at most ``horizon`` in all."""
    ahead = follow(table, rows, horizon)
    flat = take(table.records, ahead.reshape(-1))
    goes_on = ~ended(flat).reshape(ahead.shape)[:-1]
    goes_on &= (continues(flat).reshape(ahead.shape) & (ahead != NONE))[1:]
    np.logical_and.accumulate(goes_on, axis=0, out=goes_on)
    counts = 1 + goes_on.sum(axis=0)
    chosen = (rng.random(len(rows)) * counts).astype(np.int64)
    found: Rows = ahead[chosen, np.arange(len(rows))]
    return found

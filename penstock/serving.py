"""Moved: `penstock.replay.remote` has the client and server of a replay buffer. Gone after 0.1."""

import warnings

from penstock.replay.remote import ReplayClient, ReplayServer

__all__ = ["ReplayClient", "ReplayServer"]

warnings.warn("import penstock.replay.remote, not penstock.serving", DeprecationWarning, 2)

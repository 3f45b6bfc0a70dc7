"""A replay buffer served over the network: the server and its client."""

from penstock.replay.remote.client import ReplayClient
from penstock.replay.remote.server import ReplayServer

__all__ = ["ReplayClient", "ReplayServer"]

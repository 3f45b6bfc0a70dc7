"""A replay buffer for processes of other hosts: its server and its client."""

from penstock.serving.client import ReplayClient
from penstock.serving.server import ReplayServer

__all__ = ["ReplayClient", "ReplayServer"]

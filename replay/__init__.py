"""Replay buffers and queues that a learner samples from; imports neither torch nor zmq."""

from penstock.replay.accounting import Accounting
from penstock.replay.batch import Batch, unstack
from penstock.replay.buffer import Replay
from penstock.replay.errors import ReplayError
from penstock.replay.limiter import RateLimiter
from penstock.replay.queue import SlotQueue, TrajectoryQueue
from penstock.replay.samplers import Constant, Linear, Prioritized, Sampler, Uniform
from penstock.replay.sequences import Sequences
from penstock.replay.writer import Writer

__all__ = [
    "Accounting",
    "Batch",
    "Constant",
    "Linear",
    "Prioritized",
    "RateLimiter",
    "Replay",
    "ReplayError",
    "Sampler",
    "Sequences",
    "SlotQueue",
    "TrajectoryQueue",
    "Uniform",
    "Writer",
    "unstack",
]

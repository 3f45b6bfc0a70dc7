"""What a learner draws samples from; imports neither torch nor zmq."""

from penstock.replay.accounting import Accounting
from penstock.replay.queue import TrajectoryQueue

__all__ = ["Accounting", "TrajectoryQueue"]

"""The device that a learner trains on: the one seam for streams, events and pinned memory."""

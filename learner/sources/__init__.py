"""Data sources of a learner: queues of fresh unrolls, replay, prefetching, staging."""

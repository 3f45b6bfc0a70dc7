"""Where batches come from: queues of fresh unrolls, replay, prefetching, staging."""

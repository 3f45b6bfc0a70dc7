"""The learner: takes prefetched batches, updates the network, publishes its weights."""

"""Transports of slots and weights: in one process, through shared memory, or over ZeroMQ."""

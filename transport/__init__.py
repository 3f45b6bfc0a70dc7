"""How slots and weights travel: in one process, through shared memory, or over ZeroMQ."""

"""A learner of a benchmark: ``python -m penstock.bench.worker CONTROL_FD``.

Its first message says which learner of how many it is; each further one is a job, answered by one
message. It ends with its parent.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from datetime import timedelta

from penstock.core.control import Channel, Message
from penstock.core.memory import keep_freed_memory
from penstock.core.processes import die_with

TIMEOUT = timedelta(seconds=60)


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    start = _next(channel)
    die_with(start["parent_pid"], signal.SIGKILL)
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = start["interface"]
    import torch
    import torch.distributed as dist

    from penstock.bench.measure import Measure
    from penstock.learner.codecs.collective import GroupCollective

    torch.set_num_threads(1)
    rank, world = start["rank"], start["world"]
    meeting = "file://" + start["store"]
    dist.init_process_group("gloo", meeting, rank=rank, world_size=world, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    ring = GroupCollective(dist.group.WORLD)
    measure = Measure(ring, start["parameters"], start["interface"])
    while True:
        message = _next(channel)
        job = getattr(measure, message.pop("job"))
        channel.send(job(**message), patience_s=5.0)


def _next(channel: Channel) -> Message:
    while not channel.closed:
        select.select([channel], [], [])
        for message in channel.receive(most=1):
            return message
    os._exit(0)  # the parent has ended


if __name__ == "__main__":
    main()

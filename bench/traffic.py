"""Messages from another process over ZeroMQ, by the sockets of the real wire and nothing else.

    ``python -m penstock.bench.traffic ADDRESS PARENT_PID NBYTES...``

is the sender. Each of its messages has one part for each NBYTES, of that size. At most `WINDOW`
messages are on their way, as the grants of a learner would have it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import zmq

from penstock.core.processes import die_with, python
from penstock.transport.zmq.sockets import dealer, receive, router

WINDOW = 4  # messages on their way
WAIT_MS = 30_000  # longest wait for a message


@contextlib.contextmanager
def receiving(sizes: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Start a sender of messages whose parts have these ``sizes``, in bytes.

    Yields a call that receives one message. It raises RuntimeError if none comes.
    """
    context = zmq.Context()
    # Only this user can look into the folder of the socket.
    with tempfile.TemporaryDirectory(prefix="wire-") as folder:
        address = f"ipc://{folder}/traffic"
        socket = router(context, address, None, max(sizes) + 1)
        command = python("penstock.bench.traffic", address, os.getpid(), *sizes)
        sender = subprocess.Popen(command, stdin=subprocess.DEVNULL)

        def receive_one() -> None:
            while (parts := receive(socket)) is None:
                if not socket.poll(WAIT_MS):
                    raise RuntimeError("nothing came over ZeroMQ; did its sender start?")
            # The first part is the sender's identity; the empty answer asks for a further message.
            socket.send_multipart([bytes(parts[0]), b""])

        try:
            yield receive_one
        finally:
            sender.kill()
            sender.wait()
            context.destroy(0)


def main() -> None:
    """Send messages without end, one for each answer, in a process of its own."""
    address, parent_pid, *sizes = sys.argv[1:]
    die_with(int(parent_pid), signal.SIGKILL)

    socket = dealer(zmq.Context(), address, None)
    message = [bytes(int(nbytes)) for nbytes in sizes]
    for _ in range(WINDOW):
        socket.send_multipart(message, copy=False)
    while True:
        socket.recv()
        socket.send_multipart(message, copy=False)


if __name__ == "__main__":
    main()

"""Order server: carries out what a command asks of a live run, such as `penstock save RUN`.

A client connects to the Unix socket `orders.sock` beside the status server's and sends one JSON
object with an "order"; it receives one JSON object once that is carried out or has failed:

    save     write a checkpoint now -> the message of the checkpoint, or {"error": ...}
    stacks   have the processes named in "roles" write their stacks, which arrive in the run's logs
             -> {} at once
    timeline write what the threads did in the last minute into the run's folder
             -> {} once it is written, or {"error": ...}

Only programs of this user can reach the socket, as its folder is private. The number of clients,
the size of an order and the time until it must arrive are limited, and nothing here blocks the
supervisor's loop.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.core.control import Channel, Message
from penstock.monitor.order_client import ORDERS_SOCKET, SAVE, STACKS, TIMELINE

CLIENTS = 8  # at a time; others wait until these are served
ORDER_S = 5.0  # for a client to send its order


class Fresh(NamedTuple):
    """A client whose order has not arrived yet, and when it is closed without one."""

    client: Channel
    ends_s: float


class OrderServer:
    """Takes orders while the ``with`` block runs. Call `orders` in every turn of the loop."""

    def __init__(self, runtime_dir: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self.path = runtime_dir / ORDERS_SOCKET
        self._fresh: list[Fresh] = []
        self._savers: list[Channel] = []
        self._watchers: list[Channel] = []  # that wait for a timeline

    def __enter__(self) -> OrderServer:
        self._listener.bind(str(self.path))
        self._listener.listen(CLIENTS)
        return self

    def __exit__(self, *_: object) -> None:
        self.saved({"error": "the run has ended, and a run saves at its end"})
        for fresh in self._fresh:
            fresh.client.close()
        self._listener.close()
        with suppress(OSError):
            self.path.unlink()

    def orders(self) -> list[Message]:
        """The orders that have arrived since the last call.

        A client that ordered `SAVE` waits for `saved`, and one that ordered `TIMELINE` for
        `recorded`, which must be called before the next call.
        """
        now_s = time.monotonic()
        with suppress(OSError):
            while len(self._fresh) + len(self._savers) < CLIENTS:
                connection = self._listener.accept()[0]
                self._fresh.append(Fresh(Channel(connection), now_s + ORDER_S))
        found: list[Message] = []
        waiting: list[Fresh] = []
        for client, ends_s in self._fresh:
            messages = client.receive(most=1)
            if messages and self._takes(client, messages[0]):
                found += messages
            elif not messages and not client.closed and now_s < ends_s:
                waiting.append(Fresh(client, ends_s))
            elif not messages:
                client.close()
        self._fresh = waiting
        self._savers = [client for client in self._savers if not _has_left(client)]
        return found

    def saved(self, answer: Message) -> None:
        """A checkpoint was written, or could not be."""
        savers, self._savers = self._savers, []
        for client in savers:
            _reply(client, answer)

    def recorded(self, answer: Message) -> None:
        """A timeline was written, or could not be."""
        watchers, self._watchers = self._watchers, []
        for client in watchers:
            _reply(client, answer)

    def _takes(self, client: Channel, message: Message) -> bool:
        """Whether the order is carried out. Replies, unless that takes time."""
        order, roles = message.get("order"), message.get("roles")
        if order == SAVE:
            self._savers.append(client)
            return True
        if order == TIMELINE:
            self._watchers.append(client)
            return True
        if order == STACKS and isinstance(roles, list) and all(isinstance(r, str) for r in roles):
            _reply(client, {})
            return True
        error = f"the order {order!r:.40} is unknown to this run's release of Penstock"
        _reply(client, {"error": error})
        return False


def _reply(client: Channel, answer: Message) -> None:
    client.send(answer)
    client.close()


def _has_left(client: Channel) -> bool:
    client.receive(most=1)
    if client.closed:
        client.close()
    return client.closed

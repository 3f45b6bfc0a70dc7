"""A TCP proxy that delays, stands still or cuts what goes through it: a network's faults without a
network.

Modes: "pass"; "flip", one bit of each chunk is changed; "delay", each chunk is ``delay_s`` later;
"hold", connections stay open and nothing goes through, as when the other host has lost its power;
"cut", they are closed, new ones too.
"""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress

CHUNK = 1 << 16
POLL_S = 0.01


class Proxy:
    """Listens at ``port`` of 127.0.0.1 for what is to reach ``target`` there; set `mode`."""

    def __init__(self, target: int) -> None:
        self.mode = "pass"
        self.delay_s = 0.2
        self.rng = random.Random(0)
        self.port = 0
        self._target = target
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, "127.0.0.1", 0)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # which asyncio would print as an error
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while self.mode == "hold":  # the handshake was the kernel's; nothing answers
            await asyncio.sleep(POLL_S)
        if self.mode == "cut":
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)
        sender = self._loop.create_task(self._send(due, writer))
        try:
            while self.mode != "cut":
                if self.mode == "hold":
                    await asyncio.sleep(POLL_S)
                    continue
                try:
                    data = await asyncio.wait_for(reader.read(CHUNK), 0.1)
                except TimeoutError:
                    continue
                if self.mode == "flip" and data:
                    data = self._flipped(data)
                delay_s = self.delay_s if self.mode == "delay" else 0.0
                await due.put((self._loop.time() + delay_s, data))
                if not data:
                    await sender
                    break
        except OSError:
            pass
        finally:
            sender.cancel()
            writer.transport.abort()

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    async def _send(
        self, due: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while True:
                at_s, data = await due.get()
                await asyncio.sleep(max(0.0, at_s - self._loop.time()))
                while self.mode == "hold":
                    await asyncio.sleep(POLL_S)
                if not data:
                    return
                writer.write(data)
                await writer.drain()

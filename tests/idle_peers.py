"""Connections that never speak, and what a process does about them."""

from __future__ import annotations

import os
import select
import socket
from pathlib import Path


def connecting(port: int) -> socket.socket:
    """Connects to a port of this host, now or as soon as the connection is accepted."""
    made = socket.socket()
    made.setblocking(False)
    made.connect_ex(("127.0.0.1", port))
    select.select([], [made], [], 0.01)
    return made


def processor_s(pid: int) -> float:
    """Returns the processor time that a process has taken, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""Asks a live run to do something now: `penstock save RUN`.

The orders and their replies are described in `penstock.launch.order_server`.
"""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.monitor.status_client import reach

ORDERS_SOCKET = "orders.sock"
SAVE, STACKS, TIMELINE = "save", "stacks", "timeline"
REPLY_NBYTES = 1 << 18


def save(run: str, timeout_s: float) -> dict[str, Any]:
    """Have a live run write a checkpoint now, and wait for it.

    Returns: its folder, with the steps and the return of the run at that time.

    Raises UserError if the run is not live, or if nothing was saved within the time.
    """
    if not 0 < timeout_s < math.inf:
        raise UserError(f"--timeout is {timeout_s:g}; it must be a number above 0, such as 60")
    reached = reach(run)
    try:
        reply = give_order(reached.runtime_dir, SAVE, timeout_s)
    except TimeoutError:
        raise UserError(
            f"{run} wrote no checkpoint within {timeout_s:g} s; `penstock status {run}` shows what "
            "its learner does, and a larger --timeout waits longer"
        ) from None
    if "error" in reply or "folder" not in reply:
        why = reply.get("error", "the run has ended")
        raise UserError(f"{run} was not saved: {why}")
    return reply


def give_order(runtime_dir: Path, order: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
    """Send an order with its ``fields`` to the supervisor that has that folder, and wait for the
    reply.

    Raises TimeoutError without a reply in time, UserError where the run takes no orders.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(runtime_dir / ORDERS_SOCKET))
            connection.send(json.dumps({"order": order, **fields}).encode())
            reply = json.loads(connection.recv(REPLY_NBYTES) or b"{}")
    except TimeoutError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"the run takes no orders ({error}): it has just ended, or was started by an older "
            "release of Penstock"
        ) from error
    return reply if isinstance(reply, dict) else {}

"""Asks the supervisor of a live run for the status of its processes, or to do something now.

The requests and their replies are described in `penstock.launch.supervisor_server`.
"""

from __future__ import annotations

import json
import math
import os
import pwd
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.files import read_regular
from penstock.core.processes import began_ticks
from penstock.core.run_dir import SUPERVISOR_FILE, in_use
from penstock.monitor.run_folder.files import read_json
from penstock.monitor.run_folder.record import SUMMARY

Report = dict[str, Any]

STATUS = "status"
# The orders, which are requests for something else than the status.
SAVE = "save"
STACKS = "stacks"
TIMELINE = "timeline"
TIMEOUT_S = 5.0
# A longer reply is not read.
REPLY_NBYTES = 1 << 26


@dataclass(frozen=True)
class Reached:
    """A live supervisor."""

    pid: int
    """Its pid, in the namespace of this process."""
    report: Report | None
    """Its reply; None if it is too busy or hangs."""


def reach(run: str) -> Reached:
    """Asks the supervisor of a run for its status.

    Args:
        run: the folder of the run.

    Raises:
        UserError: if the run is not live.
    """
    return _ask(run, {"request": STATUS}, TIMEOUT_S)


def save(run: str, timeout_s: float) -> dict[str, Any]:
    """Has a live run write a checkpoint now, and waits for it.

    Args:
        run: the folder of the run.
        timeout_s: seconds to wait.

    Returns:
        The folder of the checkpoint, with the steps and the return of the run at that time.

    Raises:
        UserError: if the run is not live, or if nothing was saved within the time.
    """
    if not 0 < timeout_s < math.inf:
        raise UserError(f"--timeout is {timeout_s:g}; it must be a number above 0, such as 60")

    try:
        reply = give_order(run, SAVE, timeout_s)
    except TimeoutError:
        raise UserError(
            f"{run} wrote no checkpoint within {timeout_s:g} s; `penstock status {run}` shows what "
            "its learner does, and a larger --timeout waits longer"
        ) from None

    if "error" in reply or "folder" not in reply:
        why = reply.get("error", "it was started by an older release of Penstock")
        raise UserError(f"{run} was not saved: {why}")
    return reply


def give_order(run: str, order: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
    """Sends an order to the supervisor of a run, and returns its reply.

    Args:
        run: the folder of the run.
        order: `SAVE`, `STACKS` or `TIMELINE`.
        timeout_s: seconds to wait for the reply.
        fields: further fields of the request.

    Raises:
        TimeoutError: without a reply in time.
        UserError: if the run is not live.
    """
    supervisor = _ask(run, {"request": order, **fields}, timeout_s)
    if supervisor.report is None:
        raise TimeoutError(f"the supervisor of {run} did not reply within {timeout_s:g} s")
    return supervisor.report


def _ask(run: str, request: Report, timeout_s: float) -> Reached:
    """Sends a request to the supervisor of a run, and waits for its reply.

    Args:
        run: the folder of the run.
        request: the object that is sent.
        timeout_s: seconds to wait; without a reply by then, ``report`` of the result is None.

    Raises:
        UserError: if the run is not live, or is that of another user.
    """
    folder = Path(run)
    supervisor = _read_supervisor_file(folder)
    pid = supervisor["pid"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(supervisor["socket"])
        except PermissionError as error:
            raise _not_ours(folder) from error
        except (TimeoutError, BlockingIOError) as error:  # the latter if many clients are connected
            # In another container its pid is, here, that of another process.
            if not _lives(supervisor):
                raise UserError(
                    f"the supervisor of {run} is busy, and runs in another container; run this "
                    "command in the container of the run"
                ) from error
            return Reached(pid, None)
        except OSError as error:
            # It may have ended just now, and another has begun.
            if _read_supervisor_file(folder) != supervisor:
                return _ask(run, request, timeout_s)
            if _lives(supervisor):
                raise UserError(
                    f"the supervisor of {run} (pid {pid}) runs, but its socket "
                    f"{supervisor['socket']} was deleted; end the run with: kill {pid}"
                ) from error
            raise UserError(
                f"the supervisor of {run} (pid {pid}) has died without ending the run, and its "
                "processes end with it; resume the run with --resume auto"
            ) from error

        # A folder of another user can name any socket, so the peer is asked who it is. Its pid is
        # that in the namespace of this process, which the file may not know.
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        peer_pid, peer_uid, _ = struct.unpack("3i", credentials)
        if os.geteuid() not in (0, peer_uid):
            raise _not_ours(folder)
        return Reached(peer_pid, _reply(connection, request, timeout_s, run=run))


def _reply(
    connection: socket.socket, request: Report, timeout_s: float, *, run: str
) -> Report | None:
    """Sends a request, and returns the complete reply; None if it takes too long or cannot be read.

    Args:
        connection: to the supervisor.
        request: the object that is sent.
        timeout_s: seconds to wait.
        run: the folder of the run, for errors.

    Raises:
        UserError: if the run ends meanwhile.
    """
    data = bytearray()
    deadline_s = time.monotonic() + timeout_s
    try:
        connection.sendall(json.dumps(request).encode() + b"\n")
        while chunk := connection.recv(1 << 16):
            data += chunk
            if len(data) > REPLY_NBYTES or time.monotonic() > deadline_s:
                return None
    except TimeoutError:
        return None
    except OSError as error:
        raise UserError(f"the run in {run} has just ended ({error.strerror})") from error
    if not data:
        raise UserError(f"the run in {run} has just ended, without a reply")

    try:
        reply: Report = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) else None


def _lives(supervisor: Report) -> bool:
    """Whether the pid in `supervisor.json` still belongs to the supervisor."""
    return bool(began_ticks(supervisor["pid"]) == supervisor["began"])


def _read_supervisor_file(folder: Path) -> Report:
    """Reads `supervisor.json`, which names the socket and the process of a live supervisor.

    Raises:
        UserError: if it names no live run of this host.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a run")

    try:
        supervisor: Report = json.loads(read_regular(folder / SUPERVISOR_FILE))
        host = supervisor["host"]
        kinds = {"socket": str, "pid": int, "began": int}
        wrong = [name for name, kind in kinds.items() if type(supervisor[name]) is not kind]
        if wrong:
            raise ValueError(f"its {wrong[0]} is {supervisor[wrong[0]]!r:.40}")
        if "\0" in supervisor["socket"]:
            raise ValueError("its socket is no path")
        supervisor["socket"].encode()  # raises ValueError for half a surrogate pair
    except FileNotFoundError:
        raise UserError(_how_it_ended(folder)) from None
    except PermissionError as error:
        raise _not_ours(folder) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{folder / SUPERVISOR_FILE} is damaged ({error}); check whether the run is live: "
            "ps ax | grep penstock"
        ) from error

    if host != socket.gethostname():
        raise UserError(
            f"{folder} is of a run on {host}, and this host is {socket.gethostname()}; run this "
            f"command on {host}"
        )
    return supervisor


def _how_it_ended(folder: Path) -> str:
    """Returns a sentence about the run in a folder whose supervisor is not there."""
    if in_use(folder):
        return f"the run in {folder} is starting or ending; try again in a moment"

    summary = read_json(folder, SUMMARY, follow_links=True)
    if not summary:
        return (
            f"no run is live in {folder}, and it has no summary.json; give the folder of a live run"
        )

    ended_s = (folder / SUMMARY).stat().st_mtime
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended_s))
    error = f" ({summary['error']})" if summary.get("error") else ""
    return f"the run in {folder} has ended, at {when}: {summary.get('exit_reason')}{error}"


def _not_ours(folder: Path) -> UserError:
    """Returns the error for a run of another user."""
    owner = "another user"
    with suppress(OSError, KeyError):
        owner = pwd.getpwuid(folder.stat().st_uid).pw_name
    user_id = os.geteuid()
    return UserError(
        f"{folder} is a run of {owner}, and you are user {user_id}; run this command as that user"
    )

"""Queries the supervisor of a live run for the status of its processes: `penstock status RUN`."""

from __future__ import annotations

import json
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
from penstock.core.formatting import percent
from penstock.core.processes import began_ticks
from penstock.core.run_dir import SUPERVISOR_FILE, in_use
from penstock.profiling.ledger import fractions

Report = dict[str, Any]

WINDOW_S = 1.0
TIMEOUT_S = 5.0
ANSWER_NBYTES = 1 << 26
SHOWN_PARTS = 4


@dataclass(frozen=True)
class Reached:
    """A live supervisor: its pid in this process's namespace, and its reply; None if it is too busy
    or hangs. ``runtime_dir`` has its sockets."""

    pid: int
    report: Report | None
    runtime_dir: Path


def status(run: str, window_s: float = WINDOW_S) -> Report:
    """The status of the processes of a run, with their time shares over ``window_s``.

    Raises UserError if the run is not live, or the supervisor does not reply.
    """
    before = _must_answer(run)
    time.sleep(window_s)
    report = _must_answer(run)
    add_shares(report, before)
    return report


def add_shares(report: Report, before: Report) -> None:
    """Add to a report the shares of time since an earlier one: `ledger` of each thread, in place of
    its `seconds`, and `cpu` of each process. ``before`` keeps its `seconds`."""
    report["window_s"] = report["running_s"] - before["running_s"]
    earlier = {(p["name"], p["pid"]): p for p in before["processes"]}
    for process in report["processes"]:
        _add_shares(process, earlier.get((process["name"], process["pid"]), {}), report["window_s"])


def probe(run: str) -> int:
    """The pid of the supervisor of a run, which replies. Raises UserError if it does not."""
    pid: int = _must_answer(run)["pid"]
    return pid


def reach(run: str) -> Reached:
    """The supervisor of a run, and its reply. Raises UserError if the run is not live."""
    folder = Path(run)
    about = _about(folder)
    runtime_dir = Path(about["socket"]).parent
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(TIMEOUT_S)
    with connection:
        try:
            connection.connect(about["socket"])
        except PermissionError as error:
            raise _not_ours(folder) from error
        except (TimeoutError, BlockingIOError) as error:  # the latter if many clients are connected
            if not _lives(about):  # here its pid is that of another process
                raise UserError(
                    f"the supervisor of {run} is busy, and runs in another container; run this "
                    "command in the container of the run"
                ) from error
            return Reached(about["pid"], None, runtime_dir)
        except OSError as error:
            if _about(folder) != about:  # it ended just now, and another has begun
                return reach(run)
            if _lives(about):
                raise UserError(
                    f"the supervisor of {run} (pid {about['pid']}) runs, but its socket "
                    f"{about['socket']} was deleted; end the run with: kill {about['pid']}"
                ) from error
            raise UserError(
                f"the supervisor of {run} (pid {about['pid']}) has died without ending the run, "
                "and its processes end with it; resume the run with --resume auto"
            ) from error
        ucred = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", ucred)
        if os.geteuid() not in (0, uid):  # a folder of another user can name any socket
            raise _not_ours(folder)
        return Reached(pid, _answer(connection), runtime_dir)


def _lives(about: Report) -> bool:
    """Whether the supervisor's pid still belongs to the supervisor."""
    return bool(began_ticks(about["pid"]) == about["began"])


def describe(report: Report) -> str:
    """The report as text: a line for each process, and one for each of its threads."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["since"]))
    lines = [
        f"{report['run']}: since {began}, for {lasting(report['running_s'])}; supervisor pid "
        f"{report['pid']}; shares are of the last {lasting(report['window_s'])}"
    ]
    width = max((len(p["name"]) for p in report["processes"]), default=0)
    for process in report["processes"]:
        here = report.get("host")
        host = process.get("host", here)
        place = "" if host == here else f"{host}: "
        lines.append(f"{process['name']:{width}}  {place}{in_a_line(process)}")
        lines += [_thread_line(thread, width) for thread in process.get("threads", [])]
    return "\n".join(lines)


def in_a_line(process: Report) -> str:
    """A process in a line: "pid 71, stopped, silent for 41 s, in phase environment for 41 s"."""
    if process["pid"] is None:
        return "does not run: it has ended, or will be restarted"
    silent_s = process["silent_s"]
    said = "no sign of life yet" if silent_s is None else f"silent for {lasting(silent_s)}"
    cpu = f", cpu {percent(process['cpu'])}" if process.get("cpu") is not None else ""
    again = f", incarnation {process['incarnation']}" if process["incarnation"] else ""
    return (
        f"pid {process['pid']}{again}, {process.get('state', 'ended')}, {said}, in phase "
        f"{process['phase']} for {lasting(process['phase_for_s'])}{cpu}"
    )


def lasting(seconds: float) -> str:
    """0.0213 -> "0.02 s", 41.3 -> "41 s", 200 -> "3 min 20 s", 7400 -> "2 h 3 min"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"


def _thread_line(thread: Report, width: int) -> str:
    inside = "not started yet"
    if thread["part"] is not None:
        inside = f"in {thread['part']} for {lasting(thread['for_s'])}"
    most = sorted(thread["ledger"].items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    shares = ", ".join(f"{part} {share:.0%}" for part, share in most if share >= 0.005)
    return f"{'':{width}}    {thread['name']:8}  {inside:24}  {shares}"


def _add_shares(process: Report, before: Report, window_s: float) -> None:
    """Shares of each thread's time, and of a processor, since ``before``; or since its start."""
    threads = {thread["name"]: thread["seconds"] for thread in before.get("threads", [])}
    for thread in process.get("threads", []):
        thread["ledger"] = fractions(thread.pop("seconds"), threads.get(thread["name"], {}))
    if "cpu_s" in process and "cpu_s" in before and window_s > 0:
        process["cpu"] = (process["cpu_s"] - before["cpu_s"]) / window_s


def _must_answer(run: str) -> Report:
    reached = reach(run)
    if reached.report is None:
        raise UserError(
            f"the supervisor of {run} (pid {reached.pid}) did not reply within {TIMEOUT_S:g} s; "
            f"penstock stacks {run} shows where it hangs"
        )
    return reached.report


def _answer(connection: socket.socket) -> Report | None:
    """The complete reply; None if it takes too long."""
    data = bytearray()
    ends_s = time.monotonic() + TIMEOUT_S
    try:
        while chunk := connection.recv(1 << 16):
            data += chunk
            if len(data) > ANSWER_NBYTES or time.monotonic() > ends_s:
                return None
        report: Report = json.loads(data)
    except (OSError, ValueError, RecursionError):
        return None
    return report if isinstance(report, dict) else None


def _about(folder: Path) -> Report:
    """The contents of `supervisor.json`. Raises UserError if they name no live run of this host."""
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a run")
    try:
        about: Report = json.loads(read_regular(folder / SUPERVISOR_FILE))
        host = about["host"]
        kinds = {"socket": str, "pid": int, "began": int}
        if wrong := [name for name, kind in kinds.items() if type(about[name]) is not kind]:
            raise ValueError(f"its {wrong[0]} is {about[wrong[0]]!r:.40}")
        if "\0" in about["socket"]:
            raise ValueError("its socket is no path")
        about["socket"].encode()
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
    return about


def _how_it_ended(folder: Path) -> str:
    if in_use(folder):
        return f"the run in {folder} is starting or ending; try again in a moment"
    summary = folder / "summary.json"
    try:
        found = json.loads(read_regular(summary))
        ended_s = summary.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return (
            f"no run is live in {folder}, and it has no summary.json; give the folder of a live run"
        )
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended_s))
    error = f" ({found['error']})" if found.get("error") else ""
    return f"the run in {folder} has ended, at {when}: {found.get('exit_reason')}{error}"


def _not_ours(folder: Path) -> UserError:
    owner = "another user"
    with suppress(OSError, KeyError):
        owner = pwd.getpwuid(folder.stat().st_uid).pw_name
    me = os.geteuid()
    return UserError(
        f"{folder} is a run of {owner}, and you are user {me}; run this command as that user"
    )

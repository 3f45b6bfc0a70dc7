"""What the processes of a live run do: `penstock status RUN`."""

from __future__ import annotations

import time

from penstock.configs.errors import UserError
from penstock.core.formatting import percent
from penstock.monitor.supervisor_client import TIMEOUT_S, Report, reach
from penstock.profiling.ledger import shares_between

WINDOW_S = 1.0
SHOWN_PARTS = 4  # parts of a thread's time, the largest ones


def status(run: str, window_s: float = WINDOW_S) -> Report:
    """Returns the status of the processes of a run, with their time shares.

    Args:
        run: the folder of the run.
        window_s: as many seconds pass, of which the shares are.

    Raises:
        UserError: if the run is not live, or the supervisor does not reply.
    """
    earlier = _must_answer(run)
    time.sleep(window_s)
    report = _must_answer(run)
    add_shares(report, earlier)
    return report


def add_shares(report: Report, earlier: Report) -> None:
    """Adds to a report the shares of time since an earlier one.

    They are `ledger` of each thread, in place of its `seconds`, and `cpu` of each process.

    Args:
        report: of the supervisor; it is changed.
        earlier: of the same supervisor; it keeps its `seconds`.
    """
    window_s = report["running_s"] - earlier["running_s"]
    report["window_s"] = window_s

    previous = {(process["name"], process["pid"]): process for process in earlier["processes"]}
    for process in report["processes"]:
        _add_shares(process, previous.get((process["name"], process["pid"]), {}), window_s)


def probe(run: str) -> int:
    """Returns the pid of the supervisor of a run, which replies.

    Raises:
        UserError: if it does not.
    """
    pid: int = _must_answer(run)["pid"]
    return pid


def describe(report: Report) -> str:
    """Returns the report of `status` as text: a line for each process, and one for each of its
    threads."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["since"]))
    lines = [
        f"{report['run']}: since {began}, for {lasting(report['running_s'])}; supervisor pid "
        f"{report['pid']}; shares are of the last {lasting(report['window_s'])}"
    ]

    width = max((len(process["name"]) for process in report["processes"]), default=0)
    supervisor_host = report.get("host")
    for process in report["processes"]:
        host = process.get("host", supervisor_host)
        place = "" if host == supervisor_host else f"{host}: "
        lines.append(f"{process['name']:{width}}  {place}{in_a_line(process)}")
        lines += [_thread_line(thread, width) for thread in process.get("threads", [])]
    return "\n".join(lines)


def in_a_line(process: Report) -> str:
    """Returns a process as text: "pid 71, stopped, silent for 41 s, in phase environment for
    41 s".

    Args:
        process: one of the ``processes`` of a report.
    """
    if process["pid"] is None:
        return "does not run: it has ended, or will be restarted"

    silent_s = process["silent_s"]
    sign = "no sign of life yet" if silent_s is None else f"silent for {lasting(silent_s)}"
    cpu = f", cpu {percent(process['cpu'])}" if process.get("cpu") is not None else ""
    incarnation = f", incarnation {process['incarnation']}" if process["incarnation"] else ""
    return (
        f"pid {process['pid']}{incarnation}, {process.get('state', 'ended')}, {sign}, in phase "
        f"{process['phase']} for {lasting(process['phase_for_s'])}{cpu}"
    )


def lasting(seconds: float) -> str:
    """Returns a duration as text: 0.0213 -> "0.02 s", 41.3 -> "41 s", 200 -> "3 min 20 s", 7400 ->
    "2 h 3 min"."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {s} s"


def _thread_line(thread: Report, width: int) -> str:
    """Returns a thread as a line, behind so many columns: what it does, and the largest shares of
    its time."""
    activity = "not started yet"
    if thread["part"] is not None:
        activity = f"in {thread['part']} for {lasting(thread['for_s'])}"
    largest = sorted(thread["ledger"].items(), key=lambda item: -item[1])[:SHOWN_PARTS]
    shares = ", ".join(f"{part} {share:.0%}" for part, share in largest if share >= 0.005)
    return f"{'':{width}}    {thread['name']:8}  {activity:24}  {shares}"


def _add_shares(process: Report, earlier: Report, window_s: float) -> None:
    """Adds to a process the shares of each thread's time, and of a processor.

    Args:
        process: one of the ``processes`` of a report; it is changed.
        earlier: the same process in the earlier report; empty if it was not there, then shares are
            since its start.
        window_s: seconds between both.
    """
    earlier_seconds = {thread["name"]: thread["seconds"] for thread in earlier.get("threads", [])}
    for thread in process.get("threads", []):
        seconds = thread.pop("seconds")
        thread["ledger"] = shares_between(seconds, earlier_seconds.get(thread["name"], {}))

    if "cpu_s" in process and "cpu_s" in earlier and window_s > 0:
        process["cpu"] = (process["cpu_s"] - earlier["cpu_s"]) / window_s


def _must_answer(run: str) -> Report:
    """Returns the report of the supervisor of a run.

    Raises:
        UserError: if it does not reply.
    """
    supervisor = reach(run)
    if supervisor.report is None:
        raise UserError(
            f"the supervisor of {run} (pid {supervisor.pid}) did not reply within {TIMEOUT_S:g} s; "
            f"penstock stacks {run} shows where it hangs"
        )
    return supervisor.report

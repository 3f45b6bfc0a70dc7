"""Simulated learners: processes that carry out the same jobs at the same time.

Each is ``python -m simulated.learner``, on a host of its own where there are hosts. A job is a
message to all of them, its result a message from each.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from hosts import INTERFACE, Hosts
from penstock.core.control import Channel, Message
from penstock.core.processes import THREAD_VARIABLES, python

BENCHMARKS = Path(__file__).parents[1]
LOOPBACK = "lo"
STUCK_S = 120.0  # after which learners that compute nothing wait for each other for ever
LEAST_BUSY = 0.01  # of that time all learners together compute, or are stuck; gloo alone takes less


class Learners:
    """The running processes, by rank; made by `learners`."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], channels: Sequence[Channel],
                 logs: Sequence[Path]) -> None:  # fmt: skip
        self._processes, self._channels, self._logs = processes, channels, logs

    def do(self, job: str, **arguments: Any) -> list[Message]:
        """Results of a job, by rank, which are waited for as long as the learners compute.

        Raises RuntimeError with what the first to fail said.
        """
        for channel in self._channels:
            channel.send({"job": job, **arguments}, patience_s=5.0)
        return [self._result(rank, job) for rank in range(len(self._channels))]

    def _result(self, rank: int, job: str) -> Message:
        channel = self._channels[rank]
        while not channel.closed:
            earlier_s = self._cpu_s()
            if select.select([channel], [], [], STUCK_S)[0]:
                for message in channel.receive(most=1):
                    return message
            elif self._cpu_s() - earlier_s < LEAST_BUSY * STUCK_S:
                break
        said = " | ".join(filter(None, map(_last_line, self._logs))) or "they wrote nothing"
        state = "ended" if channel.closed else "was stuck"
        raise RuntimeError(f"learner {rank} {state} in the job {job!r}: {said}")

    def _cpu_s(self) -> float:
        """Processor seconds that the learners have computed."""
        spent_s = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):  # it has ended
                times = psutil.Process(process.pid).cpu_times()
                spent_s += times.user + times.system
        return spent_s


@contextlib.contextmanager
def learners(count: int, parameters: int, hosts: Hosts | None) -> Iterator[Learners]:
    """Start ``count`` learners, which end with the block."""
    with contextlib.ExitStack() as stack:
        paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), **dict.fromkeys(THREAD_VARIABLES, "1")}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-penstock-")))
        processes, channels, logs = [], list[Channel](), list[Path]()
        for rank in range(count):
            ours, theirs = Channel.pair()
            stack.callback(ours.close)
            channels.append(ours)
            logs.append(folder / f"learner-{rank}.log")
            command = python("simulated.learner", theirs.fileno())
            with theirs, logs[-1].open("wb") as log:
                process = subprocess.Popen(
                    hosts.command(rank, command) if hosts else command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**os.environ, **variables},
                )
            stack.callback(_end, process)
            processes.append(process)
            start = {
                "rank": rank,
                "world": count,
                "parent_pid": os.getpid(),
                "store": str(folder / "store"),
                "interface": INTERFACE if hosts else LOOPBACK,
                "parameters": parameters,
            }
            ours.send(start, patience_s=5.0)
        made = Learners(processes, channels, logs)
        made.do("hello")
        yield made


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)  # it has nothing to lose
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""

"""Learners and actors on hosts of their own, joined by links of a given rate, as on four machines.

Every host runs `penstock learner --rank` and one `penstock actor` that joins it; only gradients and
the small sum of each step cross the links. Bytes are those of the interfaces, headers included.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

from common import point
from hosts import INTERFACE, Hosts, hosts

BIND_PORT, STORE_PORT = 7700, 29500
ALLOWED = ("catch:*", "penstock/*", "CartPole-v1")  # environments that actors may make
POLL_S = 0.5
END_S = 30.0
START_S = 120.0
SHOWN_LINES = 15  # of each output of a run that failed


def train_on_hosts(
    target: str,
    overrides: Sequence[str],
    *,
    cwd: Path,
    folder: Path,
    link: str,
    learners: int,
    seconds: float,
    during: Callable[[Sequence[subprocess.Popen[bytes]]], AbstractContextManager[object]] = (
        nullcontext
    ),
) -> dict[str, Any]:
    """Train to the end, or for ``seconds`` at most; the summary of rank 0, and a curve.

    ``during`` is made of the commands of all ranks, and lasts as long as they run.

    The curve has a `point` per poll, whose megabytes left the busiest interface since training
    began. Raises NoHostsError where there can be no hosts.
    """
    options = [*overrides, f"learner.reduce.interface={INTERFACE}", f"run.dir={folder}"]
    with hosts(learners) as made, ExitStack() as stack:
        made.limit(link)
        store = f"{made.addresses[0]}:{STORE_PORT}"
        group = []
        for rank in range(learners):
            where = [f"--rank={rank}", f"--world={learners}", f"--store={store}"]
            where.append("--trusted-network")
            bind = f"--bind=tcp://127.0.0.1:{BIND_PORT}"
            learner = ["learner", target, *options, *where, bind, "--json"]
            group.append(_start(stack, made, rank, learner, cwd, folder / f"learner-{rank}.out"))
            join = f"--connect=tcp://127.0.0.1:{BIND_PORT + rank}"
            # without keys an actor runs only the environments that it is allowed
            actor = [
                "actor",
                join,
                *(f"--allow={env_id}" for env_id in ALLOWED),
                f"--dir={folder / f'actor-{rank}'}",
                "--json",
            ]
            _start(stack, made, rank, actor, cwd, folder / f"actor-{rank}.out")
        with during(group):
            curve = _watch(group, folder, seconds)
        if any(process.poll() is not None for process in group):
            _await_end(group)  # a signal in the last moment would kill one before its summary
        for process in group:
            _end(process)
    out = (folder / "learner-0.out").read_text().splitlines()
    if not out:
        raise SystemExit(
            f"learner 0 ended with {group[0].returncode} and without a summary"
            + _ends_of_outputs(folder)
        )
    summary: dict[str, Any] = json.loads(out[-1])
    return summary | {"curve": curve}


def _start(
    stack: ExitStack, made: Hosts, host: int, arguments: Sequence[str], cwd: Path, out: Path
) -> subprocess.Popen[bytes]:
    """``penstock`` on a host; it ends with ``stack``, actors before learners."""
    command = made.command(host, [sys.executable, "-m", "penstock", *arguments])
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file, out.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=errors)
    stack.callback(_end, process)
    return process


def _watch(
    group: Sequence[subprocess.Popen[bytes]], folder: Path, seconds: float
) -> list[dict[str, Any]]:
    """Look at the run until a learner has ended, or for ``seconds`` of training."""
    curve: list[dict[str, Any]] = []
    first: list[int] = []
    sent = [0] * len(group)
    gives_up_s = time.monotonic() + START_S
    while all(process.poll() is None for process in group) and time.monotonic() < gives_up_s:
        time.sleep(POLL_S)
        sent = [max(n, _sent_nbytes(p.pid)) for n, p in zip(sent, group, strict=True)]
        last = _last(folder / "metrics.jsonl")
        if last is None or not last["learner_steps"]:
            first = sent
            continue
        if not curve:
            gives_up_s = time.monotonic() + seconds
        if not curve or last["time_s"] > curve[-1]["seconds"]:
            most = max(now - before for now, before in zip(sent, first, strict=True))
            curve.append(point(last, most / 1e6))
    return curve


def _ends_of_outputs(folder: Path) -> str:
    text = "; the ends of all outputs:"
    for path in sorted(folder.glob("*-*.err")):
        text += f"\n{path.stem}:\n" + "\n".join(path.read_text().splitlines()[-SHOWN_LINES:])
    return text


def _last(path: Path) -> dict[str, Any] | None:
    """The last whole line of a file that is being written."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    found: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    return found


def _sent_nbytes(pid: int) -> int:
    """Bytes that the interface of a process's host has sent; 0 once it has ended. psutil reads only
    the interfaces of its own namespace."""
    try:
        text = Path(f"/proc/{pid}/net/dev").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    return 0


def _await_end(group: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for all, for `END_S` at most."""
    ends_s = time.monotonic() + END_S
    with suppress(subprocess.TimeoutExpired):
        for process in group:
            process.wait(max(0.0, ends_s - time.monotonic()))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a command end by itself, cleanly if it was asked, or at once."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

"""A topology that runs: its commands, its folders, its network, and what can be read of it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from inspect import signature
from pathlib import Path
from typing import Any

from common import free_port
from faults.program import STARTING, Broken, NotHereError, Program, Role, wait_until
from faults.progress import Progress
from faults.proxy import Proxy
from faults.topologies import GRACE_S, SMALL, Topology
from faults.vitals import MARKER, command_of, marked
from hosts import Hosts, NoHostsError, hosts
from penstock.cli.replay_server import serve

START_S = 90.0
LEAVE_S = 5.0
DISK = "48m"
REPEAT_S = 10.0  # within which an event like one before is counted, and not written
FAKETIME = (
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1",
    "/usr/lib64/faketime/libfaketimeMT.so.1",
)
SPEC = """
columns:
  obs: [float32, [4]]
  action: [int64, []]
envs: 4
n_step: 3
"""
CLIENT = Path(__file__).with_name("replay_client.py")
PENSTOCK = (sys.executable, "-m", "penstock")
EVENTS = "logs/events.jsonl"


class World:
    """One topology in a folder of its own. Use it as a context: what it has started and mounted is
    gone afterwards; the folder is the caller's."""

    def __init__(self, topology: Topology, folder: Path) -> None:
        self.topology = topology
        self.folder = folder
        self.marker = uuid.uuid4().hex
        self.start_s = 0.0  # how long the first start took
        self.proxy: Proxy | None = None
        self.hosts: Hosts | None = None
        self.address = ""  # where hostile peers connect
        self.expected = 0  # roles of the whole
        self._stack = ExitStack()
        self._later = ExitStack()
        self._shared = set(os.listdir("/dev/shm"))

    def __enter__(self) -> World:
        """Raises NotHereError where this machine cannot have the topology."""
        if self.topology.fake_clock and faketime() is None:
            raise NotHereError("libfaketime is not installed")
        with ExitStack() as stack:
            self._stack = stack
            self.temporary = self.folder / "t"
            self.temporary.mkdir(parents=True)
            self.disk = self.folder / "disk"
            self.disk.mkdir()
            self.small_disk = _mount(self.disk, stack)
            self.clock = self.folder / "clock"
            self.clock.write_text("+0\n")
            stack.callback(self._end_all)
            stack.callback(self.undo)
            self.run_dir = self.disk / "run"
            self.progress = Progress(self.run_dir / "metrics.jsonl")
            if self.topology.served:
                self.progress = Progress(self.folder / "progress.jsonl")
            self.progress.start()
            stack.callback(self.progress.close)
            self.programs = self._programs()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def main(self) -> Program:
        """The program with the learner, or the replay server."""
        return self.programs[0]

    def start(self, *more: str) -> None:
        """Start what does not run; the main program with ``more`` arguments. Returns when training
        goes on. Raises Broken where it does not."""
        began_s = time.monotonic()
        self.progress.begin()
        for program in self.programs:
            if not program.runs:
                program.start(*(more if program is self.main else ()))
        if not wait_until(lambda: self.progress.since(began_s) or not self.main.runs, START_S):
            raise Broken(f"no training within {START_S:g} s of the start")
        if not self.main.runs:
            raise Broken(f"the start failed: {self.main.said.strip()[-600:]}")
        self.start_s = self.start_s or time.monotonic() - began_s

    def roles(self) -> list[Role]:
        """All that lives, of all programs."""
        return [role for program in self.programs for role in program.roles()]

    def whole(self) -> bool:
        """Whether every role of every program lives and has begun its work."""
        for program in self.programs:
            if not program.runs:
                return False
            if program.run_dir is not None:
                found = program.roles()
                unready = any(role.phase == STARTING for role in found)
                if unready or not 1 < len(found) == program.all_names() + 1:
                    return False
        return True

    def events(self) -> list[dict[str, Any]] | None:
        """The lines of logs/events.jsonl of all programs so far; None where this version writes
        none."""
        if not (self.run_dir / EVENTS).exists():
            return None
        found = []
        for path in (self.run_dir / EVENTS, *sorted(self.folder.glob(f"actors-*/{EVENTS}"))):
            for text in path.read_bytes().rpartition(b"\n")[0].splitlines():
                with suppress(ValueError):
                    found.append(json.loads(text))
        return found

    def later(self, close: Callable[[], None]) -> None:
        """What is to be undone before the next fault, or at the end."""
        self._later.callback(close)

    def undo(self) -> None:
        self._later.close()

    def finish(self) -> dict[str, Any]:
        """End everything as a user does; the main program's answer. Raises Broken where something
        does not end, or is left behind."""
        self.undo()
        codes = {}
        for program in reversed(self.programs):  # what produces first
            codes[program.name] = program.end(GRACE_S + LEAVE_S)
        answer = self.main.answer()
        for name, code in codes.items():
            early = code == -signal.SIGTERM and name != self.main.name  # as it was starting
            if code not in (0, 143) and not early:
                said = next(p for p in self.programs if p.name == name).said.strip()[-600:]
                raise Broken(f"{name} ended with exit code {code}: {said}")
        self.check_nothing_left()
        return answer

    def check_nothing_left(self, *, folders: bool = True) -> None:
        """Raises Broken where a process, shared memory or, among ``folders``, a runtime folder
        stays. That of a supervisor that was killed stays until the next run starts."""
        left: list[str] = []

        def gone() -> bool:
            left[:] = [f"process {pid}: {command_of(pid)}" for pid in marked(self.marker)]
            found = self.temporary.glob("*penstock*") if folders else ()
            left.extend(f"folder {path}" for path in found)
            names = set(os.listdir("/dev/shm")) - self._shared
            left.extend(f"shared memory {name}" for name in names if "penstock" in name)
            return not left

        # Without a supervisor the learners take the whole grace to save.
        if not wait_until(gone, LEAVE_S if folders else GRACE_S + LEAVE_S, 0.1):
            raise Broken(f"left behind: {'; '.join(left)}")

    # ------------------------------------------------------------------------------- parts

    def _environ(self, **more: str) -> dict[str, str]:
        environ = {
            **os.environ,
            MARKER: self.marker,
            "TMPDIR": str(self.temporary),
            **self.topology.extra,
            **more,
        }
        if self.topology.fake_clock:
            environ |= {
                "LD_PRELOAD": faketime() or "",
                "FAKETIME_TIMESTAMP_FILE": str(self.clock),
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_CACHE_DURATION": "1",
            }
        return environ

    def _programs(self) -> list[Program]:
        if self.topology.served:
            return self._served()
        if self.topology.by_hand:
            return self._by_hand()
        t, port = self.topology, free_port()
        options = [*SMALL, *t.options, f"actors.count={t.actors}", f"run.dir={self.run_dir}"]
        if "transport.kind=zmq" in t.options:
            self.address = f"tcp://127.0.0.1:{port}"
            options.append(f"transport.bind={self.address}")
        argv = [*PENSTOCK, "train", t.target, *options, "--json"]
        return [Program("train", argv, self._environ(), self.folder, self.run_dir)]

    def _by_hand(self) -> list[Program]:
        t, port = self.topology, free_port()
        options = [*SMALL, *t.options, f"actors.count={t.actors}", f"run.dir={self.run_dir}"]
        keys: list[str] = []
        ends: list[tuple[list[str], str]]  # what stands before an actor's command; its address
        before: list[str] = []
        if t.by_hand == "proxy":
            self.proxy = self._stack.enter_context(Proxy(port))
            bind, ends = f"tcp://127.0.0.1:{port}", [([], f"tcp://127.0.0.1:{self.proxy.port}")]
            self.address = bind
        else:
            folder = self.folder / "keys"
            self._run([*PENSTOCK, "keys", "new", str(folder)])
            options.append(f"transport.curve={folder}")
            keys = ["--curve", str(folder)]
            try:
                self.hosts = self._stack.enter_context(hosts(3))
            except NoHostsError as error:
                raise NotHereError(str(error)) from error
            before = self.hosts.command(0, [])
            bind = f"tcp://{self.hosts.addresses[0]}:7700"
            ends = [(self.hosts.command(i, []), bind) for i in (1, 2)]
        argv = [*before, *PENSTOCK, "learner", t.target, *options, "--bind", bind, "--json"]
        programs = [Program("learner", argv, self._environ(), self.folder, self.run_dir)]
        for i, (inside, address) in enumerate(ends):
            path = self.folder / f"actors-{i}"
            count = t.actors // len(ends)
            where = ["--connect", address, "--transport", "zmq", *keys, "--dir", str(path)]
            argv = [*inside, *PENSTOCK, "actor", *where, "--count", str(count), "--json"]
            programs.append(Program(f"actors-{i}", argv, self._environ(), self.folder, path))
        return programs

    def _served(self) -> list[Program]:
        port = free_port()
        self.address = f"tcp://127.0.0.1:{port}"
        spec = self.folder / "spec.yaml"
        spec.write_text(SPEC)
        where = ["--spec", str(spec), "--bind", self.address, "--capacity", "20000"]
        if "snapshot" in signature(serve).parameters:
            where += ["--snapshot", str(self.folder / "snapshot"), "--snapshot-every", "1"]
        argv = [*PENSTOCK, "replay", "serve", *where, "--sampler", "prioritized", "--json"]
        server = Program("replay", argv, self._environ(), self.folder, None)
        clients = [
            Program(
                f"client-{i}",
                [sys.executable, str(CLIENT), self.address, str(self.folder / "progress.jsonl")],
                self._environ(),
                self.folder,
                None,
            )
            for i in range(self.topology.actors)
        ]
        return [server, *clients]

    def _run(self, command: Sequence[str]) -> None:
        subprocess.run(command, check=True, env=self._environ(), stdout=subprocess.DEVNULL)

    def _end_all(self) -> None:
        """After a failure: nothing of this session goes on."""
        for pid in marked(self.marker):
            for signum in (signal.SIGCONT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)
        for program in getattr(self, "programs", []):
            program.kill()
        wait_until(lambda: not marked(self.marker), LEAVE_S)


def faketime() -> str | None:
    """The library that lies about the time; None where it is not installed."""
    return next((path for path in FAKETIME if Path(path).exists()), None)


def _mount(folder: Path, stack: ExitStack) -> bool:
    """Give the folder a small disk of its own; whether that is possible here."""
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        return False
    command = [mount, "-t", "tmpfs", "-o", f"size={DISK}", "chaos", str(folder)]
    if subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode:
        return False
    stack.callback(_unmount, folder)
    return True


def _unmount(folder: Path) -> None:
    kept = folder.with_name("disk-kept")  # a failure is looked into afterwards
    with suppress(OSError, shutil.Error):
        shutil.copytree(folder, kept, symlinks=True)
    subprocess.run(["umount", "--lazy", str(folder)], check=False)  # the last may still be dying

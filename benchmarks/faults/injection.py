"""The faults themselves: each does its harm, undoes what lasts, and says what must hold now."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from faults.hostile import FIRST_STRANGER, Hoard, attack_attach, attack_replay, attack_wire
from faults.program import STARTING, SUPERVISOR, Broken, NotHereError, Role, wait_until
from faults.schedule import Fault
from faults.topologies import HANG_S
from faults.vitals import alive, descriptors
from faults.world import REPEAT_S, World

BOUND_S = 5.0  # for training to go on after a confirmed death
DUMP_S = 0.5  # a hung process writes its stacks before it is killed
BEATS_S = 5.0  # after which a peer of the wire that has vanished is given up
USED_UP_S = 1.0  # until actors have played what they had been granted before
LAST_LINES_S = 0.5  # until the supervisor has written what a dead learner had reported
READY_S = 60.0  # for a victim to be there
EXPENDABLE = ("actor", "connector", "relay", "evaluator", "client")
KEEPERS = ("learner", "server")  # hold what was learned
CGROUPS = Path("/sys/fs/cgroup/memory")
CLOCK_STEPS = (-86400, -3600, -10, 10, 3600, 86400)


@dataclass(frozen=True)
class Ending:
    """The run must end by itself, or by the signal that it got: with one of ``codes``, naming
    ``role``, and its accounting balanced where it could still be written."""

    codes: tuple[int, ...]
    role: str | None = None
    accounted: bool = True
    harm: str | None = None  # done to the checkpoint before the run is resumed


@dataclass(frozen=True)
class Struck:
    """What was done: training must go on within ``bound_s`` of ``from_s``, on the monotonic clock.
    ``causes`` are kinds of events, one of which must name ``role``."""

    role: str
    from_s: float
    bound_s: float = BOUND_S
    causes: tuple[str, ...] = ()
    ending: Ending | None = None
    starts: bool = False  # a process has to start before training goes on: a start of Python more


def inject(world: World, fault: Fault) -> Struck:
    """Do it. Raises NotHereError, or Broken where no victim is to be had."""
    world.undo()
    verb, _, what = fault.kind.partition(":")
    return INJECTIONS[verb](world, fault, what)


def victim(
    world: World, fault: Fault, kinds: tuple[str, ...], ready: bool = True, above: int = 0
) -> Role:
    """One of those that live and work, by the fault's pick; with both processes of its shim where
    one that is ``above`` it is to be killed."""
    found: list[Role] = []

    def there() -> bool:
        roles = world.roles()
        found[:] = [r for r in roles if r.kind in kinds and not (ready and r.phase == STARTING)]
        if above:
            found[:] = [role for role in found if _has_shim(role)]
        return bool(found)

    if not wait_until(there, READY_S, 0.1):
        raise Broken(f"no {' or '.join(kinds)} lives {READY_S:g} s after the fault before")
    return found[min(int(fault.pick * len(found)), len(found) - 1)]


def _kill(world: World, fault: Fault, what: str, above: int = 0) -> Struck:
    """Kill a role, or the process that is so many ``above`` it: its keeper or its guard."""
    if what == "learner":
        _await_group(world)
    if what == "host":
        return _kill_host(world, fault)
    if what == "replay":
        return _kill_replay(world)
    if what == "client":
        return _kill_client(world, fault)
    role = victim(world, fault, (what,), ready=what in KEEPERS, above=above)
    falls_back = what == "server" or (what == "learner" and world.topology.learners == 1)
    if falls_back:
        _await_checkpoint(world)
    now_s = _killed(role, above)
    if falls_back:
        time.sleep(LAST_LINES_S)
        world.progress.begin()
    starts = what in ("connector", "relay", *KEEPERS)  # nothing else does what it did
    return Struck(role.name, now_s, causes=("exit",), starts=starts)


def _pair(world: World, fault: Fault, what: str) -> Struck:
    """Two at once."""
    first = victim(world, fault, EXPENDABLE)
    others = [r for r in first.program.roles() if r.kind in EXPENDABLE and r.pid != first.pid]
    for role in (first, random.Random(fault.seed).choice(others) if others else first):
        with suppress(ProcessLookupError):
            os.kill(role.pid, signal.SIGKILL)
    return Struck(first.name, time.monotonic(), causes=("exit",), starts=True)


def _stop(world: World, fault: Fault, what: str) -> Struck:
    """Shorter than any timeout: it must go on as if nothing had been."""
    if what == "supervisor":
        role = Role(SUPERVISOR, world.main.pid, "", world.main)
    elif what in ("client", "replay"):
        role = _program_role(world, fault, what)
    else:
        role = victim(world, fault, (what,))
    with _stopped(role):
        time.sleep(fault.seconds)
    return Struck(role.name, time.monotonic())


def _hang(world: World, fault: Fault, what: str) -> Struck:
    """Longer than run.hang_timeout_s: the supervisor has to end it."""
    role = victim(world, fault, (what,))
    if not wait_until(lambda: _works(world, role), READY_S, 0.1):
        raise Broken(f"{role.name} does not work {READY_S:g} s after it was started")
    began_s = time.monotonic()
    with _stopped(role):
        if not wait_until(lambda: not alive(role.pid), HANG_S + DUMP_S + BOUND_S, 0.05):
            raise Broken(f"{role.name}, stopped for {HANG_S + DUMP_S + BOUND_S:g} s, still lives")
    bound_s = HANG_S + DUMP_S + BOUND_S
    return Struck(role.name, began_s, bound_s, causes=("hang", "kill"), starts=True)


def _works(world: World, role: Role) -> bool:
    """Whether its start has ended: until then it may take `run.start_timeout_s`."""
    latest: list[Mapping[str, Any]] = []
    for event in world.events() or []:
        if latest and event["uptime_s"] < latest[-1]["uptime_s"] - 2 * REPEAT_S:
            latest.clear()  # the run was started again
        if event["role"] == role.name and event["kind"] in ("start", "ready"):
            latest.append(event)  # one that was counted first may be written late
            latest.sort(key=lambda found: float(found["uptime_s"]))
    return not latest or latest[-1]["kind"] == "ready"


def _end(world: World, fault: Fault, what: str) -> Struck:
    """The end of the run, by the death of what it cannot do without, or as asked."""
    main = world.main
    if what in ("term", "term-all"):
        roles = main.roles() if what == "term-all" else []
        now_s = time.monotonic()
        for role in [*roles[1:], *roles[:1]]:
            with suppress(ProcessLookupError):
                os.kill(role.pid, signal.SIGTERM)
        if not roles:
            os.kill(main.pid, signal.SIGTERM)
        return Struck(SUPERVISOR, now_s, ending=Ending((143,)), causes=("end", "stop"))
    if what == "supervisor":
        now_s = _killed(Role(SUPERVISOR, main.pid, "", main))
        return Struck(SUPERVISOR, now_s, ending=Ending((-9,), accounted=False))
    role = victim(world, fault, (what,))
    now_s = _killed(role)
    return Struck(role.name, now_s, ending=Ending((1,), role.name), causes=("exit",))


def _checkpoint(world: World, fault: Fault, what: str) -> Struck:
    """The run is told to end, its newest checkpoint is damaged, and it is resumed."""
    os.kill(world.main.pid, signal.SIGTERM)
    ending = Ending((143,), harm=what)
    return Struck(SUPERVISOR, time.monotonic(), ending=ending, causes=("end", "stop"))


def harm_checkpoint(run_dir: Path, how: str, seed: int) -> None:
    """``flip`` 512 bits of the file, one in each of as many bytes; or ``cut`` it short."""
    rng = random.Random(seed)
    folder = run_dir / "checkpoints" / "last"
    for path in folder.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        if how == "cut":
            data = data[: rng.randrange(len(data))]
        else:
            for at in rng.sample(range(len(data)), min(512, len(data))):
                data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))


def _disk(world: World, fault: Fault, what: str) -> Struck:
    if not world.small_disk:
        raise NotHereError("a small disk needs root and mount")
    ballast = world.disk / "ballast"
    chunk = bytes(1 << 16)
    trained = world.progress.trained
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(chunk)
    time.sleep(fault.seconds)
    freed_s = time.monotonic()
    ballast.unlink()
    if wait_until(lambda: world.progress.since(freed_s) is not None, BOUND_S):
        grown = world.progress.trained - trained
        if grown <= 0:
            raise Broken(
                f"nothing was trained on while the disk was full for {fault.seconds:.1f} s"
            )
    return Struck("disk", freed_s)


def _descriptors(world: World, fault: Fault, what: str) -> Struck:
    """It may open none more for a while, as something wants one: an actor is to start again, or
    peers connect."""
    if what == "replay":
        role = _program_role(world, fault, what)
    elif what == SUPERVISOR:
        role = Role(SUPERVISOR, world.main.pid, "", world.main)
    else:
        role = victim(world, fault, (what,))
    held = descriptors(role.pid) or 64
    causes: tuple[str, ...] = ()
    with _limited(role.pid, resource.RLIMIT_NOFILE, held), _connections(world, what):
        if what == SUPERVISOR:
            actors = [r for r in role.program.roles() if r.kind == "actor"]
            if actors:
                os.kill(actors[int(fault.pick * len(actors))].pid, signal.SIGKILL)
                causes = ("exit",)
                role = Role(actors[int(fault.pick * len(actors))].name, 0, "", role.program)
        time.sleep(fault.seconds)
    return Struck(role.name, time.monotonic(), causes=causes, starts=True)


def _memory(world: World, fault: Fault, what: str) -> Struck:
    """Its address space may not grow for a while: whatever it allocates may fail."""
    role = victim(world, fault, (what,))
    with _limited(role.pid, resource.RLIMIT_AS, psutil.Process(role.pid).memory_info().vms):
        time.sleep(fault.seconds)
    return Struck(role.name, time.monotonic(), starts=True)


def _oom(world: World, fault: Fault, what: str) -> Struck:
    """The kernel kills it, as its control group has no memory left."""
    role = victim(world, fault, (what,))
    group = CGROUPS / f"chaos-{world.marker[:12]}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(1 << 20))
        (group / "cgroup.procs").write_text(str(role.pid))
    except OSError as error:
        raise NotHereError(f"no control group for memory can be made ({error.strerror})") from error
    try:
        if not wait_until(lambda: not alive(role.pid), 1.0):
            os.kill(role.pid, signal.SIGKILL)  # it had all its memory already
        now_s = time.monotonic()
    finally:
        for _ in range(50):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.02)
    return Struck(role.name, now_s, causes=("exit",))


def _hostile(world: World, fault: Fault, what: str) -> Struck:
    rng = random.Random(fault.seed)
    if what == "attach":
        for path in world.temporary.glob("penstock-*/*.sock"):
            attack_attach(path, rng)
    elif what == "replay":
        attack_replay(world.address, rng)
    else:
        attack_wire(world.address, rng)
    return Struck(what, time.monotonic())


def _hoard(world: World, fault: Fault, what: str) -> Struck:
    """A host of idle actors holds all grants, and vanishes without a word."""
    hoard = Hoard(world.address, FIRST_STRANGER + (fault.seed & 0xFFFFFF))
    world.later(hoard.close)
    began_s = time.monotonic()
    time.sleep(USED_UP_S)
    return Struck("hoard", began_s + USED_UP_S, BEATS_S + BOUND_S)


def _net(world: World, fault: Fault, what: str) -> Struck:
    """The network between actors and their learner."""
    if world.proxy is not None:
        modes = {"latency": "delay", "half-open": "hold", "cut": "cut", "flip": "flip"}
        world.proxy.rng = random.Random(fault.seed)
        world.proxy.delay_s = 0.05 + fault.pick * 0.3
        world.proxy.mode = modes[what]
        time.sleep(fault.seconds)
        world.proxy.mode = "pass"
        return Struck("network", time.monotonic(), BEATS_S + BOUND_S)
    assert world.hosts is not None
    host = 1 + int(fault.pick * 2)
    before, after = {
        "silent": ("tc qdisc replace dev eth0 root tbf rate 8bit burst 10 latency 1ms",) * 2,
        "slow": ("tc qdisc replace dev eth0 root tbf rate 256kbit burst 4kb latency 300ms",) * 2,
        "down": ("ip link set eth0 down", "ip link set eth0 up"),
    }[what]
    if what != "down":
        after = "tc qdisc del dev eth0 root"
    _inside(world, host, before)
    time.sleep(fault.seconds * 2)
    _inside(world, host, after)
    return Struck("network", time.monotonic(), BEATS_S + BOUND_S)


def _clock(world: World, fault: Fault, what: str) -> Struck:
    step_s = random.Random(fault.seed).choice(CLOCK_STEPS)
    world.clock.write_text(f"{step_s:+d}\n")
    time.sleep(fault.seconds)
    return Struck(f"clock {step_s:+d} s", time.monotonic())


INJECTIONS: dict[str, Callable[[World, Fault, str], Struck]] = {
    "kill": _kill, "keeper": partial(_kill, above=1), "guard": partial(_kill, above=2),
    "pair": _pair, "stop": _stop, "hang": _hang, "end": _end,
    "checkpoint": _checkpoint, "disk": _disk, "descriptors": _descriptors, "memory": _memory,
    "oom": _oom, "hostile": _hostile, "hoard": _hoard, "net": _net, "clock": _clock,
}  # fmt: skip


# ------------------------------------------------------------------------------------ parts


def _has_shim(role: Role) -> bool:
    """Whether keeper, guard and supervisor are above the role. While it starts or ends, its pid may
    be its guard's, or other processes above it."""
    with suppress(psutil.NoSuchProcess):
        above = psutil.Process(role.pid).parents()
        return len(above) > 2 and above[2].pid == role.program.pid
    return False


def _killed(role: Role, above: int = 0) -> float:
    """Kill it, or the process that is so many ``above`` it, with which it must end. Returns the
    time at which its death is confirmed."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(role.pid)
        (process.parents()[above - 1] if above else process).kill()
    if not wait_until(lambda: not alive(role.pid), BOUND_S, 0.002):
        raise Broken(f"{role.name} lives {BOUND_S:g} s after the kill")
    return time.monotonic()


def _await_checkpoint(world: World) -> None:
    """The only process that holds what was learned may die where that was saved."""
    if not wait_until((world.run_dir / "checkpoints" / "last").exists, READY_S, 0.1):
        raise Broken(f"no checkpoint was written within {READY_S:g} s")


def _await_group(world: World) -> None:
    """A learner may die where another one holds what it had learned."""
    learners = world.topology.learners

    def whole() -> bool:
        ready = [r for r in world.roles() if r.kind == "learner" and r.phase != STARTING]
        members = world.progress.last.get("learners_alive", learners)
        return len(ready) == learners and members == learners

    if not wait_until(whole, READY_S, 0.1):
        raise Broken(f"the group of learners was not whole within {READY_S:g} s")


def _kill_host(world: World, fault: Fault) -> Struck:
    """A host vanishes with all its actors, in silence, and comes back."""
    program = world.programs[1 + int(fault.pick * (len(world.programs) - 1))]
    host = 1 + world.programs[1:].index(program)
    _inside(world, host, "ip link set eth0 down")  # no connection is closed
    for role in program.roles():
        with suppress(ProcessLookupError):
            os.kill(role.pid, signal.SIGKILL)
    program.end(BOUND_S, None)
    now_s = time.monotonic()
    wait_until(lambda: world.progress.since(now_s) is not None, BEATS_S + BOUND_S)
    _inside(world, host, "ip link set eth0 up")
    program.start()
    return Struck(program.name, now_s, BEATS_S + BOUND_S)


def _kill_replay(world: World) -> Struck:
    """Started again at once, as a service manager does."""
    role = Role("replay", world.main.pid, "", world.main)
    _killed(role)
    world.main.end(1.0, None)
    world.main.start()
    return Struck("replay", time.monotonic(), starts=True)


def _kill_client(world: World, fault: Fault) -> Struck:
    role = _program_role(world, fault, "client")
    now_s = _killed(role)
    role.program.end(1.0, None)
    role.program.start()
    return Struck(role.name, now_s)


def _program_role(world: World, fault: Fault, what: str) -> Role:
    found = [p for p in world.programs if p.name.partition("-")[0] == what]
    program = found[int(fault.pick * len(found))]
    return Role(program.name, program.pid, "", program)


def _inside(world: World, host: int, command: str) -> None:
    assert world.hosts is not None
    argv = world.hosts.command(host, command.split())
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotHereError(f"`{command}` failed: {done.stderr.strip()}")


@contextmanager
def _stopped(role: Role) -> Iterator[None]:
    with suppress(ProcessLookupError):
        os.kill(role.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(role.pid, signal.SIGCONT)


@contextmanager
def _limited(pid: int, which: int, soft: int) -> Iterator[None]:
    """A soft limit of a living process, put back afterwards if it still lives."""
    try:
        before = resource.prlimit(pid, which)
        resource.prlimit(pid, which, (soft, before[1]))
    except (ProcessLookupError, PermissionError) as error:
        raise NotHereError(f"limits of other processes cannot be set ({error.strerror})") from error
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, which, before)


@contextmanager
def _connections(world: World, what: str) -> Iterator[None]:
    """Idle ones to the address, more than there are descriptors for."""
    found: list[socket.socket] = []
    if what in ("connector", "replay") and world.address:
        host, _, port = world.address.removeprefix("tcp://").rpartition(":")
        for _ in range(16):
            with suppress(OSError):
                found.append(socket.create_connection((host, int(port)), 1.0))
    try:
        yield
    finally:
        for connection in found:
            connection.close()

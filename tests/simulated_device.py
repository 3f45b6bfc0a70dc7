"""A device that runs behind its host, simulated on a CPU, which finds accesses without an order.

Kernels run when they are called. What makes it strict:

- Every stream has a *vector clock* (Mattern 1989): of each stream, the number of the last call that
  its next call runs after. Events and waits pass clocks on. A call that reads or writes memory
  which another stream writes, without an order between the two, is a `HazardError` that names both
  places, whatever the timing is. So is memory that is freed while another stream may use it.
- Copies between host and device run *late*: when a call that is ordered after them uses their
  memory, or earlier, drawn by a seed. Until then their target holds `POISON`, and a source that
  changes meanwhile is a hazard. New memory holds `POISON`, too.
- A thread that has not called `enter_thread` is on another device: each of its calls is a hazard.

`stall` queues a call that never completes, like a reduction after a member has died; nothing behind
it on its stream completes until `abort`.

To plant a hazard, ``skip`` names a method of the seam and a function: its calls of it do nothing.

Tensors of the device are ordinary ones of the CPU: those that were made with an argument
``device``, moved to one, or computed from such. All others are the host's.
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.device import choice

POISON = 0x7B  # in every byte: large numbers
LATE = 0.8  # probability that an event that is asked for has not passed
PROGRESS = 0.1  # probability that a call runs a copy that it does not need
ROOT = Path(__file__).parents[1]
Clock = Counter[str]


class HazardError(AssertionError):
    """Two uses of the same memory are not ordered."""


class SimulatedStream:
    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self.device, self.name = device, name
        self.clock: Clock = Counter()

    def wait_event(self, event: SimulatedEvent) -> None:
        if not self.device.skips("wait_event"):
            self.clock |= event.clock

    def wait_stream(self, stream: SimulatedStream) -> None:
        if not self.device.skips("wait_stream"):
            self.clock |= stream.clock


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.clock: Clock = Counter()

    def record(self, stream: SimulatedStream | None = None) -> None:
        if not self.device.skips("record"):
            self.device.check_thread()
            self.clock = (stream or self.device.current_stream()).clock.copy()

    def query(self) -> bool:
        return self.device.skips("query") or self.device.passed(self.clock)

    def synchronize(self) -> None:
        if not self.device.skips("synchronize"):
            self.device.host_waits(self.clock)

    def elapsed_time(self, end_event: SimulatedEvent, /) -> float:
        return 1.0


@dataclass
class Use:
    """A call that used the bytes ``first`` to ``stop`` of a storage."""

    first: int
    stop: int
    stream: str
    number: int
    writes: bool
    place: str


@dataclass
class Memory:
    """A storage, and those calls that have used it which still matter."""

    ref: StorageWeakRef
    home: SimulatedStream | None
    """The stream on which it was made, and to whose later calls it is given when it is freed. None:
    memory of the host."""
    checksum: int | None = None
    """Of the host's memory, when it was last copied from."""
    uses: list[Use] = field(default_factory=list)
    used_on: set[str] = field(default_factory=set)


@dataclass(eq=False)
class LateCopy:
    """A copy that is queued and has not run."""

    target: Tensor
    source: Tensor
    clock: Clock
    """Of its stream, with it."""
    checksum: int
    place: str

    def uses(self, key: int) -> bool:
        return key in (key_of(self.target), key_of(self.source))


class SimulatedDevice:
    """Implements `penstock.device.interface.Device` while `simulated` is entered."""

    torch_device = torch.device("cpu")
    runs_behind = True

    def __init__(self, seed: int = 0, skip: tuple[str, str] | None = None) -> None:
        """``skip``: a method of the seam, and the name of a function whose calls do nothing."""
        self.skipped = 0
        """Calls that did nothing."""
        self._skip = skip
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)
        self._main = SimulatedStream(self, "main stream")
        self._host: Clock = Counter()  # what the host knows to have run
        self._late: list[LateCopy] = []
        self._stalled: Clock | None = None
        self._memory: dict[int, Memory] = {}
        self._lock = threading.RLock()
        self._local = threading.local()

    # ------------------------------------------------------------------------- the seam

    def enter_thread(self) -> None:
        if not self.skips("enter_thread") and not self.watches:
            self._local.modes = Calls(self), Reads(self)
            for mode in self._local.modes:
                mode.__enter__()

    def leave_thread(self) -> None:
        for mode in reversed(self._local.modes):
            mode.__exit__(None, None, None)
        del self._local.modes

    def make_stream(self) -> SimulatedStream:
        return SimulatedStream(self, f"stream {next(self._numbers)}")

    def current_stream(self) -> SimulatedStream:
        return getattr(self._local, "stream", self._main)

    @contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        before = self.current_stream()
        if not self.skips("use_stream", 3):
            self.check_thread()
            self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def make_event(self, *, timed: bool = False) -> SimulatedEvent:
        return SimulatedEvent(self)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        pinned = not self.skips("host_memory")
        with self._alone():
            made = torch.empty(tuple(shape), dtype=dtype)
            poison(made)
        if pinned:
            with self._lock:
                self._add(made, None)
        return made

    def memory_for(self, host: Tensor) -> Tensor:
        with self._alone():
            made = torch.empty_like(host)
            poison(made)
        with self._lock:
            self._add(made, self.current_stream())
        return made

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.check_thread()
        place = here()
        with self._lock, self._alone():
            for tensor in (target, source):
                if key_of(tensor) not in self._memory:
                    raise HazardError(
                        f"memory that is not pinned is copied without a wait: {place}"
                    )
            stream = self.current_stream()
            number = self._queue(stream)
            memory, now = self._memory[key_of(source)], checksum(source)
            if memory.home is None and memory.checksum not in (None, now):
                self._host_uses(memory, extent(source), True, place)  # numpy is not watched
            memory.checksum = now
            self._use(source, stream, number, False, place)
            self._use(target, stream, number, True, place)
            self._late.append(LateCopy(target, source, stream.clock.copy(), now, place))
            poison(target)

    def record_use(self, tensor: Tensor, stream: SimulatedStream) -> None:
        if not self.skips("record_use"):
            with self._lock:
                self._memory[key_of(tensor)].used_on.add(stream.name)

    def free_nbytes(self) -> int:
        return 1 << 30

    def identity(self) -> str:
        return "simulated"

    def synchronize(self) -> None:
        with self._lock:
            everything: Clock = Counter()
            for copy in self._late:
                everything |= copy.clock
            self.host_waits(everything)

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: Tensor) -> None:
        raise AssertionError("a simulated device has no generator of its own")

    # ------------------------------------------------------------------------- for its parts

    def stall(self) -> None:
        """Queues a call that never ends."""
        with self._lock:
            stream = self.current_stream()
            if self._stalled is None:
                self._stalled = Counter({stream.name: self._queue(stream)})

    def abort(self) -> None:
        """Ends a stalled call."""
        self._stalled = None

    @property
    def stalled(self) -> bool:
        return self._stalled is not None

    @property
    def watches(self) -> bool:
        return hasattr(self._local, "modes")

    def check_thread(self) -> None:
        if not self.watches:
            raise HazardError(f"a thread that has not entered the device uses it: {here()}")

    def skips(self, method: str, depth: int = 2) -> bool:
        """Whether the call of a method of the seam by the function above does nothing."""
        # Python 3.12 has no function of its own for a comprehension any more.
        caller = sys._getframe(depth).f_code.co_qualname.removesuffix(".<locals>.<dictcomp>")
        if self._skip != (method, caller):
            return False
        self.skipped += 1
        return True

    def passed(self, clock: Clock) -> bool:
        """Whether everything up to there has run; then the host knows. Mostly not yet."""
        with self._lock, self._alone():
            self._progress()
            if clock <= self._host:
                return True
            if self._never(clock):
                return False
            if self._random.random() < LATE or any(copy.clock <= clock for copy in self._late):
                return False
            self._host |= clock
            return True

    def host_waits(self, clock: Clock) -> None:
        with self._lock, self._alone():
            if self._never(clock):
                raise HazardError(f"the host waits for what never ends: {here()}")
            self._run_up_to(clock)
            self._host |= clock

    def to_host(self, tensor: Tensor) -> Tensor:
        """`Tensor.cpu`, which waits."""
        place = here()
        with self._lock, self._alone():
            if not self._on_device(tensor):
                return tensor
            stream = self.current_stream()
            self._use(tensor, stream, self._queue(stream), False, place)
            self.host_waits(stream.clock)
            return tensor.clone()

    def to_device(self, tensor: Tensor, moved: Tensor) -> Tensor:
        """`Tensor.to`, of memory of the host to the device: a copy, for which the host waits."""
        with self._lock, self._alone():
            if self._on_device(tensor):
                return moved
            made = moved.clone() if moved is tensor else moved
            self._add(made, self.current_stream())
        return made

    def host_reads(self, tensor: Tensor) -> None:
        """`Tensor.numpy`."""
        with self._lock:
            memory = self._memory.get(key_of(tensor))
            if memory is not None and memory.home is None:
                self._host_uses(memory, extent(tensor), False, here())

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One call of torch: check what it uses, run it, and note what it made."""
        if getattr(self._local, "alone", False) or func.is_view:
            return func(*args, **kwargs)
        place = here()
        with self._lock, self._alone():
            self._progress()
            used = list(uses_of(func, args, kwargs))
            known = [self._memory.get(key_of(tensor)) for tensor, _ in used]
            stream = self.current_stream()
            made_there = not used and kwargs.get("device") is not None
            on_device = made_there or any(memory and memory.home for memory in known)
            number = self._queue(stream) if on_device else 0
            for (tensor, writes), memory in zip(used, known, strict=True):
                if memory is not None and memory.home is None:
                    self._host_uses(memory, extent(tensor), writes, place)
                elif memory is not None:
                    self._use(tensor, stream, number, writes, place)
            made = func(*args, **kwargs)
            for tensor in tree_leaves(made) if on_device else ():
                if isinstance(tensor, Tensor) and key_of(tensor) not in self._keys(used):
                    self._add(tensor, stream)
                    if "empty" in func.__name__:
                        poison(tensor)
                    self._use(tensor, stream, number, True, place)
            if func is torch.ops.aten._local_scalar_dense.default:
                self.host_waits(stream.clock)
        return made

    # ------------------------------------------------------------------------- within

    def _never(self, clock: Clock) -> bool:
        return self._stalled is not None and self._stalled <= clock

    def _on_device(self, tensor: Tensor) -> bool:
        memory = self._memory.get(key_of(tensor))
        return memory is not None and memory.home is not None

    @staticmethod
    def _keys(used: list[tuple[Tensor, bool]]) -> set[int]:
        return {key_of(tensor) for tensor, _ in used}

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Calls of torch are the simulation's own."""
        before = getattr(self._local, "alone", False)
        self._local.alone = True
        try:
            yield
        finally:
            self._local.alone = before

    def _queue(self, stream: SimulatedStream) -> int:
        """Number a call on a stream; it runs after all that the host knows to have run."""
        stream.clock |= self._host
        stream.clock[stream.name] += 1
        return stream.clock[stream.name]

    def _add(self, tensor: Tensor, home: SimulatedStream | None) -> None:
        key = key_of(tensor)
        for freed in [k for k, memory in self._memory.items() if memory.ref.expired()]:
            self._check_freed(self._memory.pop(freed))
        if key not in self._memory:
            self._memory[key] = Memory(StorageWeakRef(tensor.untyped_storage()), home)

    def _check_freed(self, memory: Memory) -> None:
        """Memory of the host is kept by its allocator until copies of it have run."""
        if memory.home is None:
            return
        home = memory.home
        for use in memory.uses:
            mine = use.stream == home.name or use.stream in memory.used_on
            if not mine and home.clock[use.stream] < use.number:
                raise HazardError(
                    f"memory of {home.name} was freed, while {use.stream} may use it: {use.place}"
                )

    def _use(
        self, tensor: Tensor, stream: SimulatedStream, number: int, writes: bool, place: str
    ) -> None:
        """Check a use on a stream against those before it, and note it."""
        memory = self._memory[key_of(tensor)]
        first, stop = extent(tensor)
        kept = []
        for use in memory.uses:
            apart = use.stop <= first or stop <= use.first
            before = use.number <= stream.clock[use.stream]
            if not apart and (writes or use.writes) and not before:
                raise HazardError(
                    f"{stream.name} {'writes' if writes else 'reads'} at {place} what {use.stream} "
                    f"{'writes' if use.writes else 'reads'} at {use.place}, with no order"
                )
            covered = first <= use.first and use.stop <= stop and (writes or not use.writes)
            if not (before and covered):
                kept.append(use)
        memory.uses = [*kept, Use(first, stop, stream.name, number, writes, place)]
        for copy in [copy for copy in self._late if copy.uses(key_of(tensor))]:
            self._run_up_to(copy.clock)

    def _host_uses(self, memory: Memory, extent: tuple[int, int], writes: bool, place: str) -> None:
        first, stop = extent
        for use in memory.uses:
            apart = use.stop <= first or stop <= use.first
            if not apart and (writes or use.writes) and use.number > self._host[use.stream]:
                raise HazardError(
                    f"the host {'writes' if writes else 'reads'} at {place} what {use.stream} "
                    f"{'writes' if use.writes else 'reads'} at {use.place}, without waiting for it"
                )

    def _progress(self) -> None:
        """Perhaps run a copy that nothing needs yet."""
        if self._late and self._random.random() < PROGRESS:
            self._run_up_to(self._random.choice(self._late).clock)

    def _run_up_to(self, clock: Clock) -> None:
        """Run the late copies that are ordered before a moment, in the order of their calls."""
        due = [copy for copy in self._late if copy.clock <= clock]
        self._late = [copy for copy in self._late if copy not in due]
        for copy in due:
            if checksum(copy.source) != copy.checksum:
                raise HazardError(f"what a copy reads has changed before it ran: {copy.place}")
            copy.target.copy_(copy.source)


class Calls(TorchDispatchMode):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.called(func, args, kwargs or {})


class Reads(TorchFunctionMode):
    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.numpy:
            self._device.host_reads(args[0])
        if func is Tensor.cpu:
            return self._device.to_host(args[0])
        found = func(*args, **(kwargs or {}))
        if func is Tensor.to and any(isinstance(given, torch.device) for given in args[1:]):
            return self._device.to_device(args[0], found)
        return found


@contextmanager
def simulated(seed: int = 0, skip: tuple[str, str] | None = None) -> Iterator[SimulatedDevice]:
    """Makes all devices one simulated device, which the calling thread has entered."""
    device = SimulatedDevice(seed, skip)
    before = choice.DEVICES["cpu"]
    choice.DEVICES["cpu"] = lambda _: device
    device.enter_thread()
    try:
        yield device
    finally:
        device.leave_thread()
        choice.DEVICES["cpu"] = before


def uses_of(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Tensor, bool]]:
    """The tensors that a call gets, and whether it writes to each."""
    schema = func._schema.arguments
    for number, argument in enumerate(schema):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                yield tensor, writes


def key_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in."""
    if not tensor.numel():
        return 0, 0
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    stop = first + 1 + sum(int((size - 1) * stride) for size, stride in strides)
    return first * tensor.itemsize, stop * tensor.itemsize


def poison(tensor: Tensor) -> None:
    if tensor.numel():
        first, stop = extent(tensor)
        flat = tensor.detach().as_strided(((stop - first) // tensor.itemsize,), (1,))
        flat.view(torch.uint8).fill_(POISON)


def checksum(tensor: Tensor) -> int:
    return crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def here() -> str:
    """The innermost place in a file of ours that is not this one, with what called it."""
    frames = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in traceback.extract_stack(limit=40)
        if frame.filename.startswith(str(ROOT))
        and "site-packages" not in frame.filename
        and frame.filename != __file__
    ]
    return " < ".join(frames[:-3:-1])

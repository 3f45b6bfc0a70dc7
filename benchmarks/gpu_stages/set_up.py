"""What is installed, and each method of the device that `penstock.device` makes of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.cuda import nccl

from gpu_stages.finding import Finding, Options
from penstock.device.choice import device_of
from penstock.device.interface import Device

SIZE = 1 << 20
SPIN = 20_000_000  # cycles of a GPU, some milliseconds


def run(options: Options) -> Iterator[Finding]:
    yield Finding("torch", torch.__version__)
    yield Finding("cores", len(os.sched_getaffinity(0)))
    device = device_of(torch.device(options.place))
    device.enter_thread()
    for name, check in CHECKS.items():
        try:
            yield Finding(name, check(device))
        except Exception as error:  # go on with the other checks
            yield Finding(name, False, f"{type(error).__name__}: {error}")
    if not options.small:
        yield from _gpu()  # last, as the driver's program may fail


def _gpu() -> Iterator[Finding]:
    yield Finding("CUDA", torch.version.cuda)
    yield Finding("driver", _driver())
    yield Finding("cuDNN", str(torch.backends.cudnn.version()))
    if torch.distributed.is_nccl_available():
        yield Finding("NCCL", ".".join(map(str, nccl.version())))
    about = torch.cuda.get_device_properties(0)
    yield Finding("GPU", about.name)
    yield Finding("memory, GB", about.total_memory / 1e9)
    yield Finding("compute capability", f"{about.major}.{about.minor}")
    yield Finding("bf16", torch.cuda.is_bf16_supported(including_emulation=False))


def _driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return "nvidia-smi is not installed"
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip().partition("\n")[0]


def busy(device: Device) -> None:
    """Occupy the current stream for some milliseconds."""
    if device.runs_behind:
        torch.cuda._sleep(SPIN)


def _host_memory(device: Device) -> bool:
    memory = device.host_memory([SIZE], torch.float32)
    return memory.is_pinned() == device.runs_behind and memory.shape == (SIZE,)


def _copies(device: Device) -> bool:
    there, back = _pair(device)
    here = device.host_memory([SIZE], torch.float32).copy_(torch.arange(SIZE))
    device.copy(there, here)
    there.add_(1)
    device.copy(back, there)
    device.synchronize()
    return bool((back == torch.arange(1, SIZE + 1)).all())


def _streams(device: Device) -> bool:
    """What a stream computes after an event, and another after that stream."""
    there, back = _pair(device)
    first, second, event = device.make_stream(), device.make_stream(), device.make_event()
    first.wait_stream(device.current_stream())  # which made the memory
    with device.use_stream(first):
        inside = device.current_stream() == first
        busy(device)
        there.fill_(3)
        event.record(first)
    with device.use_stream(second):
        second.wait_event(event)
        there.mul_(2)
    device.current_stream().wait_stream(second)
    device.copy(back, there)
    device.synchronize()
    return inside and bool((back == 6).all())


def _events(device: Device) -> bool:
    never, event = device.make_event(), device.make_event()
    passed_unrecorded = never.query()
    never.synchronize()
    busy(device)
    event.record()
    behind = not event.query()
    event.synchronize()
    return passed_unrecorded and behind == device.runs_behind and event.query()


def _timed_events(device: Device) -> bool:
    begin, end = (device.make_event(timed=True) for _ in range(2))
    begin.record()
    busy(device)
    end.record()
    end.synchronize()
    return (begin.elapsed_time(end) > 1.0) == device.runs_behind


def _record_use(device: Device) -> bool:
    """Memory that another stream uses is not given to new tensors before."""
    side, current = device.make_stream(), device.current_stream()
    _, back = _pair(device)
    with device.use_stream(side):
        used = torch.ones(SIZE, device=device.torch_device)
    current.wait_stream(side)
    busy(device)
    doubled = used * 2
    device.record_use(used, current)
    del used
    with device.use_stream(side):
        torch.full((SIZE,), 5.0, device=device.torch_device)
    device.copy(back, doubled)
    device.synchronize()
    return bool((back == 2).all())


def _random_state(device: Device) -> bool:
    state = device.random_state()
    if state is None:
        return not device.runs_behind
    drawn = torch.rand(9, device=device.torch_device)
    device.set_random_state(state)
    return bool((torch.rand(9, device=device.torch_device) == drawn).all())


def _synchronize(device: Device) -> bool:
    event = device.make_event()
    busy(device)
    event.record()
    device.synchronize()
    return event.query()


def _second_thread(device: Device) -> bool:
    """A thread that has entered computes on this device."""
    found: list[Tensor] = []

    def work() -> None:
        device.enter_thread()
        with device.use_stream(device.make_stream()):
            where = torch.device(device.torch_device.type)  # without an index
            found.append(torch.ones(3, device=where) + 1)
            device.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return [t.device for t in found] == [device.torch_device] and found[0].tolist() == [2, 2, 2]


def _pair(device: Device) -> tuple[Tensor, Tensor]:
    """Memory of the device, and another of the host for its copy."""
    there = device.memory_for(torch.zeros(SIZE))
    return there, device.host_memory([SIZE], torch.float32)


CHECKS: dict[str, Callable[[Device], bool]] = {
    "host_memory is pinned": _host_memory,
    "copy brings values there and back": _copies,
    "streams wait for events and streams": _streams,
    "events say whether they have passed": _events,
    "timed events tell times": _timed_events,
    "record_use keeps memory": _record_use,
    "random_state returns": _random_state,
    "synchronize waits": _synchronize,
    "enter_thread in a second thread": _second_thread,
}

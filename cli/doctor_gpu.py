"""The GPU part of `penstock doctor`: which GPUs the machine has, whether torch can use them, and
what makes them slow.

`examine` gathers the facts; `describe` and `warnings` read nothing else, so that they are tested
with the facts of other machines.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from penstock.core.formatting import size
from penstock.core.machine import gpu_models, version_of

Facts = dict[str, Any]
Capability = list[int]
"""Compute capability, major and minor, such as [9, 0]."""

NO_CUDA: Facts = {
    "present": 0,  # GPUs of the machine
    "driver": None,
    "visible": None,  # the value of CUDA_VISIBLE_DEVICES
    "torch": None,
    "built_for": None,  # a CUDA version; None for a CPU build
    "nccl": None,
    "cudnn": None,
    "archs": [],  # GPU architectures, such as sm_90, for which torch has code
    "error": None,  # the reason for which torch can use no GPU
    "no_peers": [],  # pairs of GPUs that cannot access each other's memory
}
"""The facts "cuda" of a machine with neither GPU nor torch."""
DEVICES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia/version")
GIB = 1 << 30

FAST_BF16: Capability = [8, 0]
CORES_PER_GPU = 4
NCCL_SHM_NBYTES = GIB
"""What NCCL's documentation recommends for containers: --shm-size=1g."""
OTHERS_NBYTES = 2 * GIB
"""More than a CUDA context needs, such as that of the doctor itself: about 0.5 GiB."""


class Build(NamedTuple):
    """A build of torch for a CUDA version."""

    cuda: str
    driver: int
    """The oldest driver of that CUDA major version (NVIDIA, CUDA Compatibility, table 1)."""
    capabilities: tuple[Capability, Capability]
    """The lowest and highest compute capability that it supports (RELEASE.md of torch)."""

    def command(self) -> str:
        """Returns the command that installs it.

        The local version (+cu130) replaces a CPU build of the same version, which pip would
        otherwise keep.
        """
        tag = f"cu{self.cuda.replace('.', '')}"
        index = f"https://download.pytorch.org/whl/{tag}"
        return f"{sys.executable} -m pip install torch=={TORCH}+{tag} --index-url {index}"


TORCH = "2.13.0"
"""The version in constraints.txt."""
# The first build that fits is recommended. The first of all is that of constraints-cuda.txt. Its
# highest capability is open, as newer GPUs translate its PTX.
BUILDS = (
    Build("13.0", driver=580, capabilities=([7, 5], [99, 0])),
    Build("12.6", driver=525, capabilities=([5, 0], [9, 0])),
)


def examine(devices: Path = DEVICES, driver: Path = DRIVER) -> Facts:
    """Returns the facts about GPUs: "gpu" has one entry for each, "cuda" is about driver and torch.

    A GPU is found by its device file, such as /dev/nvidia0, without which no process can use it.
    The driver's version is in /proc. Both can be read without a CUDA build of torch, and cannot
    hang; nvidia-smi can, and many containers lack it.

    Args:
        devices: the folder of device files.
        driver: the file in which the kernel's driver names its version.
    """
    # What the system says.
    paths = [path for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    cuda = NO_CUDA | {
        "present": len(paths),
        "driver": driver_version(driver),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }

    # What torch says of its build, and of the GPUs that it can use.
    gpus: list[Facts] = []
    if version_of("torch") is not None:
        build, gpus = _torch_facts()
        cuda |= build

    # GPUs that torch cannot use: the driver may know their names.
    if not gpus:
        names = gpu_models()
        if len(names) != len(paths):
            names = ["NVIDIA GPU"] * len(paths)
        gpus = [{"name": name, "capability": None} for name in names]
    return {"gpu": gpus, "cuda": cuda}


def driver_version(path: Path = DRIVER) -> str | None:
    """Returns the version of NVIDIA's kernel driver, such as "580.159.04"; None without one."""
    try:
        first_line = path.read_text().partition("\n")[0]
    except OSError:
        return None
    match = re.search(r"\s(\d+(?:\.\d+)+)(?:\s|$)", first_line)
    return match[1] if match else None


def describe(facts: Facts) -> list[str]:
    """Returns two lines of text: the GPUs, and the build of torch."""
    cuda = facts["cuda"]

    kinds = Counter(_kind(gpu) for gpu in facts["gpu"])
    gpus = ", ".join(kind if n == 1 else f"{n} x {kind}" for kind, n in kinds.items())
    if gpus:
        gpus += f", driver {cuda['driver'] or 'unknown'}"
    if len(_usable(facts)) > 1:
        gpus += f", peer access {'no' if cuda['no_peers'] else 'yes'}"

    if cuda["torch"] is None:
        build = "none"
    elif cuda["built_for"] is None:
        build = f"{cuda['torch']}, CPU only"
    else:
        versions = {"CUDA": cuda["built_for"], "cuDNN": cuda["cudnn"], "NCCL": cuda["nccl"]}
        libraries = [f"{name} {version}" for name, version in versions.items() if version]
        build = ", ".join((cuda["torch"], *libraries))

    return [f"gpu       {gpus or 'none (no device file /dev/nvidiaN)'}", f"torch     {build}"]


def warnings(facts: Facts) -> Iterator[str]:
    """Yield sentences about problems with GPUs, each with a remedy."""
    for check in (_about_build, _about_capability, _about_memory_in_use, _about_the_host):
        yield from check(facts)


def _about_build(facts: Facts) -> Iterator[str]:
    """Yield the reason for which torch uses no GPU although there is one, if that is so."""
    cuda = facts["cuda"]
    torch = cuda["torch"]
    driver = cuda["driver"]
    if not cuda["present"] or torch is None:
        return
    if cuda["built_for"] is None:
        yield f"torch {torch} is a CPU build, so the GPU is not used; {_how_to_install(driver)}"
        return

    error = cuda["error"]
    if error is None:
        return

    # torch could not initialise CUDA: the driver is too old, the GPU is hidden, or neither.
    oldest_driver = _oldest_driver(cuda["built_for"])
    if oldest_driver > _major(driver):
        yield (
            f"torch {torch} is built for CUDA {cuda['built_for']}, which needs driver "
            f"{oldest_driver} or newer, and this is {driver}; {_how_to_install(driver)}"
        )
    elif cuda["visible"] is not None:
        yield (
            f"torch {torch} finds no GPU ({error}), as CUDA_VISIBLE_DEVICES is "
            f"{cuda['visible']!r}; unset it, or name a GPU"
        )
    else:
        yield (
            f"torch {torch} cannot use the GPU ({error}); nvidia-smi must list it, so repair the "
            "driver, or start the container with --gpus all"
        )


def _about_capability(facts: Facts) -> Iterator[str]:
    """Yield warnings about models of GPUs for which torch has no code, or no fast bfloat16."""
    cuda = facts["cuda"]
    models = {gpu["name"]: gpu["capability"] for gpu in _usable(facts)}
    for name, capability in models.items():
        version = ".".join(map(str, capability))

        if cuda["archs"] and not _has_code(cuda["archs"], capability):
            yield (
                f"torch {cuda['torch']} has no code for {name} of compute capability {version}, "
                f"only for {' '.join(cuda['archs'])}, so all kernels fail; set "
                f"learner.device=cpu, or {_how_to_install(cuda['driver'], capability)}"
            )
        elif capability < FAST_BF16:
            yield (
                f"{name} has compute capability {version}, and bfloat16 is fast from 8.0 on; set "
                "learner.precision=fp32, as auto is bf16 for networks with convolutions"
            )


def _about_memory_in_use(facts: Facts) -> Iterator[str]:
    """Yield warnings about GPUs that other programs use."""
    for i, gpu in enumerate(_usable(facts)):
        if gpu["memory"] - gpu["free"] > OTHERS_NBYTES:
            yield (
                f"GPU {i} ({gpu['name']}) has {size(gpu['free'])} of {size(gpu['memory'])} free, "
                "as other programs use it, and they slow a run down too; end them (nvidia-smi "
                "lists them), or name another GPU: learner.device=cuda:N"
            )


def _about_the_host(facts: Facts) -> Iterator[str]:
    """Yield warnings about cores, shared memory and links between GPUs that are not enough.

    The limit of locked memory is not checked: pinned memory is locked by NVIDIA's driver, to which
    RLIMIT_MEMLOCK does not apply. /dev/shm matters to NCCL alone, as Penstock uses memfd.
    """
    gpu_count = len(_usable(facts))
    cores = facts["cores"]
    allowed_cores = min(cores["usable"], cores["cgroup"] or cores["usable"])
    if gpu_count and allowed_cores / gpu_count < CORES_PER_GPU:
        gpus = "1 GPU" if gpu_count == 1 else f"{gpu_count} GPUs"
        yield (
            f"{allowed_cores:g} cores for {gpus} are few, as learner, gather "
            f"threads and actors share them; use {CORES_PER_GPU} or more for each GPU, or add "
            "actors on other hosts"
        )

    dev_shm_nbytes = facts["memory"]["dev_shm"]
    if gpu_count > 1 and dev_shm_nbytes < NCCL_SHM_NBYTES:
        yield (
            f"/dev/shm has {size(dev_shm_nbytes)}, and NCCL recommends "
            f"{size(NCCL_SHM_NBYTES)} for several GPUs; start the container with --shm-size=1g"
        )

    no_peers = facts["cuda"]["no_peers"]
    if no_peers:
        first, second = no_peers[0]
        yield (
            f"GPUs {first} and {second} cannot access each other's memory, so gradients "
            "between learners pass through the host's; nvidia-smi topo -p2p r shows the reason"
        )


def _how_to_install(driver: str | None, capability: Capability | None = None) -> str:
    """Returns a clause on how to get a build of torch that runs with a driver and on a GPU.

    ``capability`` is that of the GPU; None if it is not known.
    """
    for build in BUILDS:
        oldest, newest = build.capabilities
        fits = capability is None or oldest <= capability <= newest
        if fits and _major(driver) >= build.driver:
            return f"install a build for it: {build.command()}"
    return f"update the driver to {BUILDS[0].driver} or newer, then run {BUILDS[0].command()}"


def _major(driver: str | None) -> int:
    """Returns the major version of a driver. An unknown driver counts as new."""
    return int(driver.partition(".")[0]) if driver else BUILDS[0].driver


def _oldest_driver(cuda: str) -> int:
    """Returns the oldest driver for a CUDA version; 0 if it is not known."""
    major = cuda.partition(".")[0]
    return next((b.driver for b in BUILDS if b.cuda.partition(".")[0] == major), 0)


def _has_code(archs: list[str], capability: Capability) -> bool:
    """Returns whether a GPU runs the code of one of ``archs``.

    It runs machine code (sm_86) of its own major version and no newer minor one, and PTX
    (compute_90) of no newer version.

    Args:
        archs: architectures, as of `torch.cuda.get_arch_list`.
        capability: the GPU's compute capability.
    """
    for kind, digits in re.findall(r"(sm|compute)_(\d+)", " ".join(archs)):
        major, minor = divmod(int(digits), 10)
        is_ptx = kind == "compute"
        if [major, minor] <= capability and (is_ptx or major == capability[0]):
            return True
    return False


def _usable(facts: Facts) -> list[Facts]:
    """Returns the GPUs that torch can use; only of these the capability is known."""
    return [gpu for gpu in facts["gpu"] if gpu["capability"]]


def _kind(gpu: Facts) -> str:
    """Returns the name of a GPU and, if torch can use it, its properties."""
    if not gpu["capability"]:
        return str(gpu["name"])
    version = ".".join(map(str, gpu["capability"]))
    bf16 = "yes" if gpu["capability"] >= FAST_BF16 else "no"
    return f"{gpu['name']} ({size(gpu['memory'])}, compute capability {version}, bf16 {bf16})"


def _torch_facts() -> tuple[Facts, list[Facts]]:
    """Returns what torch says of its build, and of the GPUs that it can use.

    The first are some of the facts of `NO_CUDA`, the second an entry of `_gpu` for each GPU.
    """
    import torch

    # The build: its version, the libraries that it is linked with, and the GPUs it has code for.
    build: Facts = {"torch": torch.__version__, "built_for": torch.version.cuda}
    if torch.version.cuda is None:
        return build, []
    if torch.distributed.is_nccl_available():
        build["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    cudnn = torch.backends.cudnn.version()
    if cudnn:
        # cuDNN writes its version as one number, since 9.0 with two digits for the patch level.
        build["cudnn"] = f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}"
    build["archs"] = torch.cuda.get_arch_list()

    # It fails without a driver, with an old one, and if no GPU is visible. The first sentence of
    # the error says which.
    try:
        torch.cuda.init()
    except RuntimeError as error:
        build["error"] = re.split(r"\.?\n|\. (?=[A-Z])", str(error))[0]
        return build, []

    devices = range(torch.cuda.device_count())
    build["no_peers"] = [
        [i, j] for i, j in combinations(devices, 2) if not torch.cuda.can_device_access_peer(i, j)
    ]
    return build, [_gpu(i) for i in devices]


def _gpu(index: int) -> Facts:
    """Returns name, memory in bytes and compute capability of a GPU that torch can use."""
    import torch

    device = torch.cuda.get_device_properties(index)
    try:
        free = torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # other programs have taken all memory, or the GPU for themselves
        free = 0
    return {
        "name": device.name,
        "memory": device.total_memory,
        "free": free,
        "capability": [device.major, device.minor],
    }

"""`penstock doctor`: the machine's resources, and warnings about problems for a run."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from penstock.autotune.envs import cached_choices
from penstock.autotune.forms import Task, Timing, cached_timings, time_forms
from penstock.cli import doctor_gpu
from penstock.configs.model import ModelConfig
from penstock.core import cgroup
from penstock.core.formatting import size
from penstock.core.machine import processor, version_of
from penstock.models.actions import discrete
from penstock.models.compute_form import Options, UpdateSize, training_forms
from penstock.models.layout import CnnShape

PACKAGES = (
    "numpy", "torch", "gymnasium", "ale-py", "pyzmq", "msgpack", "cramjam", "python-snappy",
    "safetensors", "pydantic", "ruamel.yaml", "typer", "rich", "psutil",
)  # fmt: skip
OPTIONAL = ("ale-py",)
LOW_MEMORY_NBYTES = 4 << 30
LOW_NOFILE = 1024
# The most cached timings and choices that are shown.
SHOWN = 5
# The network that is timed, the Nature CNN on Atari's observations, and the rows of its update.
STANDARD = Task(
    shape=CnnShape(4, 84, 84, discrete(6), 1 / 255),
    observation=((4, 84, 84), "|u1"),
    model=ModelConfig(),
    learns=True,
    threads=1,
)
STANDARD_UPDATE = UpdateSize(512)

Facts = dict[str, Any]


def examine() -> Facts:
    """Returns the facts about this machine by topic, as JSON values.

    Sizes are in bytes; -1 is an unlimited one. None stands for a control group without a limit, and
    for a fact that is not known. The topic "warnings" is a list of sentences about problems.

    The training of a network is timed, which takes a second unless its times are cached.
    """
    timing = None if version_of("torch") is None else standard_timing()
    nofile, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)

    facts: Facts = {
        "system": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
        },
        "cores": _cores(timing),
        "forms": {
            "nature_cnn": None if timing is None else str(timing),
            "cached": _cached(timing),
        },
        "envs": cached_choices()[:SHOWN],
        "memory": _memory(),
        "limits": {
            "nofile": nofile,
            "memlock": memlock,
        },
        "packages": {name: version_of(name) for name in PACKAGES},
        "curve": _has_curve(),
        "bytecode": _has_bytecode("torch"),
        **doctor_gpu.examine(),
    }
    return facts | {"warnings": warnings(facts)}


def warnings(facts: Facts) -> list[str]:
    """Returns sentences about problems for a run, each with a remedy."""
    checks = (_about_system, _about_cores, _about_memory, _about_packages, doctor_gpu.warnings)
    return [text for check in checks for text in check(facts)]


def describe(facts: Facts) -> str:
    """Returns the facts of `examine` as text: a line for each topic, then the warnings."""
    cores = facts["cores"]
    memory = facts["memory"]
    limits = facts["limits"]
    cores_quota = "none" if cores["cgroup"] is None else f"{cores['cgroup']:g}"
    memory_limit = "none" if memory["cgroup"] is None else size(memory["cgroup"])
    packages = [f"{name} {version}" for name, version in facts["packages"].items() if version]

    lines = [
        f"system    {' '.join(map(str, facts['system'].values()))}",
        f"cores     {cores['usable']} usable of {cores['present']}, cgroup quota {cores_quota}, "
        f"load {cores['load']:.1f}, bf16 {_about_bf16(cores)}",
        *_about_forms(facts["forms"]),
        *(f"envs      {text}" for text in facts["envs"]),
        f"memory    {size(memory['available'])} free of {size(memory['total'])}, cgroup limit "
        f"{memory_limit}, /dev/shm {size(memory['dev_shm'])}",
        f"limits    {limits['nofile']} open files, {size(limits['memlock'])} locked memory",
        *doctor_gpu.describe(facts),
        f"curve     {'yes' if facts['curve'] else 'no'}",
        f"packages  {', '.join(packages)}",
    ]
    problems = [f"warning   {text}" for text in facts["warnings"]]
    return "\n".join(lines + (problems or ["no problems found"]))


def _about_system(facts: Facts) -> Iterator[str]:
    """Yield warnings about the operating system and the processor's architecture."""
    system = facts["system"]
    if system["system"] != "Linux":
        yield f"this is {system['system']}: only configs and the replay library work here"
    elif system["machine"] != "x86_64":
        yield f"this is {system['machine']}: Penstock is tested on x86-64 only"


def _about_cores(facts: Facts) -> Iterator[str]:
    """Yield warnings about too few cores, or cores that are busy."""
    cores = facts["cores"]
    usable = cores["usable"]
    quota = cores["cgroup"]
    allowed = usable if quota is None else min(usable, quota)

    if allowed < usable:
        yield (
            f"the control group limits this process to {quota:g} of {usable} cores and throttles "
            "above that; keep the numbers of actors and of learner threads near that number"
        )
    if allowed < 2:
        yield "fewer than two cores are available, so actors and learner share one; use more cores"

    # The kernel's load is that of all cores, also of those that this process may not use.
    if cores["load"] > cores["present"]:
        yield (
            f"the load is {cores['load']:.1f} on {cores['present']} cores, so other programs slow "
            "a run down; end them, or wait"
        )


def _about_memory(facts: Facts) -> Iterator[str]:
    """Yield warnings about too little memory, or too few file descriptors."""
    memory = facts["memory"]
    free_nbytes = memory["available"]
    if memory["cgroup"] is not None:
        free_nbytes = min(free_nbytes, memory["cgroup"])
    if free_nbytes < LOW_MEMORY_NBYTES:
        yield "less than 4 GiB of memory is free; lower actors.count if processes are killed"

    # An unlimited number is -1.
    nofile = facts["limits"]["nofile"]
    if 0 <= nofile < LOW_NOFILE:
        yield f"{nofile} open files are few for many actors; raise the limit with: ulimit -n 4096"


def _about_packages(facts: Facts) -> Iterator[str]:
    """Yield warnings about packages that are missing, or are installed without a part."""
    absent = [name for name, version in facts["packages"].items() if version is None]
    required = [name for name in absent if name not in OPTIONAL]
    if required:
        yield f"missing packages: {', '.join(required)}; install penstock with its dependencies"
    if "ale-py" in absent:
        yield "ale-py is missing, so Atari does not work; install penstock[atari]"

    if facts["curve"] is False:
        yield "libzmq has no CURVE, so transport.curve does not work; install pyzmq's own wheel"
    if facts["bytecode"] is False:
        yield (
            "torch has no cached bytecode, so each process takes seconds longer to start; run "
            f"{sys.executable} -m compileall -q {_origin('torch').parent}"
        )


def standard_timing() -> Timing:
    """Time the training of the Nature CNN on Atari's observations, in all forms of this processor.

    It takes a second, unless its times are cached.
    """
    options = Options("auto", "auto", None)
    has_bf16 = processor().has_bf16
    forms = training_forms(STANDARD.shape, options, STANDARD_UPDATE, has_bf16=has_bf16)
    return time_forms(STANDARD, forms)


def _cached(standard: Timing | None) -> list[str]:
    """Returns the newest cached timings but for ``standard``, which has a line of its own."""
    standard_text = f"{STANDARD.name}: {standard and standard._replace(cached=True)}"
    return [text for text in cached_timings().values() if text != standard_text][:SHOWN]


def _cores(timing: Timing | None) -> Facts:
    """Returns the facts about cores; ``timing`` tells whether bfloat16 is the faster format."""
    return {
        "present": os.cpu_count(),
        "usable": len(psutil.Process().cpu_affinity()),
        "cgroup": cgroup.cores(),
        "load": psutil.getloadavg()[0],
        "bf16": processor().has_bf16,
        "bf16_faster": None if timing is None else timing.form.precision == "bf16",
    }


def _memory() -> Facts:
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")
    return {
        "total": memory.total,
        "available": memory.available,
        "cgroup": cgroup.memory_nbytes(),
        "dev_shm": shutil.disk_usage(shm).total if shm.is_dir() else 0,
    }


def _about_bf16(cores: Facts) -> str:
    """Returns whether the processor has instructions for bfloat16, and whether they are used."""
    if not cores["bf16"]:
        return "no"
    if cores["bf16_faster"] is None:
        return "yes"
    if cores["bf16_faster"]:
        return "yes, faster than fp32"
    return "yes, slower than fp32 and so not used"


def _about_forms(forms: Facts) -> Iterator[str]:
    if forms["nature_cnn"] is not None:
        yield f"forms     training of the Nature CNN: {forms['nature_cnn']}"
    for text in forms["cached"]:
        yield f"          {text}"


def _has_curve() -> bool | None:
    """Returns whether libzmq can encrypt connections; None if pyzmq is not installed."""
    if version_of("pyzmq") is None:
        return None
    import zmq

    return bool(zmq.has("curve"))


def _has_bytecode(module: str) -> bool | None:
    """Returns whether a module's bytecode is cached; None if the module is not installed."""
    if importlib.util.find_spec(module) is None:
        return None
    return Path(importlib.util.cache_from_source(str(_origin(module)))).exists()


def _origin(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin if spec and spec.origin else "")

"""The GPU part of `penstock doctor`, with facts of machines that have GPUs."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.cli import doctor_gpu

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
CU130 = "pip install torch==2.13.0+cu130 --index-url https://download.pytorch.org/whl/cu130"
CU126 = "pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
CUDA_130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)

H100: dict[str, Any] = {
    "cores": {"usable": 16, "cgroup": None},
    "memory": {"dev_shm": 64 * GIB},
    "gpu": [
        {
            "name": "NVIDIA H100 80GB HBM3",
            "memory": 81559 << 20,
            "free": 81029 << 20,
            "capability": [9, 0],
        }
    ],
    "cuda": {
        "present": 1,
        "driver": "580.159.04",
        "visible": None,
        "torch": "2.13.0+cu130",
        "built_for": "13.0",
        "cudnn": "9.20.0",
        "nccl": "2.29.7",
        "error": None,
        "archs": CUDA_130,
        "no_peers": [],
    },
}
UNUSED: dict[str, Any] = {"gpu": [{"name": "NVIDIA H100 80GB HBM3", "capability": None}]}
CPU_ONLY: dict[str, Any] = {"torch": "2.13.0+cpu", "built_for": None, "archs": []}


def facts_of(number: int = 1, gpu: Any = None, **changes: Any) -> dict[str, Any]:
    """Facts of a machine with some H100; ``gpu`` changes each, or replaces all."""
    facts = copy.deepcopy(H100)
    facts["gpu"] = gpu if isinstance(gpu, list) else [facts["gpu"][0] | (gpu or {})] * number
    for topic, change in changes.items():
        facts[topic] |= change
    return facts


def warnings(number: int = 1, **changes: Any) -> list[str]:
    return list(doctor_gpu.warnings(facts_of(number, **changes)))


def test_an_h100_has_no_warning() -> None:
    assert warnings() == []
    assert doctor_gpu.describe(facts_of()) == [
        "gpu       NVIDIA H100 80GB HBM3 (79.6 GiB, compute capability 9.0, bf16 yes), driver "
        "580.159.04",
        "torch     2.13.0+cu130, CUDA 13.0, cuDNN 9.20.0, NCCL 2.29.7",
    ]


def test_equal_gpus_are_counted_on_one_line() -> None:
    assert warnings(2) == []
    line = doctor_gpu.describe(facts_of(2))[0]
    assert line.startswith("gpu       2 x NVIDIA H100 80GB HBM3 (79.6 GiB, ")
    assert line.endswith("driver 580.159.04, peer access yes")
    line = doctor_gpu.describe(facts_of(2, cuda={"no_peers": [[0, 1]]}))[0]
    assert line.endswith("peer access no")


def test_a_gpu_that_torch_does_not_use_is_described() -> None:
    assert doctor_gpu.describe(facts_of(**UNUSED, cuda=CPU_ONLY)) == [
        "gpu       NVIDIA H100 80GB HBM3, driver 580.159.04",
        "torch     2.13.0+cpu, CPU only",
    ]
    nothing = {"present": 0, "driver": None, "torch": None}
    assert doctor_gpu.describe(facts_of(gpu=[], cuda=nothing)) == [
        "gpu       none (no device file /dev/nvidiaN)",
        "torch     none",
    ]


@pytest.mark.parametrize(
    ("cuda", "start", "end"),
    [
        (CPU_ONLY, "torch 2.13.0+cpu is a CPU build, so the GPU is not used; install", CU130),
        (CPU_ONLY | {"driver": None}, "torch 2.13.0+cpu is a CPU build", CU130),
        (CPU_ONLY | {"driver": "550.54.15"}, "torch 2.13.0+cpu is a CPU build", CU126),
        (
            CPU_ONLY | {"driver": "470.256.02"},
            "torch 2.13.0+cpu is a CPU build, so the GPU is not used; update the driver to 580 or",
            CU130,
        ),
        (
            {"error": TOO_OLD.partition(". ")[0], "driver": "550.54.15"},
            "torch 2.13.0+cu130 is built for CUDA 13.0, which needs driver 580 or newer, and this "
            "is 550.54.15; install",
            CU126,
        ),
        (
            {"error": "No CUDA GPUs are available", "visible": ""},
            "torch 2.13.0+cu130 finds no GPU (No CUDA GPUs are available), as CUDA_VISIBLE_DEVICES "
            "is ''; unset it",
            "or name a GPU",
        ),
        (
            {"error": "Found no NVIDIA driver on your system", "driver": None},
            "torch 2.13.0+cu130 cannot use the GPU (Found no NVIDIA driver on your system); "
            "nvidia-smi must list it",
            "start the container with --gpus all",
        ),
    ],
)
def test_gpu_unusable_for_torch_is_reported_in_one_sentence(
    cuda: dict[str, Any], start: str, end: str
) -> None:
    [sentence] = warnings(**UNUSED, cuda=cuda)
    assert sentence.startswith(start)
    assert sentence.endswith(end)


def test_without_a_gpu_every_build_of_torch_is_fine() -> None:
    error = {"present": 0, "driver": None, "error": "Found no NVIDIA driver on your system"}
    assert warnings(gpu=[], cuda=error) == []
    assert warnings(gpu=[], cuda=error | CPU_ONLY) == []
    assert warnings(**UNUSED, cuda={"torch": None}) == []


@pytest.mark.parametrize(
    ("number", "changes", "start"),
    [
        (
            1,
            {"gpu": {"name": "Tesla T4", "capability": [7, 5]}},
            "Tesla T4 has compute capability 7.5, and bfloat16 is fast from 8.0 on; set "
            "learner.precision=fp32",
        ),
        (1, {"cores": {"usable": 3}}, "3 cores for 1 GPU are few"),
        (8, {}, "16 cores for 8 GPUs are few"),
        (1, {"cores": {"cgroup": 2.5}}, "2.5 cores for 1 GPU are few"),
        (1, {"gpu": {"free": 60 * GIB}}, "GPU 0 (NVIDIA H100 80GB HBM3) has 60.0 GiB of 79.6 GiB"),
        (2, {"memory": {"dev_shm": 64 << 20}}, "/dev/shm has 64 MiB, and NCCL recommends 1.0 GiB"),
        (2, {"cuda": {"no_peers": [[0, 1]]}}, "GPUs 0 and 1 cannot access each other's memory"),
    ],
)
def test_each_cause_of_a_slow_gpu_is_one_sentence(
    number: int, changes: dict[str, Any], start: str
) -> None:
    [sentence] = warnings(number, **changes)
    assert sentence.startswith(start)


def test_one_gpu_needs_no_shared_memory_of_nccl() -> None:
    assert warnings(memory={"dev_shm": 64 << 20}) == []


@pytest.mark.parametrize(
    ("capability", "remedy"),
    [
        ([7, 0], CU126),
        ([12, 1], None),  # by the PTX of compute_120
        ([8, 9], None),  # by the machine code for sm_86
        ([9, 0], None),
    ],
)
def test_gpu_without_compiled_code_is_reported_in_one_sentence(
    capability: list[int], remedy: str | None
) -> None:
    found = warnings(gpu={"name": "NVIDIA GPU", "capability": capability})
    if remedy is None:
        assert found == []
    else:
        [sentence] = found
        assert sentence.startswith("torch 2.13.0+cu130 has no code for NVIDIA GPU of compute")
        assert sentence.endswith(remedy)


def test_a_gpu_that_is_too_new_for_a_build_needs_another() -> None:
    cuda = {"torch": "2.13.0+cu126", "built_for": "12.6", "archs": ["sm_80", "sm_86", "sm_90"]}
    blackwell = {"name": "NVIDIA B200", "capability": [10, 0]}
    [sentence] = warnings(gpu=blackwell, cuda=cuda)
    assert (
        f"so all kernels fail; set learner.device=cpu, or install a build for it: {sys_pip(CU130)}"
        in sentence
    )
    [sentence] = warnings(gpu=blackwell, cuda=cuda | {"driver": "570.86.15"})
    assert "or update the driver to 580 or newer, then run" in sentence


def sys_pip(command: str) -> str:
    return f"{sys.executable} -m {command}"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC "
            "2024",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  "
            "(dvs-builder@U22-I3-B17-02-5)  Tue Sep 23 09:55:41 UTC 2025",
            "580.95.05",
        ),
        ("NVRM version: unknown", None),
    ],
)
def test_the_driver_is_read_from_proc(tmp_path: Path, line: str, version: str | None) -> None:
    path = tmp_path / "version"
    assert doctor_gpu.driver_version(path) is None
    path.write_text(f"{line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n")
    assert doctor_gpu.driver_version(path) == version


def test_gpus_are_found_by_their_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor_gpu, "gpu_models", lambda: ["NVIDIA H100 80GB HBM3"] * 2)
    facts = doctor_gpu.examine(tmp_path, tmp_path / "version")
    assert facts["cuda"]["present"] == 2
    assert facts["gpu"] == UNUSED["gpu"] * 2
    monkeypatch.setattr(doctor_gpu, "gpu_models", lambda: [])  # hidden from a container
    facts = doctor_gpu.examine(tmp_path, tmp_path / "version")
    assert [gpu["name"] for gpu in facts["gpu"]] == ["NVIDIA GPU"] * 2


@pytest.fixture
def two_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for CUDA 13.0 that finds two GPUs, the second of which is full."""
    device = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", total_memory=81559 << 20, major=9, minor=0
    )

    def mem_get_info(index: int) -> tuple[int, int]:
        if index == 1:
            raise RuntimeError("CUDA error: out of memory")
        return 81029 << 20, 81559 << 20

    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92000)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: CUDA_130)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)


@pytest.mark.usefixtures("two_h100")
def test_gpu_facts_are_read_from_torch(tmp_path: Path) -> None:
    facts = doctor_gpu.examine(tmp_path, tmp_path / "version")
    assert json.loads(json.dumps(facts)) == facts
    first = H100["gpu"][0]
    assert facts["gpu"] == [first, first | {"free": 0}]
    assert {key: facts["cuda"][key] for key in ("torch", "built_for", "cudnn", "nccl")} == {
        key: H100["cuda"][key] for key in ("torch", "built_for", "cudnn", "nccl")
    }
    assert facts["cuda"]["no_peers"] == [[0, 1]]


@pytest.mark.usefixtures("two_h100")
def test_reason_why_torch_finds_no_gpu_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(TOO_OLD)

    monkeypatch.setattr(torch.cuda, "init", init)
    facts = doctor_gpu.examine(tmp_path, tmp_path / "version")
    assert facts["gpu"] == []
    assert facts["cuda"]["error"] == (
        "The NVIDIA driver on your system is too old (found version 12040)"
    )


def test_the_recommended_build_is_that_of_the_constraints() -> None:
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "constraints-cuda.txt").read_text()
    assert f"\ntorch=={doctor_gpu.TORCH}\n" in pins
    [toolkit] = re.findall(r"^cuda-toolkit==(\d+\.\d+)\.", pins, re.MULTILINE)
    assert toolkit == doctor_gpu.BUILDS[0].cuda

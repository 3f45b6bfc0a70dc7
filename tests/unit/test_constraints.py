"""The two files of pinned versions, and which of them `make venv` installs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OF_MAKE = ("CUDA", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of a `make test` that runs this

# What torch 2.13.0's wheel for CUDA requires on Linux beyond the packages of its CPU build, and
# what these require: Requires-Dist of torch, of the extras of cuda-toolkit, and of cuda-bindings.
OF_CUDA = """
    cuda-bindings<14,>=13.0.3
    cuda-pathfinder>=1.4.2
    cuda-toolkit==13.0.3
    nvidia-cublas==13.1.1.3.*
    nvidia-cuda-cupti==13.0.85.*
    nvidia-cuda-nvrtc==13.0.88.*
    nvidia-cuda-runtime==13.0.96.*
    nvidia-cudnn-cu13==9.20.0.48
    nvidia-cufft==12.0.0.61.*
    nvidia-cufile==1.15.1.6.*
    nvidia-curand==10.4.0.35.*
    nvidia-cusolver==12.0.4.66.*
    nvidia-cusparse==12.6.3.3.*
    nvidia-cusparselt-cu13==0.8.1
    nvidia-nccl-cu13==2.29.7
    nvidia-nvjitlink<14,>=13.0.88
    nvidia-nvshmem-cu13==3.4.5
    nvidia-nvtx==13.0.85.*
    triton==3.7.1
"""


def pins(name: str) -> Iterator[tuple[str, str]]:
    """The package and version of each line of a constraints file, without what it includes."""
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith(("#", "-c ")):
            package, version = re.split("={2,3}", line)
            yield canonicalize_name(package), version


def test_no_package_is_pinned_twice() -> None:
    both, cuda = list(pins("constraints.txt")), list(pins("constraints-cuda.txt"))
    for file in (both, cuda):
        assert len(dict(file)) == len(file)
    assert set(both) & set(cuda) == {("torch", dict(both)["torch"])}
    assert dict(both).keys() & dict(cuda).keys() == {"torch"}


def test_all_requirements_of_torch_for_cuda_are_pinned() -> None:
    cuda = dict(pins("constraints-cuda.txt"))
    assert cuda.pop("torch") == "2.13.0", "update OF_CUDA from the metadata of the new wheel"
    required = [Requirement(line) for line in OF_CUDA.split()]
    assert cuda.keys() == {requirement.name for requirement in required}
    for requirement in required:
        assert cuda[requirement.name] in requirement.specifier


def test_a_cpu_build_does_not_satisfy_the_constraint() -> None:
    text = (ROOT / "constraints-cuda.txt").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("torch=")]
    version = dict(pins("constraints-cuda.txt"))["torch"]
    assert version in Requirement(line).specifier
    assert f"{version}+cpu" not in Requirement(line).specifier
    assert f"{version}+cpu" in Requirement(line.replace("===", "==")).specifier


@pytest.mark.parametrize(
    ("built", "arguments", "file"),
    [
        (None, [], "constraints.txt"),
        (None, ["CUDA=1"], "constraints-cuda.txt"),
        ("installed", [], None),
        ("installed", ["CUDA=1"], "constraints-cuda.txt"),
        ("installed-cuda", [], None),
        ("installed-cuda", ["CUDA=1"], None),
        ("installed-cuda", ["CUDA=0"], "constraints.txt"),
    ],
)
def test_make_installs_the_chosen_constraints_and_keeps_them(
    tmp_path: Path, built: str | None, arguments: list[str], file: str | None
) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-cuda.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    if built is not None:
        (tmp_path / ".venv").mkdir()
        (tmp_path / ".venv" / built).touch()
    command = ["make", "--dry-run", "venv", f"PYTHON={sys.executable}", *arguments]
    env = {key: value for key, value in os.environ.items() if key not in OF_MAKE}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    installed = re.findall(r"pip install .*-c (\S+) -e", done.stdout)
    assert installed == ([] if file is None else [file])

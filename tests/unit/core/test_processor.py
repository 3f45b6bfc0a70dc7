"""The processor by the kernel's description of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.core.processor import processor


@pytest.mark.parametrize(
    ("flags", "has"),
    [("fpu avx2", False), ("avx512f avx512_bf16 avx", True), ("fpu amx_bf16", True)],
)
def test_model_and_flags(flags: str, has: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    one = f"model name\t: Fast 1: 2 GHz\nflags\t\t: {flags}\nbugs\t: none\n"
    cpuinfo.write_text(f"processor\t: 0\n{one}\nprocessor\t: 1\nmodel name\t: other\n")
    found = processor(cpuinfo)
    assert found.model == "Fast 1: 2 GHz"
    assert found.flags == set(flags.split())
    assert found.has_bf16 is has


def test_the_description_is_read_once(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Fast\n")
    first = processor(cpuinfo)
    cpuinfo.unlink()
    assert processor(cpuinfo) == first


def test_without_a_description_there_are_no_flags(tmp_path: Path) -> None:
    assert not processor(tmp_path / "absent").has_bf16

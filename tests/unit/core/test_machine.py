"""The versions that a run records, and the processor's model and flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock
from penstock.core import machine
from penstock.core.machine import (
    VERSIONS,
    gpu_models,
    processor,
    record_versions,
    recorded_versions,
)


def test_a_start_with_other_versions_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recorded_versions(tmp_path) == []
    record_versions(tmp_path)
    record_versions(tmp_path)
    [first] = recorded_versions(tmp_path)
    assert first["penstock"] == penstock.__version__
    assert (tmp_path / VERSIONS).stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(machine, "commit_of", lambda _: "another")
    record_versions(tmp_path)
    assert [start["commit"] for start in recorded_versions(tmp_path)] == [
        first["commit"], "another",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "[", "[]", '{"starts": 1}', '{"starts": [1]}', "null"])
def test_a_damaged_file_holds_nothing_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / VERSIONS).write_text(text)
    assert recorded_versions(tmp_path) == []
    record_versions(tmp_path)
    assert len(json.loads((tmp_path / VERSIONS).read_text())["starts"]) == 1


def test_gpus_are_named_as_by_their_driver(tmp_path: Path) -> None:
    assert gpu_models(tmp_path / "none") == []
    for i, name in enumerate(("NVIDIA H100", "NVIDIA H200")):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 11\n")
    assert gpu_models(tmp_path) == ["NVIDIA H100", "NVIDIA H200"]


@pytest.mark.parametrize(
    ("flags", "has"),
    [("fpu avx2", False), ("avx512f avx512_bf16 avx", True), ("fpu amx_bf16", True)],
)
def test_processor_model_and_flags_are_read(flags: str, has: bool, tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    one = f"model name\t: Fast 1: 2 GHz\nflags\t\t: {flags}\nbugs\t: none\n"
    cpuinfo.write_text(f"processor\t: 0\n{one}\nprocessor\t: 1\nmodel name\t: other\n")
    found = processor(cpuinfo)
    assert found.model == "Fast 1: 2 GHz"
    assert found.flags == set(flags.split())
    assert found.has_bf16 is has


def test_processor_description_is_read_once(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Fast\n")
    first = processor(cpuinfo)
    cpuinfo.unlink()
    assert processor(cpuinfo) == first


def test_missing_processor_description_means_no_flags(tmp_path: Path) -> None:
    assert not processor(tmp_path / "absent").has_bf16

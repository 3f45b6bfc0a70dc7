"""The versions that a run records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock
from penstock.core import machine
from penstock.core.machine import VERSIONS, gpu_models, record_versions, recorded_versions


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

"""`penstock doctor`: limits of control groups, and warnings about a machine."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import doctor, doctor_gpu
from penstock.core import cgroup

GOOD: dict[str, Any] = {
    "system": {"system": "Linux", "release": "6.1", "machine": "x86_64", "python": "3.11.7"},
    "cores": {
        "present": 8,
        "usable": 4,
        "cgroup": None,
        "load": 0.5,
        "bf16": True,
        "bf16_faster": True,
    },
    "forms": {"nature_cnn": None, "cached": []},
    "envs": [],
    "memory": {"total": 32 << 30, "available": 16 << 30, "cgroup": None, "dev_shm": 64 << 20},
    "limits": {"nofile": 4096, "memlock": -1},
    "packages": dict.fromkeys(doctor.PACKAGES, "1.0"),
    "gpu": [],
    "cuda": doctor_gpu.NO_CUDA | {"torch": "2.13.0+cpu"},
    "curve": True,
    "bytecode": True,
}


def group(root: Path, path: str, **files: str) -> None:
    (root / path).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / path / name.replace("__", ".")).write_text(text + "\n")


def test_cgroup_2_takes_the_smallest_limit_on_the_way_up(tmp_path: Path) -> None:
    ours = tmp_path / "cgroup"
    ours.write_text("0::/pod/container\n")
    group(tmp_path / "fs", "pod", cpu__max="150000 100000", memory__max="max")
    group(tmp_path / "fs", "pod/container", cpu__max="max 100000", memory__max="8589934592")
    assert cgroup.cores(tmp_path / "fs", ours) == 1.5
    assert cgroup.memory_nbytes(tmp_path / "fs", ours) == 8 << 30


@pytest.mark.parametrize(
    ("line", "folder", "file"),
    [
        ("0::/ours\n", "ours", "memory.events"),
        ("5:memory:/ours\n", "memory/ours", "memory.oom_control"),
    ],
)
def test_processes_killed_for_memory_are_counted(
    tmp_path: Path, line: str, folder: str, file: str
) -> None:
    (tmp_path / "cgroup").write_text(line)
    group = tmp_path / "fs" / folder
    group.mkdir(parents=True)
    assert cgroup.oom_kills(tmp_path / "fs", tmp_path / "cgroup") is None
    (group / file).write_text("under_oom 0\noom_kill 3\n")
    assert cgroup.oom_kills(tmp_path / "fs", tmp_path / "cgroup") == 3


def test_cgroup_1_limits_are_read_per_controller(tmp_path: Path) -> None:
    ours = tmp_path / "cgroup"
    ours.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n0::/\n")
    group(
        tmp_path / "fs", "cpu,cpuacct/job", cpu__cfs_quota_us="50000", cpu__cfs_period_us="100000"
    )
    group(tmp_path / "fs", "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(tmp_path / "fs", "memory/job", memory__limit_in_bytes="9223372036854771712")
    group(tmp_path / "fs", "memory", memory__limit_in_bytes="1073741824")
    assert cgroup.cores(tmp_path / "fs", ours) == 0.5
    assert cgroup.memory_nbytes(tmp_path / "fs", ours) == 1 << 30


def test_missing_control_groups_mean_no_limit(tmp_path: Path) -> None:
    assert cgroup.cores(tmp_path, tmp_path / "absent") is None
    assert cgroup.memory_nbytes(tmp_path, tmp_path / "absent") is None


def warnings(**changes: dict[str, Any] | bool) -> list[str]:
    facts = copy.deepcopy(GOOD)
    for topic, change in changes.items():
        facts[topic] = facts[topic] | change if isinstance(change, dict) else change
    return doctor.warnings(facts)


def test_a_good_machine_has_no_warning() -> None:
    assert warnings() == []
    assert doctor.describe(GOOD | {"warnings": []}).splitlines()[-1] == ("no problems found")


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"system": {"system": "Darwin"}}, "this is Darwin: only configs"),
        ({"system": {"machine": "aarch64"}}, "this is aarch64: Penstock is tested on x86-64 only"),
        ({"cores": {"cgroup": 2.5}}, "the control group limits this process to 2.5 of 4 cores"),
        ({"cores": {"usable": 1}}, "fewer than two cores are available"),
        ({"cores": {"load": 9.2}}, "the load is 9.2 on 8 cores"),
        ({"memory": {"available": 1 << 30}}, "less than 4 GiB of memory is free"),
        ({"memory": {"cgroup": 1 << 30}}, "less than 4 GiB of memory is free"),
        ({"limits": {"nofile": 256}}, "256 open files are few"),
        ({"packages": {"ale-py": None}}, "ale-py is missing, so Atari does not work"),
        ({"packages": {"torch": None, "rich": None}}, "missing packages: torch, rich;"),
        ({"curve": False}, "libzmq has no CURVE"),
        ({"bytecode": False}, "torch has no cached bytecode"),
    ],
)
def test_each_problem_of_a_machine_is_one_sentence(changes: dict[str, Any], start: str) -> None:
    [sentence] = warnings(**changes)
    assert sentence.startswith(start)


def test_load_of_the_host_is_ignored_in_a_container_with_a_quota() -> None:
    cores = {"present": 64, "usable": 64, "cgroup": 2.5, "load": 9.0}  # most cores are idle
    [sentence] = warnings(cores=cores)
    assert sentence.startswith("the control group limits this process to 2.5 of 64 cores")


def test_this_machine_can_be_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = doctor.examine()
    assert facts["forms"]["nature_cnn"]
    assert facts["forms"]["cached"] == []  # the standard timing is not listed again
    assert json.loads(json.dumps(facts)) == facts
    assert 1 <= facts["cores"]["usable"] <= facts["cores"]["present"]
    assert facts["packages"]["pydantic"]
    assert doctor.describe(facts).startswith("system    Linux")


def test_each_timed_number_of_environments_has_a_line() -> None:
    facts = GOOD | {"envs": ["a: 32, 2 µs a step", "b: 8"], "warnings": []}
    assert [line for line in doctor.describe(facts).splitlines() if line[:4] == "envs"] == [
        "envs      a: 32, 2 µs a step",
        "envs      b: 8",
    ]


@pytest.mark.parametrize(
    ("cores", "said"),
    [
        ({"bf16": False, "bf16_faster": False}, "bf16 no"),
        ({"bf16": True, "bf16_faster": True}, "bf16 yes, faster than fp32"),
        ({"bf16": True, "bf16_faster": False}, "bf16 yes, slower than fp32 and so not used"),
        ({"bf16": True, "bf16_faster": None}, "bf16 yes"),
    ],
)
def test_doctor_reports_whether_bf16_is_used(cores: dict[str, Any], said: str) -> None:
    facts = GOOD | {"cores": GOOD["cores"] | cores}
    [line] = [
        line for line in doctor.describe(facts | {"warnings": []}).splitlines() if "bf16" in line
    ]
    assert line.endswith(said)

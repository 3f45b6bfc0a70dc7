"""How learners meet: missing ranks, different configs, and ranks that occur twice."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.reduce import ReduceConfig
from penstock.learner.group.process_group import LearnerGroup, hello_of, meet
from penstock.learner.sync.gradient_sync import GroupLostError

VERSION = "the version of penstock"
HELLO = {VERSION: "1.0", "learner.lr": 0.1}


def store(folder: Path, members: int = 2) -> Any:
    """Each learner has its own, over the same file."""
    return dist.FileStore(str(folder / "store"), members)  # type: ignore[attr-defined]


def together(
    folder: Path, hellos: dict[int, dict[str, Any]], timeout_s: float = 10.0
) -> dict[int, str]:
    """What each of these learners says when all meet at the same time."""
    said: dict[int, str] = {}

    def run(rank: int) -> None:
        try:
            meet(store(folder), sorted(hellos), rank, hellos[rank], timeout_s, lambda: True)
            said[rank] = "met"
        except UserError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in hellos]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def test_learners_with_equal_configs_meet(tmp_path: Path) -> None:
    assert together(tmp_path, dict.fromkeys(range(3), HELLO)) == dict.fromkeys(range(3), "met")


@pytest.mark.parametrize(("name", "value"), [(VERSION, "1.1"), ("learner.lr", 0.2)])
def test_each_learner_names_the_difference(tmp_path: Path, name: str, value: Any) -> None:
    said = together(tmp_path, {0: HELLO, 1: {**HELLO, name: value}})
    last = "; start all with the same config and version"
    assert said[0] == (
        f"learners disagree on {name}: it is {HELLO[name]} on rank 0 and {value} on rank 1{last}"
    )
    assert said[1] == (
        f"learners disagree on {name}: it is {value} on rank 1 and {HELLO[name]} on rank 0{last}"
    )


def test_network_interface_may_differ_between_learners() -> None:
    first, second = (
        hello_of(resolve("cartpole", ["learner.count=2", option]), torch.device("cpu"))
        for option in ("learner.reduce.interface=eth0", "learner.reduce.interface=ens5")
    )
    assert first == second
    assert first["learner.reduce"]["codec"] == "none"


def test_difference_is_reported_before_all_learners_arrive(tmp_path: Path) -> None:
    store(tmp_path).set("hello-1", '{"the version of penstock": "1.1"}')
    with pytest.raises(UserError, match=r"version of penstock: it is 1\.0 on rank 0 and 1\.1 on"):
        meet(store(tmp_path), range(3), 0, HELLO, 10.0, lambda: True)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    store(tmp_path).set("hello-2", '{"the version of penstock": "1.0", "learner.lr": 0.1}')
    with pytest.raises(GroupLostError, match=r"^rank 1, 3 did not come within 0\.1 s$"):
        meet(store(tmp_path), range(4), 0, HELLO, 0.1, lambda: True)


def test_two_learners_with_one_rank_are_refused(tmp_path: Path) -> None:
    turns = iter([True] * 100)

    def another_comes() -> bool:
        store(tmp_path).set("token-0", "of the other one")
        return next(turns)

    with pytest.raises(UserError, match="two learners have rank 0; give each one"):
        meet(store(tmp_path), range(2), 0, HELLO, 10.0, another_comes)


@pytest.mark.parametrize(
    "value", [b"x", b"\xff\x00", b"[1]", b"", b"7", b"[" * 100_000], ids=lambda value: value[:4]
)
def test_foreign_data_in_the_store_is_refused_in_one_sentence(tmp_path: Path, value: bytes) -> None:
    store(tmp_path).set("hello-1", value)
    with pytest.raises(UserError, match="what the store holds for rank 1 is not what a learner"):
        meet(store(tmp_path), range(2), 0, HELLO, 10.0, lambda: True)


def test_foreign_token_in_the_store_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def stranger_comes() -> bool:
        store(tmp_path).set("token-0", b"\xff")
        return True

    with pytest.raises(UserError, match="two learners have rank 0"):
        meet(store(tmp_path), range(2), 0, HELLO, 10.0, stranger_comes)


@pytest.mark.parametrize(
    ("runs_behind", "gpus", "backend"),
    [
        (False, [], "gloo"),
        (True, ["GPU-a", "GPU-b"], "nccl"),
        (True, ["GPU-a", "GPU-a"], "gloo"),  # NCCL refuses two learners on one
    ],
)
def test_nccl_connects_only_learners_with_a_gpu_each(
    runs_behind: bool, gpus: list[str], backend: str
) -> None:
    group: Any = object.__new__(LearnerGroup)
    group.world, group.rank = 2, 0
    group._device = SimpleNamespace(runs_behind=runs_behind, identity=lambda: "GPU-a")
    group.gather = lambda own: [own, [crc32(gpus[1].encode())]]
    assert group._backend() == backend


def test_watchdog_of_nccl_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it ends the process, or sleeps for a minute where torch joins its thread."""
    names = ("ASYNC_ERROR_HANDLING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC")
    for name in names:
        monkeypatch.delenv(f"TORCH_NCCL_{name}", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    LearnerGroup(store(tmp_path, 1), 0, [0], 0, torch.device("cpu"), ReduceConfig()).close()
    assert [os.environ[f"TORCH_NCCL_{name}"] for name in names] == ["0", "0", "0"]

"""A role's output in its log: limits, full disks and slow disks."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.launch.engines import shim
from penstock.launch.engines.shim import Log, Pump, ShimPlan


def lossless() -> tuple[int, str]:
    return 0, ""


def test_log_at_its_limit_is_rotated_with_one_older_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "LOG_NBYTES", 100)
    log = Log(lambda: os.fsencode(tmp_path / "actor-0.log"), lossless)
    for n in range(5):
        log.write(b"%d" % n + b"." * 49)
    assert (tmp_path / "actor-0.log").read_bytes()[:1] == b"4"
    assert (tmp_path / "actor-0.log.1").read_bytes()[::50] == b"23"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["actor-0.log", "actor-0.log.1"]


def test_removed_log_is_created_again_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "LOG_NBYTES", 100)
    path = tmp_path / "actor-0.log"
    log = Log(lambda: os.fsencode(path), lossless)
    log.write(b"x" * 90)
    path.unlink()
    log.write(b"y" * 20)
    assert (path.read_bytes(), log.lost) == (b"y" * 20, 0)


def test_log_of_an_earlier_incarnation_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.log"
    path.write_text("before\n")
    Log(lambda: os.fsencode(path), lossless).write(b"after\n")
    assert path.read_text() == "before\nafter\n"


def test_only_the_user_may_read_a_log(tmp_path: Path) -> None:
    path = tmp_path / "actor-0.log"
    Log(lambda: os.fsencode(path), lossless).write(b"a secret\n")
    assert path.stat().st_mode & 0o777 == 0o600


def test_output_that_the_disk_refuses_is_counted_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "actor-0.log"
    log = Log(lambda: os.fsencode(path), lambda: (dropped, "the disk is too slow"))
    dropped = 0
    log.write(b"x" * 12_000)
    log.write(b"y" * 345)
    path.parent.mkdir()
    log.write(b"once more\n")
    reason = "No such file or directory"
    line = f"[penstock: 12,345 bytes of output were dropped: {reason}]\n"
    assert path.read_text() == line + "once more\n"
    dropped = 5
    log.write(b"and again\n")
    line += "once more\n[penstock: 5 bytes of output were dropped: the disk is too slow]\n"
    assert path.read_text() == line + "and again\n"


def test_writing_to_a_full_disk_raises_no_error() -> None:
    log = Log(lambda: b"/dev/full", lossless)
    for _ in range(3):
        log.write(b"x" * 1000)


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[ShimPlan]:
    """For a role whose output pipe is in ``plan.output``."""
    with (tmp_path / "page").open("w+b") as page:
        plan = ShimPlan(["1", str(page.fileno()), "0,40,20,100", "", "9", "MARK=1", "python"])
        log = os.fsencode(tmp_path / "actor-0.log")
        os.pwrite(plan.status, len(log).to_bytes(8, "little") + log, 100)
        plan.output = os.pipe()
        os.set_blocking(plan.output[0], False)
        yield plan
        for fd in plan.output:
            os.close(fd)


def test_output_is_in_the_log_and_its_end_in_the_status_page(
    plan: ShimPlan, tmp_path: Path
) -> None:
    pump = Pump(plan)
    for n in range(10):
        os.write(plan.output[1], f"line {n}\n".encode())
        assert pump.take()
    pump.close()
    text = "".join(f"line {n}\n" for n in range(10))
    assert (tmp_path / "actor-0.log").read_text() == text
    assert os.pread(plan.status, 20, 48) == text[-20:].encode()
    assert int.from_bytes(os.pread(plan.status, 8, 40), "little") == 20


def test_stalling_disk_does_not_block_the_role(
    plan: ShimPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Lock()
    write = Log.write

    def stall(log: Log, data: bytes) -> None:
        held.acquire()
        held.release()
        write(log, data)

    monkeypatch.setattr(Log, "write", stall)
    monkeypatch.setattr(shim, "LOG_CLOSE_S", 5.0)
    pump = Pump(plan)
    with held:
        for _ in range(100):
            os.write(plan.output[1], b"x" * 50_000)
            pump.take()
    pump.close()
    text = (tmp_path / "actor-0.log").read_text()
    assert "bytes of output were dropped: the disk is too slow]" in text
    assert text.count("x") < 5_000_000


def test_more_output_than_a_disk_should_bear_is_dropped_and_counted(
    plan: ShimPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "LOG_NBYTES", 1000)
    monkeypatch.setattr(shim, "LOG_NBYTES_PER_S", 1)
    pump = Pump(plan)
    for _ in range(3):
        os.write(plan.output[1], b"x" * 600)
        pump.take()
    pump.close()
    text = (tmp_path / "actor-0.log").read_text()
    # The log's thread may see the two drops together or apart, before the output or after it.
    counts = re.findall(r"\[penstock: ([\d,]+) bytes of output were dropped: more than 1 b", text)
    assert sum(int(count.replace(",", "")) for count in counts) == 1200
    assert text.count("x") == 600


def test_output_before_the_log_has_a_name_is_included(tmp_path: Path) -> None:
    path = b""
    log = Log(lambda: path, lossless)
    log.write(b"early\n")
    assert log.lost == 0
    path = os.fsencode(tmp_path / "learner-0.log")
    log.write(b"late\n")
    assert (tmp_path / "learner-0.log").read_text() == "early\nlate\n"


def test_early_output_that_fills_a_log_is_written_with_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shim, "LOG_NBYTES", 100)
    path = b""
    log = Log(lambda: path, lossless)
    log.write(b"x" * 100)
    path = os.fsencode(tmp_path / "learner-0.log")
    log.write(b"late\n")
    assert (tmp_path / "learner-0.log").read_text() == "x" * 100 + "late\n"

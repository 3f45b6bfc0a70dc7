"""What holds for every test."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from penstock.core.notes import notes_to
from train_command import stop_commands

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # their parts have tests too
MARKER = "PENSTOCK_TEST"
LEAVE_WITHIN_S = 5.0

# Machines are shared: how long an example takes says nothing about the code.
# Long searches are for `make fuzz`.
hypothesis.settings.register_profile("penstock", deadline=None, max_examples=25)
hypothesis.settings.load_profile("penstock")


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end, so no garbage collection looks at it: tests
    that collect take hundredths of a second then, and not whole ones."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """Returns the notes for the user that are logged while the test runs."""
    found: list[str] = []
    with notes_to(found.append, every_thread=True):
        yield found


@pytest.fixture(autouse=True)
def nothing_left_behind(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Stops the commands of a test, and asserts that it leaves no process, no runtime folder and no
    shared memory."""
    if request.node.get_closest_marker("system") is None:
        yield
        return
    tmp_path_factory.getbasetemp()  # pytest's own folder is made where it would be without us
    marker = uuid.uuid4().hex
    monkeypatch.setenv(MARKER, marker)
    # Short, because Unix sockets lie below it; new, so that what is in it is this test's.
    temporary = Path(tempfile.mkdtemp(prefix="pt-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    shared = set(os.listdir("/dev/shm"))
    yield
    stop_commands()
    ends_s = time.monotonic() + LEAVE_WITHIN_S
    while (left := _left_behind(marker, temporary, shared)) and time.monotonic() < ends_s:
        time.sleep(0.05)
    shutil.rmtree(temporary)
    assert left == []


def _left_behind(marker: str, temporary: Path, shared: set[str]) -> list[str]:
    """Processes that carry the test's marker in their environment, and names that it made."""
    wanted = f"{MARKER}={marker}".encode()
    left = [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - shared]
    left += [f"folder {path}" for path in temporary.glob("*penstock*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                left.append(f"process {process.name}: {command}")
        except OSError:  # it ended, or belongs to another user
            continue
    return left

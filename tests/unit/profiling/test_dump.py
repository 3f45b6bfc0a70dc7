"""Stacks on request, where they cannot be written."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.profiling.dump import write_stacks_on_signal


@pytest.fixture(autouse=True)
def _unregister() -> Iterator[None]:
    yield
    faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/actor-0.stacks"])
def test_full_disk_and_lost_folder_raise_no_error(
    path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_stacks_on_signal(Path(path))
    os.kill(os.getpid(), signal.SIGUSR1)


def test_stack_files_are_private(tmp_path: Path) -> None:
    write_stacks_on_signal(tmp_path / "actor-0.stacks")
    assert (tmp_path / "actor-0.stacks").stat().st_mode & 0o777 == 0o600

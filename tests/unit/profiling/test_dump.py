"""Stacks on request, where there is no place to write them."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.profiling.dump import answer_with_stacks


@pytest.fixture(autouse=True)
def _unregister() -> Iterator[None]:
    yield
    faulthandler.unregister(signal.SIGUSR1)


@pytest.mark.parametrize("path", ["/dev/full", "/no/such/folder/actor-0.stacks"])
def test_a_full_disk_and_a_lost_folder_end_nothing(
    path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    answer_with_stacks(Path(path))
    os.kill(os.getpid(), signal.SIGUSR1)


def test_only_the_user_may_read_stacks(tmp_path: Path) -> None:
    answer_with_stacks(tmp_path / "actor-0.stacks")
    assert (tmp_path / "actor-0.stacks").stat().st_mode & 0o777 == 0o600

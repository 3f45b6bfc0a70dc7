"""`penstock stacks` and the files to which processes write their stacks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from penstock.monitor.stacks import FILE_NBYTES, StackRequest


@pytest.mark.parametrize("is_link", [False, True])
def test_old_stacks_are_removed_but_not_behind_a_link(tmp_path: Path, is_link: bool) -> None:
    """A folder from elsewhere can have a link to any file of this user there."""
    target = path = tmp_path / "learner-0.stacks"
    if is_link:
        target = tmp_path / "thesis"
        path.symlink_to(target)
    target.write_bytes(b"x" * (FILE_NBYTES + 1))
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    pidfd = os.pidfd_open(os.getpid())
    try:
        StackRequest("learner-0", os.getpid(), path).send(pidfd)
    finally:
        os.close(pidfd)
        signal.signal(signal.SIGUSR1, before)
    assert target.stat().st_size == (FILE_NBYTES + 1 if is_link else 0)

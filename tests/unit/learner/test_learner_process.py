"""The end of a learner's process whose parameter server does not send its state."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from penstock.core.role import RunEndedError
from penstock.learner.role import LearnerProcess


@pytest.fixture
def process() -> LearnerProcess:
    """The process of the learner that saves, where the server's part is missing."""
    process = object.__new__(LearnerProcess)
    parts = ("_accounting", "_actor_source", "_checkpoints", "_config", "_ctx", "_group", "_ledger")
    for name in (
        *parts,
        "_nonfinite",
        "_others",
        "_progress",
        "_requests",
        "_source",
        "_torch_trace",
    ):
        setattr(process, name, MagicMock())
    process._shard = MagicMock()
    process._group.leads = True  # type: ignore[misc]
    process._group.state.return_value = process._kept = None  # type: ignore[attr-defined]
    return process


def test_a_save_that_did_not_take_place_is_no_success(process: LearnerProcess) -> None:
    with pytest.raises(RunEndedError, match="did not send its state: checkpoints/last is not"):
        process.finish()
    process._checkpoints.save.assert_not_called()  # type: ignore[attr-defined]


def test_during_the_run_the_next_save_may_succeed(
    process: LearnerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    process.keep(save=True)
    (why,) = process._checkpoints.put_off.call_args.args  # type: ignore[attr-defined]
    assert "the parameter server did not send its state" in why

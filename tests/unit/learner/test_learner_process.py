"""A learner's process: messages of its supervisor, and a parameter server without a state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.configs.load import resolve
from penstock.core.control import Channel
from penstock.core.params import Arrays
from penstock.core.role import RoleContext, RunEndedError
from penstock.envs import probe
from penstock.learner import role
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.group.elastic_group import ElasticGroup
from penstock.learner.role import LearnerProcess
from penstock.learner.sync.gradient_sync import SingleLearner
from penstock.learner.trainer import Trainer
from penstock.profiling.status import StatusPage


class SilentServer(SingleLearner):
    """A sync whose parameter server does not send its state."""

    def state_dict(self, *, saves: bool) -> Arrays:
        return None  # type: ignore[return-value]


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """The supervisor's end of the control socket, and the learner's."""
    ours, theirs = Channel.pair()
    both = ours, Channel(theirs)
    yield both
    for end in both:
        end.close()


@pytest.fixture
def ctx(tmp_path: Path, ends: tuple[Channel, Channel]) -> Iterator[RoleContext]:
    page, descriptor = StatusPage.create()
    options = ("actors.count=1", "actors.envs=2", "actors.unroll=4", "learner.device=cpu")
    config = resolve("cartpole", options)
    yield RoleContext("learner", 0, 0, 1, tmp_path, tmp_path, ends[1], page, config)
    page.close()
    os.close(descriptor)


@pytest.fixture
def trainer(ctx: RoleContext) -> Trainer:
    assert ctx.config is not None
    return Trainer(ctx.config, probe(ctx.config.env), ctx.ledger)


@pytest.fixture
def group(ctx: RoleContext, trainer: Trainer) -> ElasticGroup:
    assert ctx.config is not None
    made = ElasticGroup(ctx, ctx.config, trainer, {})
    made.sync = SilentServer()
    return made


@pytest.fixture
def process(ctx: RoleContext, trainer: Trainer, group: ElasticGroup) -> Iterator[LearnerProcess]:
    """The process of the learner that saves."""
    assert ctx.config is not None
    checkpoints = CheckpointManager(ctx.run_dir, trainer, ctx.report, ctx.event)
    with LearnerProcess(ctx, ctx.config, trainer, checkpoints, group) as made:
        yield made


def saved(ctx: RoleContext) -> bool:
    return checkpoint_format.exists(ctx.run_dir / "checkpoints" / "last")


def test_failed_save_makes_the_learner_fail(ctx: RoleContext, process: LearnerProcess) -> None:
    process.capture_state(save=False)
    ctx.stop()
    with pytest.raises(RunEndedError, match="did not send its state: checkpoints/last is not"):
        process.finish()
    assert not saved(ctx)


def test_failed_save_during_the_run_may_be_followed_by_a_successful_one(
    ctx: RoleContext,
    process: LearnerProcess,
    group: ElasticGroup,
    caplog: pytest.LogCaptureFixture,
) -> None:
    process.capture_state(save=True)
    assert "the parameter server did not send its state" in caplog.text
    assert not saved(ctx)
    group.sync = SingleLearner()
    process.capture_state(save=True)
    assert saved(ctx)


@pytest.mark.parametrize(("every_s", "is_read"), [(0.0, True), (1000.0, False)])
def test_supervisor_messages_are_read_at_intervals(
    monkeypatch: pytest.MonkeyPatch,
    ends: tuple[Channel, Channel],
    process: LearnerProcess,
    every_s: float,
    is_read: bool,
) -> None:
    """Each read costs a system call, and a turn may take less than a millisecond."""
    monkeypatch.setattr(role, "MESSAGES_S", every_s)
    assert not process.make_control_message(np.ones(1), stop=False).checkpoint
    assert ends[0].send({"kind": "save"}, 1.0)
    assert process.make_control_message(np.ones(1), stop=False).checkpoint == is_read

"""Stages of `penstock bench` that run in one process."""

from __future__ import annotations

import contextlib
import threading

import pytest

from penstock.bench.parts import Parts
from penstock.configs.load import resolve

LARGE = (  # copies of half a megabyte
    "env.kwargs={obs_shape: [65536]}", "model.hidden=[1]", "actors.envs=1", "actors.unroll=1",
    "learner.batch_slots=2",
)  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def test_gathering_takes_as_many_threads_as_the_learner_would(threads: int) -> None:
    config = resolve("synthetic", [*LARGE, f"learner.gather_threads={threads}"])
    with contextlib.ExitStack() as stack:
        parts = Parts(config, stack)
        parts.gather().call()
        assert len(copiers()) == threads - 1  # the calling one is the other
        assert parts.notes["gather"] == {"threads": threads}
    assert copiers() == []


def copiers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("copier")]


@pytest.mark.parametrize("stage", ["environment", "bare_environment"])
def test_environment_stages_choose_only_actions_that_the_mask_allows(stage: str) -> None:
    config = resolve("broken_envs:Masked", ["actors.envs=3"])
    with contextlib.ExitStack() as stack:
        step = getattr(Parts(config, stack), stage)()
        for _ in range(40):  # it would raise
            step.call()

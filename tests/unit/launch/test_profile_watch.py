"""A profile's window begins some seconds after training, or without it after a timeout."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.autotune.cores import CoreSplit, Split
from penstock.bench import stages
from penstock.cli import profile
from penstock.cli.profile import as_trained
from penstock.configs.load import resolve
from penstock.core.interfaces import EngineContext
from penstock.core.notes import notes_to
from penstock.launch.engines.local import LocalEngine
from penstock.launch.profile_watch import PATIENCE_S, WARM_UP_S, WORD_S, ProfileWatch
from penstock.launch.supervisor import Supervisor
from penstock.launch.supervisor_messages import RestartLimits
from penstock.monitor.sinks import FanOut
from penstock.monitor.view import DeferredView, LineView


class Clock:
    """Says what a test wants."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def perf_counter_ns(self) -> int:
        return time.perf_counter_ns()


class Scene:
    """A watch, for a moment, on a supervisor that has nothing to supervise."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._clock, self._screen = clock, io.StringIO()
        self.watch = ProfileWatch(1e-9, folder / "kernels.json")
        view = DeferredView(lambda: LineView(self._screen, "x", None))
        self.sinks = FanOut([view, self.watch])
        engine = LocalEngine(EngineContext(folder))
        self.split = CoreSplit(2, least=1, most=4, most_threads=4)
        with_nobody = Supervisor(
            [],
            RestartLimits(),
            {},
            folder,
            self.sinks,
            engine,
            core_split=self.split,
            on_role_end=self.watch.on_role_end,
        )
        self.watch.attach(with_nobody)

    def profiled_at(self, seconds: float) -> bool:
        """Whether there has been a window, so long after the beginning."""
        self._clock.now_s = 1000.0 + seconds
        self.sinks.tick()  # which opens it,
        self.sinks.tick()  # and closes it
        return self.watch.window is not None

    def hear(self, learner_steps: int) -> None:
        self.watch.metrics({"learner_steps": learner_steps})

    @property
    def said(self) -> list[str]:
        lines = self._screen.getvalue().splitlines()[1:]  # behind the title
        return [line[len("12:00:00 ") :] for line in lines]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    clock = Clock()
    monkeypatch.setattr("penstock.launch.profile_watch.time", clock)
    scene = Scene(tmp_path, clock)
    with notes_to(scene.sinks.note):
        yield scene


def test_a_window_begins_some_seconds_after_training(scene: Scene) -> None:
    assert not scene.profiled_at(500.0)  # nobody has reported yet
    scene.hear(learner_steps=0)
    assert not scene.profiled_at(500.0 + WORD_S - 0.1)
    scene.hear(learner_steps=1)
    assert not scene.profiled_at(500.0 + WORD_S - 0.1 + WARM_UP_S - 0.1)
    assert scene.profiled_at(500.0 + WORD_S - 0.1 + WARM_UP_S)
    assert scene.said == []


def test_window_begins_without_training_after_its_patience_with_a_note(scene: Scene) -> None:
    assert not scene.profiled_at(0.0)
    scene.hear(learner_steps=0)
    assert not scene.profiled_at(WORD_S)
    scene.hear(learner_steps=0)
    assert not scene.profiled_at(PATIENCE_S - 0.1)
    [told] = scene.said
    assert told == (
        "no optimizer step yet: the profiled window starts 3 s after the first step, or at the "
        "latest 60 s after the learner began to wait"
    )
    assert scene.profiled_at(PATIENCE_S)
    assert scene.said[1:] == [
        "no optimizer step in 60 s: the profiled window starts now, to show the cause"
    ]


def test_window_waits_for_the_warm_up_of_late_training(scene: Scene) -> None:
    scene.hear(learner_steps=0)
    assert not scene.profiled_at(PATIENCE_S - 0.1)
    scene.hear(learner_steps=1)
    assert not scene.profiled_at(PATIENCE_S)
    assert scene.profiled_at(PATIENCE_S + WARM_UP_S)


def test_ceiling_is_measured_with_the_threads_of_the_run(scene: Scene) -> None:
    scene.split.now = Split(2, 3, "cores are idle")
    scene.hear(learner_steps=1)
    scene.profiled_at(0.0)
    assert scene.profiled_at(WARM_UP_S)
    threads = scene.watch.learner_threads
    assert as_trained(resolve("pong", []), threads).learner.first_threads == 3
    fixed = resolve("pong", ["learner.threads=2", "actors.count=auto"])
    assert as_trained(fixed, threads).learner.first_threads == 2
    assert as_trained(resolve("pong", []), None).learner.first_threads == 1


def test_profile_passes_the_threads_of_the_run_to_the_ceiling(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is not started that measures it."""
    started: list[tuple[int, object]] = []

    def start(target: str, request: dict[str, Any], *, threads: int, **how: Any) -> dict[str, Any]:
        started.append((threads, request["config"]["learner"]["threads"]))
        return {"rates": [1.0], "core_s": [1.0]}

    monkeypatch.setattr(stages, "call_in_process", start)
    monkeypatch.setattr(profile, "call_in_process", lambda target, request: {})
    scene.split.now = Split(2, 3, "cores are idle")
    scene.hear(learner_steps=1)
    scene.profiled_at(0.0)
    assert scene.profiled_at(WARM_UP_S)
    assert scene.watch.window is not None
    config = resolve("pong", ["learner.threads=auto"])
    profile._profile("pong", config, scene.watch, scene.watch.window, None)
    assert started == [(3, 3)]

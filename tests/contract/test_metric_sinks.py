"""Contract of every `MetricSink` of `core/interfaces/`."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from full_disk import full_disk
from pages import code
from penstock.configs.load import resolve
from penstock.configs.run import SINKS
from penstock.configs.schema import Config
from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.core.notes import notes_to
from penstock.launch.callbacks import Callbacks, Evaluated, Hooks, Run, load_hooks
from penstock.monitor.json_view import JsonView
from penstock.monitor.run_folder.events import EventLog
from penstock.monitor.run_folder.record import NO_ACCOUNTING, Record, Thinned
from penstock.monitor.sinks import FanOut, check_libraries, make_sinks
from penstock.monitor.view import DeferredView, LineView, LiveView, ProgressLine, Silent

STATISTICS = {"mean": 3.0, "median": 2.5, "std": 1.0, "min": 1.0, "max": 5.0}
EVALUATION = {
    "time_s": 4.5, "trained_steps": 640, "learner_steps": 10, "episodes": 20, "best": True,
    "return": STATISTICS, "length": STATISTICS, "best_return_mean": 3.0,
}  # fmt: skip
CHECKPOINT = {
    "folder": "run/checkpoints/last", "best": False, "time_s": 4.5, "trained_steps": 640,
    "learner_steps": 10, "return_mean": None,
}  # fmt: skip
METRICS = {
    "time_s": 1.0, "env_steps": 640, "trained_steps": 600, "episode_return_mean": None,
    "interval_s": 1.0, "learner_compute_fraction": 0.75, "steps_per_s": 640.0,
    "policy_lag_mean": 0.5, "queue_fill": 0.5, "latency_p50_s": 0.1, "env_frames": 2560,
    "ledger": {"compute": 0.75}, "policy_lag_histogram": {"0": 12}, "dropped": {"stale": 4},
    "ledgers": {"actor-0": {"step": 0.5}, "connector-0": {"wait": 0.5}},
    "ranks": [{"rank": 0, "trained_steps_per_s": 1.0, "ledger": {"compute": 0.75}}],
}  # fmt: skip
NAN, INF = float("nan"), float("inf")
UNKNOWN = {"of_a_plugin": {"deep": [1, None, "text", True]}, "loss": NAN, "rate": -INF}
RESULTS = {
    "evaluation": RunEvent("evaluation", "", "evaluator-0", 0, result=EVALUATION),
    "checkpoint": RunEvent("checkpoint", "was written", "learner-0", 0, result=CHECKPOINT),
}
EVENTS = (
    *RESULTS.values(),
    RunEvent("restart", "actor-0 starts again", "actor-0", 1, {"delay_s": NAN}),
    RunEvent("a_word_of_its_own", "", "actor-0", 1, {"unknown": [1]}, reported=True),
)
SUMMARY = {"exit_reason": "minutes", "accounting": NO_ACCOUNTING}
END = RunEvent("end", "ended by minutes", result=SUMMARY)
FAKE_WANDB = """
class Run:
    def define_metric(self, *names, **options): pass
    def log(self, figures): assert figures
    def finish(self): pass

def init(**options):
    return Run()
"""


class Screen(io.StringIO):
    """A terminal that can be closed."""

    closed_by_user = False

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.closed_by_user:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(text)


class Callback(Callbacks):
    """Asks for the end of the run after each evaluation."""

    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool:
        return evaluated.return_mean > 2.0


@dataclass
class World:
    """What sinks write to."""

    folder: Path
    screen: Screen = field(default_factory=Screen)

    def config(self, *options: str) -> Config:
        return resolve("cartpole", [f"run.dir={self.folder}", "run.grace_s=20", *options])


def registered(option: str, value: str) -> Callable[[World], MetricSink]:
    def make(world: World) -> MetricSink:
        config = world.config(f"run.{option}={value}")
        check_libraries(config)
        [sink] = make_sinks(config, world.folder)
        return sink

    return make


def of_the_page(world: World) -> MetricSink:
    """The example of docs/extending/sink.md."""
    module: dict[str, Any] = {}
    exec(code("extending/sink.md", "python", 2), module)
    sink: MetricSink = module["make"](world.config(), world.folder)
    return sink


OPTIONS = {"tensorboard": "true", "wandb": "games", "metrics_port": "0"}
MAKERS: dict[str, Callable[[World], MetricSink]] = {
    "record": lambda world: Record(world.folder),
    "events": lambda world: EventLog(world.folder / "logs"),
    "callbacks": lambda world: Hooks(
        load_hooks([], [Callback()]), Run(world.folder, world.config())
    ),
    "lines": lambda world: LineView(world.screen, "penstock run", None),
    "json": lambda world: JsonView(world.screen, "penstock run", None),
    "panel": lambda world: LiveView(world.screen, "penstock run", None),
    "progress": lambda world: ProgressLine(world.screen, "penstock run", None),
    "silent": lambda world: Silent(),
    "deferred": lambda world: DeferredView(lambda: LineView(world.screen, "penstock run", None)),
    "thinned": lambda world: Thinned(Record(world.folder)),
    "fan-out": lambda world: FanOut([EventLog(world.folder / "logs"), Record(world.folder)]),
    "example": of_the_page,
    **{option: registered(option, value) for option, value in OPTIONS.items()},
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    return World(tmp_path / "run")


@pytest.fixture(params=MAKERS)
def sink(
    request: pytest.FixtureRequest, world: World, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MetricSink]:
    if request.param == "tensorboard":
        pytest.importorskip("tensorboardX")
    if request.param == "metrics_port":
        pytest.importorskip("prometheus_client")
    if request.param == "wandb":
        monkeypatch.setenv("WANDB_MODE", "offline")
        if find_spec("wandb") is None:
            libraries = world.folder.parent / "libraries"
            libraries.mkdir()
            (libraries / "wandb.py").write_text(FAKE_WANDB)
            paths = [str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])]
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
            monkeypatch.syspath_prepend(libraries)
    made = MAKERS[request.param](world)
    with notes_to(lambda text: None):
        yield made
        world.screen.closed_by_user = False
        with suppress(OSError):
            made.close()


def calls(sink: MetricSink) -> list[Callable[[], object]]:
    """One of each kind, in no order."""
    return [
        lambda: sink.metrics(METRICS),
        lambda: [sink.event(event) for event in EVENTS],
        lambda: sink.note("a note with [brackets]"),
        sink.tick,
        lambda: sink.metrics({"accounting": {"produced": 1}}, final=True),
    ]


def test_every_optional_sink_is_tested_here() -> None:
    assert SINKS.specs.keys() == OPTIONS.keys()


def test_sink_accepts_calls_in_any_order(sink: MetricSink) -> None:
    for order in permutations(calls(sink)):
        for call in order:
            call()
    sink.event(END)


def without_numbers(value: Any) -> Any:
    """The same with NaN for each number that is not a count."""
    if isinstance(value, dict):
        return {name: without_numbers(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_numbers(entry) for entry in value]
    return NAN if isinstance(value, float) else value


def test_unknown_and_non_numeric_metrics_raise_nothing(sink: MetricSink) -> None:
    sinks = FanOut([sink])
    sinks.tick()
    for metrics in ({**METRICS, **UNKNOWN}, UNKNOWN, {}, without_numbers(METRICS)):
        sinks.metrics(metrics)
        sinks.tick()
    sinks.metrics(UNKNOWN, final=True)


def test_sink_does_not_modify_its_arguments(sink: MetricSink) -> None:
    metrics, event = deepcopy(METRICS), deepcopy(RESULTS["evaluation"])
    for _ in range(2):
        sink.metrics(metrics)
        sink.event(event)
    assert (metrics, event) == (METRICS, RESULTS["evaluation"])


def test_only_a_callback_ends_a_run_and_only_by_a_result(
    sink: MetricSink, request: pytest.FixtureRequest
) -> None:
    asks = sink.event(RESULTS["evaluation"])
    assert asks is ("callbacks" in request.node.name)
    said_by_a_role = RunEvent("evaluation", "is good", "actor-0", 0, EVALUATION, reported=True)
    for event in (RESULTS["checkpoint"], said_by_a_role, END):
        assert sink.event(event) is False


def test_a_second_close_does_nothing(sink: MetricSink, world: World) -> None:
    for call in calls(sink):
        call()
    sink.event(END)
    sink.close()
    written = world.screen.getvalue(), files(world.folder)
    sink.close()
    assert written == (world.screen.getvalue(), files(world.folder))
    sink.event(EVENTS[2])  # another sink's failure to close
    sink.note("actor-0 starts again")


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def nothing_to_write_to(world: World, how: str) -> Iterator[None]:
    if how == "full disk":
        with full_disk():
            yield
        return
    if how == "removed folder":
        shutil.rmtree(world.folder)
    world.screen.closed_by_user = how == "closed terminal"
    yield


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a library
@pytest.mark.parametrize("how", ["full disk", "removed folder", "closed terminal"])
def test_unwritable_output_raises_only_oserror(sink: MetricSink, world: World, how: str) -> None:
    sink.tick()
    with nothing_to_write_to(world, how):
        for call in (*calls(sink), lambda: sink.event(END), sink.close):
            with suppress(OSError):
                call()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of a library
@pytest.mark.parametrize("how", ["full disk", "removed folder", "closed terminal"])
def test_fan_out_raises_no_error_of_a_sink(
    sink: MetricSink, world: World, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    others = Kept()
    sinks = FanOut([sink, others])
    sinks.tick()
    with nothing_to_write_to(world, how):
        for call in calls(sinks):
            call()
        sinks.close()
    assert others.metrics_received == 2
    assert all("cannot be written: " in note for note in others.notes if "[" not in note)


class Kept(MetricSink):
    def __init__(self) -> None:
        self.metrics_received = 0
        self.notes: list[str] = []

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self.metrics_received += 1

    def note(self, text: str) -> None:
        if text != "actor-0 starts again" and text:
            self.notes.append(text)

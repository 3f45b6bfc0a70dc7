"""What adding a metric sink takes: one class and one registration, both in this file.

It stands in the place of `wandb`, so that there is an option that enables it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.run import SINKS, RunConfig, SinkOptions, SinkSpec
from penstock.configs.schema import Config
from penstock.configs.section import Contradiction
from penstock.core.interfaces import Json, MetricSink, SinkFactory
from penstock.monitor.sinks import FanOut, check_libraries, make_sinks


class ReturnsCsv(MetricSink):
    """A line for each interval: agent steps, mean return."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        with self._path.open("a") as file:
            print(metrics.get("env_steps"), metrics.get("episode_return_mean"), sep=",", file=file)


def make(config: Config, run_dir: Path) -> MetricSink:
    return ReturnsCsv(run_dir / "returns.csv")


SPEC = SinkSpec("wandb", f"{__name__}:make")
FACTORIES: tuple[SinkFactory, ...] = (make,)  # held against the Protocol by mypy


@contextmanager
def replaced(spec: SinkSpec) -> Iterator[None]:
    former = SINKS.specs[spec.name]
    SINKS.unregister(spec.name)
    SINKS.register(spec)
    try:
        yield
    finally:
        SINKS.unregister(spec.name)
        SINKS.register(former)


@pytest.fixture
def registered() -> Iterator[None]:
    with replaced(SPEC):
        yield


@pytest.mark.usefixtures("registered")
def test_run_with_the_option_writes_to_the_new_sink(tmp_path: Path) -> None:
    config = resolve("cartpole", ["run.wandb=project"])
    check_libraries(config)
    sinks = FanOut(make_sinks(config, tmp_path))
    for steps in (100, 200):
        sinks.metrics({"env_steps": steps, "episode_return_mean": steps / 10, "time_s": steps})
    sinks.close()
    assert (tmp_path / "returns.csv").read_text() == "100,10.0\n200,20.0\n"


@pytest.mark.usefixtures("registered")
def test_run_without_the_option_does_not_have_the_new_sink(tmp_path: Path) -> None:
    assert make_sinks(resolve("cartpole"), tmp_path) == []


@pytest.mark.usefixtures("registered")
def test_missing_library_of_a_sink_is_refused_before_the_run() -> None:
    with (
        replaced(SinkSpec("wandb", f"{__name__}:make", library="no_such_module")),
        pytest.raises(UserError, match=r"run\.wandb=\"project\" needs no_such_module, which"),
    ):
        check_libraries(resolve("cartpole", ["run.wandb=project"]))


def test_invalid_combinations_are_refused() -> None:
    def check(run: RunConfig) -> Iterator[Contradiction]:
        if run.seed:
            yield Contradiction(("run.wandb", "run.seed"), "run.wandb needs run.seed=0")

    with (
        replaced(SinkSpec("wandb", f"{__name__}:make", check=check)),
        pytest.raises(UserError, match=r"run\.wandb needs run\.seed=0"),
    ):
        resolve("cartpole", ["run.wandb=project", "run.seed=1"])


def test_registering_a_sink_name_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="sink wandb exists already"):
        SINKS.register(SPEC)


def test_each_sink_is_enabled_by_an_option_of_its_name() -> None:
    assert set(SINKS.specs) <= set(SinkOptions.model_fields)

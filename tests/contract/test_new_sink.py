"""What adding a metric sink takes: one class and one registration, both in this file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.reference import reference
from penstock.configs.registry import ExtraOptions
from penstock.configs.run import SINKS, SinkSpec
from penstock.configs.schema import Config
from penstock.core.interfaces import Json, MetricSink, SinkFactory
from penstock.monitor.sinks import FanOut, check_libraries, make_sinks


class CsvOptions(ExtraOptions):
    """Of the sink below."""

    csv: bool = False
    """Write returns to the file `returns.csv`, too."""


class ReturnsCsv(MetricSink):
    """A line for each interval: agent steps, mean return."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        with self._path.open("a") as file:
            print(metrics.get("env_steps"), metrics.get("episode_return_mean"), sep=",", file=file)


def make(config: Config, run_dir: Path) -> MetricSink:
    return ReturnsCsv(run_dir / "returns.csv")


SPEC = SinkSpec("csv", f"{__name__}:make", CsvOptions)
FACTORIES: tuple[SinkFactory, ...] = (make,)  # held against the Protocol by mypy


@pytest.fixture
def registered() -> Iterator[None]:
    SINKS.register(SPEC)
    yield
    SINKS.unregister(SPEC.name)


@pytest.mark.usefixtures("registered")
def test_a_run_that_asks_for_it_has_it(tmp_path: Path) -> None:
    config = resolve("cartpole", ["run.csv=true"])
    check_libraries(config)
    sinks = FanOut(make_sinks(config, tmp_path))
    for steps in (100, 200):
        sinks.metrics({"env_steps": steps, "episode_return_mean": steps / 10, "time_s": steps})
    sinks.close()
    assert (tmp_path / "returns.csv").read_text() == "100,10.0\n200,20.0\n"


@pytest.mark.usefixtures("registered")
def test_other_runs_have_not(tmp_path: Path) -> None:
    assert make_sinks(resolve("cartpole"), tmp_path) == []


@pytest.mark.usefixtures("registered")
def test_its_option_is_an_option_like_any_other(tmp_path: Path) -> None:
    config = resolve("cartpole", ["run.csv=true"])
    (tmp_path / "again.yaml").write_text(dump(config))
    assert resolve(str(tmp_path / "again.yaml")) == config
    with pytest.raises(UserError, match=r"no option run\.csw; the nearest option is run\.csv"):
        resolve("cartpole", ["run.csw=true"])
    with pytest.raises(UserError, match=r"run\.csv is 'often'; it must be true or false"):
        resolve("cartpole", ["run.csv=often"])
    assert "| `run.csv` | true or false | `false` | Write returns to the file" in reference()


def test_a_library_that_is_missing_is_said_before_anything_is_written() -> None:
    SINKS.register(SinkSpec("csv", f"{__name__}:make", CsvOptions, library="no_such_module"))
    try:
        with pytest.raises(UserError, match=r"run\.csv=true needs no_such_module, which is not"):
            check_libraries(resolve("cartpole", ["run.csv=true"]))
    finally:
        SINKS.unregister("csv")


def test_taken_back_it_is_unknown_again() -> None:
    with pytest.raises(UserError, match=r"no option run\.csv"):
        resolve("cartpole", ["run.csv=true"])


class OtherWandb(ExtraOptions):
    wandb: int = 3
    """Not what `run.wandb` means."""


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SinkSpec("wandb", "", CsvOptions), "sink wandb exists already"),
        (SinkSpec("new", "", OtherWandb), r"sink new: run\.wandb exists already"),
    ],
)
def test_a_name_has_one_meaning(spec: SinkSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SINKS.register(spec)

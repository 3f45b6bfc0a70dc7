"""The number of connectors follows from the times of receiving and of training a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import pytest

from penstock.autotune import connectors
from penstock.autotune.connectors import Costs, check_not_auto, needed, with_connectors
from penstock.configs.errors import UserError
from penstock.configs.load import resolve, resolve_target
from penstock.configs.schema import Config
from penstock.launch import measuring, run, topology
from penstock.monitor.sinks import FanOut

AUTO = ("transport.connectors=auto", "transport.bind=tcp://127.0.0.1:7700")


class Measured:
    """What was to be timed: receiving a step takes 2 µs, and training it 1 µs."""

    def __init__(self) -> None:
        self.configs: list[Config] = []

    def __call__(self, config: Config) -> list[list[Any]]:
        self.configs.append(config)
        return [[2e-6, 1e-6]]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 cores, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(connectors, "usable_cores", lambda: 16.0)


@pytest.fixture
def measured() -> Measured:
    return Measured()


@pytest.mark.parametrize(
    ("receive", "train", "cores", "number"),
    [
        (2e-6, 370e-6, 15, 1),  # Pong on a CPU
        (2e-6, 2e-6, 15, 2),  # one is busy all the time
        (2e-6, 1.0e-6, 15, 3),
        (2e-6, 1.0e-6, 2.5, 2),
        (2e-6, 1e-9, 1000, 16),
        (2e-6, 1e-6, 0.5, 1),
        (1e300, 1e-300, 15, 15),  # their ratio is infinite
    ],
)
def test_connectors_are_as_many_as_keep_up_and_have_a_core(
    receive: float, train: float, cores: float, number: int
) -> None:
    assert needed(Costs(receive, train), cores) == number


def test_explicit_number_of_connectors_is_kept(measured: Measured) -> None:
    config = resolve("cartpole", ["transport.connectors=2"])
    assert with_connectors(config, measured) == (config, "")
    assert not measured.configs


def test_connector_costs_are_timed_once(measured: Measured) -> None:
    config, note = with_connectors(resolve("cartpole", AUTO), measured)
    assert config.transport.connectors == 3
    assert note == (
        "transport.connectors: 3 for each learner, as receiving a step takes 2 µs and the learner "
        "trains 1,000,000 steps/s, which keeps 2 of them busy, timed now"
    )
    again, note = with_connectors(resolve("cartpole", AUTO), measured)
    assert again == config
    assert note.endswith("timed by an earlier run")
    assert len(measured.configs) == 1
    with_connectors(resolve("cartpole", [*AUTO, "model.hidden=[8]"]), measured)
    assert len(measured.configs) == 2


@pytest.mark.parametrize("entries", [[["x"]], [[float("inf"), 1e-6]], [[0.0, 1e-6]], [[1e-6, 0.0]]])
def test_damaged_cache_file_is_replaced(entries: Any, tmp_path: Path, measured: Measured) -> None:
    with_connectors(resolve("cartpole", AUTO), measured)
    [path] = tmp_path.glob("cache/penstock/connectors/*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": entries}))
    assert with_connectors(resolve("cartpole", AUTO), measured)[0].transport.connectors == 3
    assert len(measured.configs) == 2


def test_timing_timeout_names_the_option_to_raise() -> None:
    def measure(config: Config) -> list[list[Any]]:
        raise TimeoutExpired([sys.executable], 340.0)

    config, note = with_connectors(resolve("cartpole", AUTO), measure)
    assert config.transport.connectors == 1
    assert note.endswith("(it took longer than 340 s; raise run.start_timeout_s)")


@pytest.mark.parametrize(
    ("target", "overrides", "note"),
    [
        ("cartpole", ("transport.connectors=auto",), ""),  # it has none
        (
            "cartpole",
            (*AUTO, "transport.bind=tcp://127.0.0.1:*"),
            "as transport.bind leaves the port to the system",
        ),
        ("cartpole_dqn", AUTO, "as nothing is timed with replay; set a number for more"),
        (
            "cartpole",
            (*AUTO, "learner.threads=15"),
            "as fewer than 2 cores are left for the connectors of a learner",
        ),
    ],
)
def test_config_that_needs_no_timing_has_one_connector(
    target: str, overrides: tuple[str, ...], note: str, measured: Measured
) -> None:
    config, found = with_connectors(resolve(target, overrides), measured)
    assert config.transport.connectors == 1
    assert found == (note and f"transport.connectors: 1 for each learner, {note}")
    assert not measured.configs


def test_learners_on_several_hosts_need_an_explicit_number_of_connectors() -> None:
    with pytest.raises(UserError, match=r"of one run on one host, and 2 learners need"):
        check_not_auto(resolve("cartpole", AUTO), "2 learners need the same number")


class Cluster:
    """An engine of two hosts, which starts nothing."""

    def hosts(self) -> list[str]:
        return ["a", "b"]

    def close(self) -> None:
        pass


def test_auto_connectors_on_a_cluster_are_refused_before_any_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: Measured
) -> None:
    monkeypatch.setattr(run, "make_engine", lambda name, context: Cluster())
    monkeypatch.setattr(measuring, "step_seconds", measured)
    monkeypatch.setattr(measuring, "connector_seconds", measured)
    resolved = resolve_target("cartpole", [*AUTO, "actors.envs=auto"])
    with pytest.raises(UserError, match=r"a cluster learners may run on other hosts; set trans"):
        run.run_in_folder(
            resolved, tmp_path / "run", "no", topology.train_roles, lambda _: FanOut([])
        )
    assert not measured.configs


def test_unresolved_auto_starts_one_connector(tmp_path: Path) -> None:
    specs = topology.train_roles(resolve("cartpole", AUTO), tmp_path)
    assert [spec.name for spec in specs if spec.role == "connector"] == ["connector-0"]


def test_real_connector_costs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "BUDGET_S", 0.05)
    monkeypatch.setattr(measuring, "MESSAGE_S", 0.0)
    [[receive, train]] = measuring.time_connector(resolve("cartpole", AUTO).model_dump(mode="json"))
    assert 0 < receive < train < 1e-3

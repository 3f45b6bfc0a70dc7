"""The number of connectors follows from what receiving takes and what the learner trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.launch import auto_connectors, auto_envs, topology
from penstock.launch.auto_connectors import Costs, check_not_auto, measure, needed, with_connectors

AUTO = ("transport.connectors=auto", "transport.bind=tcp://127.0.0.1:7700")


@pytest.fixture(autouse=True)
def requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What another process was asked to time on a machine of 16 cores: receiving a step takes 2 µs,
    and training it 1 µs."""
    made: list[dict[str, Any]] = []

    def alone(target: str, request: dict[str, Any], **_: Any) -> Any:
        assert target == "penstock.launch.auto_connectors:measure"
        made.append(request)
        return [[2e-6, 1e-6]]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto_connectors, "alone", alone)
    monkeypatch.setattr(auto_connectors, "usable_cores", lambda: 16.0)
    return made


@pytest.mark.parametrize(
    ("receive", "train", "cores", "number"),
    [
        (2e-6, 370e-6, 15, 1),  # Pong on a CPU
        (2e-6, 2e-6, 15, 2),  # one is busy all the time
        (2e-6, 1.0e-6, 15, 3),
        (2e-6, 1.0e-6, 2.5, 2),
        (2e-6, 1e-9, 1000, 16),
        (2e-6, 1e-6, 0.5, 1),
    ],
)
def test_as_many_as_keep_up_and_have_a_core(
    receive: float, train: float, cores: float, number: int
) -> None:
    assert needed(Costs(receive, train), cores) == number


def test_a_number_stays(requests: list[dict[str, Any]]) -> None:
    config = resolve("cartpole", ["transport.connectors=2"])
    assert with_connectors(config, 0) == (config, "")
    assert not requests


def test_costs_are_timed_once(requests: list[dict[str, Any]]) -> None:
    config, note = with_connectors(resolve("cartpole", AUTO), 0)
    assert config.transport.connectors == 3
    assert note == (
        "transport.connectors: 3 for each learner, as receiving a step takes 2 µs and the learner "
        "trains 1,000,000 steps/s, which keeps 2 of them busy, timed now"
    )
    again, note = with_connectors(resolve("cartpole", AUTO), 0)
    assert again == config
    assert note.endswith("timed by an earlier run")
    assert len(requests) == 1
    with_connectors(resolve("cartpole", [*AUTO, "model.hidden=[8]"]), 0)
    assert len(requests) == 2


@pytest.mark.parametrize(
    ("target", "overrides", "note"),
    [
        ("cartpole", ("transport.connectors=auto",), ""),  # it has none
        ("cartpole", (*AUTO, "transport.bind=tcp://127.0.0.1:*"), "leaves the port to the system"),
        ("cartpole_dqn", AUTO, "as a learner with replay trains fewer steps than one receives"),
        ("cartpole", (*AUTO, "learner.threads=15"), "as there are 16 cores"),
    ],
)
def test_where_nothing_is_timed_there_is_one(
    target: str, overrides: tuple[str, ...], note: str, requests: list[dict[str, Any]]
) -> None:
    config, found = with_connectors(resolve(target, overrides), 0)
    assert config.transport.connectors == 1
    assert found.endswith(note)
    assert not requests


def test_learners_of_several_hosts_need_a_number() -> None:
    with pytest.raises(UserError, match=r"of a cluster may be others; set transport\.connectors"):
        with_connectors(resolve("cartpole", AUTO), 2)
    with pytest.raises(UserError, match=r"timed on the learner's host, and 2 learners need"):
        check_not_auto(resolve("cartpole", AUTO), "2 learners need the same number")


def test_a_config_in_which_nothing_was_timed_has_one_connector(tmp_path: Path) -> None:
    specs = topology.train(resolve("cartpole", AUTO), tmp_path)
    assert [spec.name for spec in specs if spec.role == "connector"] == ["connector-0"]


def test_real_costs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_envs, "BUDGET_S", 0.05)
    [[receive, train]] = measure(resolve("cartpole", AUTO).model_dump(mode="json"))
    assert auto_connectors.MESSAGE_S / 2048 < receive < train < 1e-3

"""What adding an engine takes: `agent_engine`, and one registration; here it trains CartPole."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agent_engine import AgentEngine
from penstock.configs.load import resolve_target
from penstock.core.interfaces import Engine, EngineFactory, Handle, Json, Liveness, MetricSink
from penstock.launch import topology
from penstock.launch.engines.registry import ENGINES
from penstock.launch.engines.remote_handles import RemoteHandle
from penstock.launch.run import EngineChoice, run_in_folder
from train_command import assert_balanced
from waiting import free_port

pytestmark = pytest.mark.system

WAIT_S = 100.0  # of a machine that does much else
FACTORY: EngineFactory = AgentEngine  # held against the Protocols by mypy
HANDLE: type[Handle] = RemoteHandle


class Story(MetricSink):
    """What a test does to a run, step by step: each waits until something holds, then acts."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._ends_s = time.monotonic() + WAIT_S
        self.last: dict[str, Any] = {}

    def then(self, when: Callable[[], bool], act: Callable[[], None]) -> None:
        self._steps.append((when, act))

    def metrics(self, metrics: Json, *, final: bool = False) -> None:
        self.last = dict(metrics)
        if final:
            return
        if self._steps and self._steps[0][0]():
            self._steps.pop(0)[1]()
        elif time.monotonic() > self._ends_s:
            self._ends_s += WAIT_S
            os.kill(os.getpid(), signal.SIGINT)

    @property
    def told(self) -> bool:
        return not self._steps


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[AgentEngine]]:
    """The engines that are made under the name "agents"."""
    made: list[AgentEngine] = []

    def make(context: Any) -> Engine:
        made.append(AgentEngine(context))
        return made[-1]

    monkeypatch.setitem(ENGINES, "agents", make)
    yield made
    assert psutil.Process().children(recursive=True) == []


def train(run_dir: Path, story: Story, *more: str) -> tuple[Any, dict[str, Any]]:
    """CartPole with two actors on another host than their learner."""
    overrides = [
        "transport.kind=zmq",
        f"transport.bind=tcp://*:{free_port()}",
        "transport.insecure=true",
        "actors.count=2",
        "actors.envs=8",
        "actors.unroll=8",
        "run.interval_s=0.1",
        "stop.return=null",
        f"run.dir={run_dir}",
        *more,
    ]
    resolved = resolve_target("cartpole", overrides)
    view, place = (lambda _: story), EngineChoice("agents")
    return run_in_folder(resolved, run_dir, "no", topology.train_roles, view, place=place)


def events(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "logs" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_survives_a_killed_actor_and_a_lost_host(
    tmp_path: Path, engines: list[AgentEngine]
) -> None:
    story = Story()
    seen: dict[str, Any] = {}

    def play() -> list[RemoteHandle]:
        """The actors, once both of them make samples; or none."""
        actors = [h for h in engines[0].agents("actors")[-1].handles if h.spec.role == "actor"]
        ready = len(actors) == 2 and all(h.status().produced_steps > 100 for h in actors)
        return actors if ready else []

    def kill() -> None:
        os.kill(play()[0].usage().pid, signal.SIGKILL)

    def restarted() -> bool:
        return sum(handle.incarnation for handle in play()) == 1

    def cut() -> None:
        [agent] = engines[0].agents("actors")
        seen["old"] = list(agent.handles)
        seen["steps"], seen["at_s"] = story.last["env_steps"], time.monotonic()
        agent.cut()
        assert {handle.liveness() for handle in seen["old"]} == {Liveness.PRESUMED_DEAD}

    def held() -> bool:
        return time.monotonic() > float(seen["at_s"]) + 6.0

    def reconnect() -> None:
        assert len(engines[0].agents("actors")) == 2
        assert story.last["env_steps"] > seen["steps"], "those that were cut off play on"
        engines[0].agents("actors")[0].reconnect()

    def replaced() -> bool:
        return bool(play()) and not engines[0].agents("actors")[0].handles

    story.then(lambda: bool(play()), kill)
    story.then(restarted, cut)
    story.then(held, reconnect)
    story.then(replaced, lambda: os.kill(os.getpid(), signal.SIGTERM))
    outcome, summary = train(tmp_path / "run", story)

    assert story.told
    assert (outcome.exit_code, outcome.reason) == (143, "terminated")
    assert_balanced(summary)
    found = events(tmp_path / "run")
    killed = next(e for e in found if e["kind"] == "exit" and e["role"] == "actor-0")
    assert (killed["incarnation"], killed["data"]["signal"]) == (0, "SIGKILL")
    presumed = [e["text"] for e in found if e["kind"] == "restart" and "presumed" in e["text"]]
    assert len(presumed) == 3
    assert all(
        "is presumed dead: its host agent-1 does not answer; it is re" in t for t in presumed
    )
    old = {(handle.spec.name, handle.incarnation) for handle in seen["old"]}
    assert {name for name, _ in old} == {"actor-0", "actor-1", "relay-0"}
    ended = {(e["role"], e["incarnation"]) for e in found if e["data"].get("signal") == "SIGKILL"}
    assert old <= ended, "those that came back were ended, and that was confirmed"
    again = [e for e in found if e["kind"] == "kill" and "was presumed dead" in e["text"]]
    assert len(again) == 3


def test_a_learner_whose_host_is_lost_ends_the_run(
    tmp_path: Path, engines: list[AgentEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_engine.MISSED_S", 1.0)
    story = Story()

    def trained() -> bool:
        """The learner's own count has come over the connection that is cut next."""
        roles = engines[0].agents("learners")[0].handles
        return any(h.status().trained_steps > 0 for h in roles if h.spec.role == "learner")

    story.then(trained, lambda: engines[0].agents("learners")[0].cut())
    outcome, summary = train(tmp_path / "run", story, "run.grace_s=5")
    assert story.told
    assert (outcome.exit_code, outcome.reason) == (1, "fault")
    assert outcome.error == "learner-0: is presumed dead: its host agent-0 does not answer"
    assert summary["accounting"]["trained"] > 0

"""Host agents on nodes of a Ray cluster that cannot run them, and on nodes that have left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import penstock
from penstock import __version__
from penstock.core.interfaces import Bundle, EngineContext, Liveness
from penstock.core.role_spec import RoleSpec, Stage
from penstock.launch import topology
from penstock.launch.engines import ray_agent
from penstock.launch.engines.ray_agent import LEASE_S
from penstock.launch.engines.ray_engine import MOST_FAILURES, RayEngine
from ray_cluster import agents, cluster, drain, ended, events, train
from train_command import last, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

OTHER = "9.9.9"
WAIT_S = 60.0


def of_other_release(folder: Path) -> dict[str, str]:
    """The environment of a node that has another release: this one under another number."""
    package = folder / "penstock"
    package.mkdir(parents=True)
    real = Path(penstock.__file__).parent
    text = f'__version__ = "{OTHER}"\n__path__.append({str(real)!r})\n'
    (package / "__init__.py").write_text(text)
    return {"PYTHONPATH": str(folder)}


@pytest.mark.slow
def test_a_node_of_another_release_is_given_up_and_others_are_used(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def notes() -> list[str]:
        return [event["text"] for event in events(run_dir) if event["kind"] == "note"]

    def play() -> int:
        return int(last(run_dir)["actors_alive"]) if metrics(run_dir) else 0

    with cluster(nodes=1, cores=3) as made:
        command = train(tmp_path, made.address, "actors.count=2..4")
        command.wait_until(lambda: play() == 2)
        made.add_node(num_cpus=2, env_vars=of_other_release(tmp_path / "other"))
        command.wait_until(lambda: any("is not used any more" in text for text in notes()))
        made.add_node(num_cpus=2)
        command.wait_until(lambda: play() == 4)
        ended(command)
    first, given_up = (text for text in notes() if OTHER in text)
    assert first.startswith("a host agent could not be started: ")
    assert f" has Penstock {OTHER}, and the run {__version__}; install the same" in first
    assert f"as {MOST_FAILURES} host agents could not be started there: " in given_up
    assert given_up.endswith("of every node, and start Ray there again")


def wait_until(engine: RayEngine, condition: Callable[[Mapping[str, str]], bool]) -> None:
    """Turn the engine as a supervisor does, until its roles without a host are as wanted."""
    ends_s = time.monotonic() + WAIT_S
    while not condition(engine.unplaced()):
        engine.filenos()
        assert time.monotonic() < ends_s
        time.sleep(0.05)


@pytest.mark.slow
def test_agents_that_have_ended_are_forgotten(tmp_path: Path) -> None:
    bundles = [Bundle("first", ("actor-0",), 1), Bundle("later", ("actor-1",), 2, required=False)]
    with (
        cluster(nodes=1, cores=1) as made,
        closing(RayEngine(EngineContext(tmp_path, cluster=made.address))) as engine,
    ):
        engine.reserve(bundles)
        for _ in range(3):
            node = made.add_node(num_cpus=2)
            wait_until(engine, lambda away: not away)
            made.remove_node(node, allow_graceful=False)
            wait_until(engine, lambda away: away == {"actor-1": "no host has been found yet"})
        assert len(engine._fleet.agents) == len(bundles)


def host_supervisors() -> list[psutil.Process]:
    """Those of this test that run."""
    module = "penstock.launch.engines.host_supervisor"
    running = psutil.process_iter(["cmdline", "environ"])
    return [
        process
        for process in running
        if module in (process.info["cmdline"] or [])
        and (process.info["environ"] or {}).get("PENSTOCK_TEST") == os.environ["PENSTOCK_TEST"]
    ]


def test_a_host_whose_supervisor_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent answers, and no order reaches a role: as where the host's disk hangs."""
    monkeypatch.setattr(ray_agent, "STUCK_S", 2.0)
    others = host_supervisors()
    spec = RoleSpec("actor", 0, "no_such_module:run", Stage.ACTORS)  # it ends at once
    with (
        cluster(nodes=1, cores=1) as made,
        closing(RayEngine(EngineContext(tmp_path, cluster=made.address))) as engine,
    ):
        engine.reserve([Bundle("first", (spec.name,), 1)])
        arguments = topology.role_arguments(tmp_path, tmp_path) | {"grace_s": 1.0}
        handle = engine.start(spec, 0, arguments, tmp_path / "actor-0.log")
        wait_until(engine, lambda _: handle.liveness() is Liveness.DEAD)  # it has begun to report
        handle.reap()
        [process] = [p for p in host_supervisors() if p not in others]
        process.send_signal(signal.SIGSTOP)
        wait_until(engine, lambda away: "does not answer" in away.get("actor-0", ""))
        assert not process.is_running()
        wait_until(engine, lambda away: not away)


def test_a_learner_stays_on_a_node_that_drains_until_it_ends(tmp_path: Path) -> None:
    spec = RoleSpec("learner", 0, "no_such_module:run", Stage.LEARNER)  # it ends at once
    arguments = topology.role_arguments(tmp_path, tmp_path) | {"grace_s": 1.0}
    with (
        cluster(nodes=1, cores=1) as made,
        closing(RayEngine(EngineContext(tmp_path, cluster=made.address))) as engine,
    ):
        node = made.add_node(num_cpus=2)
        engine.reserve([Bundle("learners", (spec.name,), 2)])
        handle = engine.start(spec, 0, arguments, tmp_path / "learner-0.log")
        # Ray ends the node after this time, which all waits below do not reach, or when nothing
        # runs on it any more, which is the case only after the engine has moved the learner.
        drain(made.address, node.node_id, 4 * round(WAIT_S))
        made.add_node(num_cpus=2)
        wait_until(engine, lambda away: "is about to end" in away.get(spec.name, ""))
        wait_until(engine, lambda _: handle.liveness() is Liveness.DEAD)
        assert "is about to end" in engine.unplaced()[spec.name]
        handle.reap()
        wait_until(engine, lambda away: not away)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [1, 0])
def test_stopped_and_continued_command_reports_it_and_resumes_the_run(
    tmp_path: Path, restarts: int
) -> None:
    run_dir = tmp_path / "run"
    with cluster(nodes=2) as made:
        command = train(tmp_path, made.address, "actors.count=2", f"run.restarts={restarts}")
        command.wait_until(lambda: metrics(run_dir) and last(run_dir)["trained_steps"] > 2000)
        of_roles = [p for agent in set(agents().values()) for p in agent.children(recursive=True)]
        command.process.send_signal(signal.SIGSTOP)
        _, alive = psutil.wait_procs(of_roles, LEASE_S + WAIT_S)
        assert not alive
        command.process.send_signal(signal.SIGCONT)
        steps = last(run_dir)["trained_steps"]
        if restarts:
            command.wait_until(lambda: last(run_dir).get("learners_restarted"))
            command.wait_until(lambda: last(run_dir)["trained_steps"] > steps + 2000)
            command.process.send_signal(signal.SIGTERM)
        code, summary, err = command.end()
    assert (code, summary["exit_reason"]) == ((143, "terminated") if restarts else (1, "fault")), (
        err
    )
    assert "Traceback" not in err
    texts = [event["text"] for event in events(run_dir)]
    [said] = [text for text in texts if text.startswith("this command was stopped for ")]
    assert said.endswith("have then ended all roles, after learners had saved")
    resumed = [text for text in texts if "the run continues from its newest checkpoint" in text]
    assert len(resumed) == restarts

"""`penstock train --engine ray`, on clusters of several nodes on this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve_target
from penstock.launch import topology
from penstock.launch.engines import ray_agent, ray_engine
from penstock.launch.run import EngineChoice, run_in_folder
from penstock.monitor.sinks import FanOut
from ray_cluster import agents, cluster, ended, events, on_a_worker, ready, remove_node, train
from train_command import SMALL, Command, assert_balanced, last, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

MY_GAME = "import gymnasium\n\ndef make(): return gymnasium.make('CartPole-v1')\n"
ENDS_S = ray_agent.LEASE_S + 20.0


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Two cores each: a learner and its connector fill one, and two actors another."""
    with cluster(nodes=3) as made:
        yield made


def test_local_cluster_is_started_when_no_address_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # of `--address auto`, which is not given
    command = Command(
        tmp_path, "train", "cartpole", "--json", "--engine", "ray", "stop.env_steps=5000", *SMALL,
        "run.dir=run",
    )  # fmt: skip
    code, summary, err = command.end()
    assert (code, summary["exit_reason"]) == (0, "env_steps"), err
    assert_balanced(summary)
    assert not (tmp_path / "run" / "keys").exists(), "one host needs no network"


def test_a_lost_host_of_actors_is_replaced(tmp_path: Path, nodes: Any) -> None:
    command, run_dir = train(tmp_path, nodes.address), tmp_path / "run"
    command.wait_until(lambda: all(ready(run_dir, f"actor-{i}") for i in range(4)))
    assert len(set(agents().values())) == 3
    nodes.add_node(num_cpus=2)
    lost = next(f"actor-{i}" for i in (0, 2) if on_a_worker(nodes, f"actor-{i}"))
    other = {"actor-0": "actor-2", "actor-2": "actor-0"}[lost]
    remove_node(nodes, agents()[lost])
    command.wait_until(lambda: 1 in ready(run_dir, lost))
    assert ready(run_dir, other) == [0]
    steps = last(run_dir)["trained_steps"]
    command.wait_until(lambda: last(run_dir)["trained_steps"] > steps + 1000)
    ended(command)
    left = [e["data"]["lost"] for e in events(run_dir) if "lost" in e["data"]]
    assert len(left) == 1
    assert lost in left[0]


@pytest.mark.slow
def test_the_host_of_the_only_learner_is_replaced_and_its_checkpoint_resumed(
    tmp_path: Path, nodes: Any
) -> None:
    command, run_dir = train(tmp_path, nodes.address, "checkpoint.every_s=0.5"), tmp_path / "run"
    saved = run_dir / "checkpoints" / "last"
    command.wait_until(lambda: all(ready(run_dir, f"actor-{i}") for i in range(4)))
    command.wait_until(saved.exists)
    if not on_a_worker(nodes, "learner-0"):
        command.process.send_signal(signal.SIGTERM)
        command.end()  # before its cluster does
        pytest.skip("the learner is on the head node, with which the cluster ends")
    nodes.add_node(num_cpus=2)
    remove_node(nodes, agents()["learner-0"])
    command.wait_until(lambda: 1 in ready(run_dir, "learner-0"))
    found = [e for e in events(run_dir) if e["kind"] == "restart" and e["role"] == "learner-0"]
    assert "the run continues from its newest checkpoint" in found[0]["text"]
    command.wait_until(lambda: last(run_dir).get("learners_restarted"))
    ended(command)


@pytest.mark.slow
def test_a_run_on_a_cluster_is_saved_and_shows_its_stacks(tmp_path: Path, nodes: Any) -> None:
    command, run_dir = train(tmp_path, nodes.address), tmp_path / "run"
    command.wait_until(lambda: all(ready(run_dir, f"actor-{i}") for i in range(4)))
    code, answer, err = Command(tmp_path, "save", "run", "--json").end()
    assert (code, answer.get("folder")) == (0, str(run_dir / "checkpoints" / "last")), err
    code, answer, err = Command(tmp_path, "stacks", "run", "--json").end()
    assert code == 0, err
    shown = {process["name"]: process["stacks"] for process in answer["processes"]}
    assert {"learner-0", "actor-0", "actor-3", "connector-0"} < set(shown)
    assert all("most recent call first" in (text or "") for text in shown.values())
    command.process.send_signal(signal.SIGTERM)
    assert command.end()[0] == 143


@pytest.mark.slow
def test_a_run_on_a_cluster_is_profiled(tmp_path: Path, nodes: Any) -> None:
    options = ("actors.count=4", "run.dir=run", *SMALL, "--seconds", "4", "--json")
    placed = ("--engine", "ray", "--address", nodes.address)
    code, told, err = Command(tmp_path, "profile", "cartpole", *options, *placed).end()
    assert code == 0, err
    assert told["cores"] == 6.0
    [learner], actors = told["learner"], told["actors"]
    assert [actor["name"] for actor in actors] == [f"actor-{i}" for i in range(4)]
    assert all(actor["steps_per_s"] > 0 and 0 < actor["cpu"] < 2 for actor in actors)
    assert learner["steps_per_s"] > 0
    assert learner["ceiling_steps_per_s"] > 0, "all of its nodes are on this host"
    for role in (learner, *actors, *told["connectors"]):
        assert abs(sum(role["ledger"].values()) - 1.0) < 1e-6
        assert all(abs(share) < 0.02 for share in role["unmeasured"].values())
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    parts: dict[str, set[str]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            parts.setdefault(names[event["pid"]], set()).add(event["name"])
            assert -1e6 < event["ts"] < event["ts"] + event["dur"] < (told["seconds"] + 1) * 1e6
    assert parts["learner-0"] >= {"forward", "backward", "optimize"}
    assert all({"step", "infer"} <= parts[f"actor-{i}"] for i in range(4))


def test_a_run_whose_driver_is_killed_saves_and_is_resumed(tmp_path: Path, nodes: Any) -> None:
    command, run_dir = train(tmp_path, nodes.address), tmp_path / "run"
    command.wait_until(lambda: metrics(run_dir) and last(run_dir)["trained_steps"] > 1000)
    before = last(run_dir)["trained_steps"]
    of_roles = [p for agent in set(agents().values()) for p in agent.children(recursive=True)]
    command.process.kill()
    command.process.communicate()
    _, alive = psutil.wait_procs(of_roles, ENDS_S)
    assert not alive
    code, summary, err = train(
        tmp_path, nodes.address, "--resume", "must", f"stop.env_steps={before + 20_000}"
    ).end()
    assert (code, summary["exit_reason"]) == (0, "env_steps"), err
    assert summary["trained_steps"] >= before + 20_000
    assert metrics(run_dir)[-1]["time_s"] > 0


@pytest.mark.parametrize("lost", ["learner-0", pytest.param("learner-1", marks=pytest.mark.slow)])
def test_learners_train_on_without_a_lost_host(tmp_path: Path, lost: str) -> None:
    """Learner 0 serves the meeting of the first group, and writes the checkpoints."""
    with cluster(nodes=4, cores=1) as made:
        command = train(tmp_path, made.address, "learner.count=2", "actors.count=2")
        run_dir = tmp_path / "run"
        command.wait_until(lambda: metrics(run_dir) and last(run_dir)["trained_steps"] > 2000)
        assert agents()["learner-0"] != agents()["learner-1"]
        agents()[lost].kill()  # and what its host supervisor runs
        command.wait_until(lambda: any(m.get("learners_alive") == 1 for m in metrics(run_dir)))
        command.wait_until(lambda: 1 in ready(run_dir, lost))
        command.wait_until(lambda: last(run_dir)["learners_alive"] == 2)
        steps = last(run_dir)["trained_steps"]
        command.wait_until(lambda: last(run_dir)["trained_steps"] > steps + 2000)
        summary = ended(command)
    assert summary["accounting"]["lost"]["learner"] > 0


@pytest.mark.slow
def test_learners_on_several_hosts_save_when_their_driver_is_killed(tmp_path: Path) -> None:
    with cluster(nodes=4, cores=1) as made:
        more = ("learner.count=2", "actors.count=2")
        command, run_dir = train(tmp_path, made.address, *more), tmp_path / "run"
        command.wait_until(lambda: metrics(run_dir) and last(run_dir)["trained_steps"] > 2000)
        before = last(run_dir)["trained_steps"]
        of_roles = [p for agent in set(agents().values()) for p in agent.children(recursive=True)]
        command.process.kill()
        command.process.communicate()
        _, alive = psutil.wait_procs(of_roles, ENDS_S)
        assert not alive
        stop = f"stop.env_steps={before + 20_000}"
        code, summary, err = train(tmp_path, made.address, *more, "--resume", "must", stop).end()
    assert (code, summary["exit_reason"]) == (0, "env_steps"), err
    assert summary["trained_steps"] >= before + 20_000


@pytest.mark.slow
def test_code_of_the_user_reaches_the_hosts(tmp_path: Path, nodes: Any) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_game.py").write_text(MY_GAME)
    command = Command(
        folder, "train", "my_game:make", "--json", "--engine", "ray", "--address", nodes.address,
        "--working-dir", ".", *SMALL, "stop.env_steps=2000", f"run.dir={tmp_path / 'run'}",
        "actors.count=4",
    )  # fmt: skip
    code, summary, err = command.end()
    assert code == 0, err
    assert_balanced(summary)


@pytest.mark.slow
def test_auto_actor_count_fills_the_cluster(tmp_path: Path, nodes: Any) -> None:
    command, run_dir = train(tmp_path, nodes.address, "actors.count=auto"), tmp_path / "run"
    command.wait_until(lambda: metrics(run_dir) and last(run_dir)["actors_alive"] == 4)
    assert len(set(agents().values())) == 3
    ended(command)


def test_too_small_a_cluster_is_refused(
    tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "RESERVE_S", 6.0)
    for module in (ray_agent, ray_engine):  # agents that have a host wait for the others
        monkeypatch.setattr(module, "LEASE_S", 2.0)
    overrides = ["actors.count=40", f"run.dir={tmp_path / 'run'}", *SMALL]
    resolved = resolve_target("cartpole", overrides)
    place = EngineChoice("ray", nodes.address)
    with pytest.raises(UserError, match=r"^the Ray cluster has \d free cores and 0 free GPUs, and"):
        run_in_folder(
            resolved,
            tmp_path / "run",
            "no",
            topology.train_roles,
            lambda _: FanOut([]),
            place=place,
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "slurm"), "--engine slurm is unknown; it must be local or ray"),
        (("--address", "auto"), "--address is of a cluster; add --engine ray, or leave it out"),
        (("--engine", "ray", "--working-dir", "nowhere"), "--working-dir nowhere is not a folder"),
        (("--engine", "ray", "--address", "127.0.0.1:9"), "--address 127.0.0.1:9 is not a Ray"),
        (("learner.count=1..2", "actors.count=2"), "learner.count 1..2 starts learners as hosts"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    code, summary, err = Command(tmp_path, "train", "cartpole", "--json", *options).end()
    assert code == 2
    assert message in summary["error"]
    assert not list(tmp_path.iterdir()), err


@pytest.mark.slow
def test_address_auto_is_the_cluster_of_the_environment_variable(
    tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    code, summary, err = train(tmp_path, "auto", "stop.env_steps=5000").end()
    assert (code, summary["exit_reason"]) == (0, "env_steps"), err


@pytest.mark.slow
def test_a_run_whose_head_node_is_lost_is_stopped_and_saved(tmp_path: Path, nodes: Any) -> None:
    command, run_dir = train(tmp_path, nodes.address), tmp_path / "run"
    command.wait_until(lambda: metrics(run_dir) and last(run_dir)["trained_steps"] > 1000)
    own = {p.process.pid for ps in nodes.head_node.all_processes.values() for p in ps}
    started = [p for pid in own for p in psutil.Process(pid).children(recursive=True)]
    for pid in own:  # of Ray alone: what it has started lives
        os.kill(pid, signal.SIGKILL)
    code, summary, err = command.end()
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    assert (code, summary["exit_reason"]) == (143, "terminated"), err
    assert_balanced(summary)
    assert any(
        "the head node of the Ray cluster does not answer" in e["text"] for e in events(run_dir)
    )
    assert (run_dir / "checkpoints" / "last").exists()

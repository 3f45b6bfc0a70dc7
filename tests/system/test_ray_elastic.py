"""`actors.count=MIN..MAX` on a Ray cluster whose nodes come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_cluster import agents, cluster, drain, ended, events, ready, remove_node, train
from train_command import metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def play(run_dir: Path) -> int:
    found = metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
    count: int = found[-1]["actors_alive"] if found else 0
    return count


@pytest.mark.slow
def test_elastic_actors_follow_the_nodes_of_the_cluster(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with cluster(nodes=2) as made:
        command = train(tmp_path, made.address, "actors.count=2..6")
        command.wait_until(lambda: play(run_dir) == 2)
        made.add_node(num_cpus=2)
        command.wait_until(lambda: play(run_dir) == 4)
        made.add_node(num_cpus=2)
        command.wait_until(lambda: play(run_dir) == 6)
        remove_node(made, agents()["actor-4"])
        command.wait_until(lambda: play(run_dir) == 4)
        made.add_node(num_cpus=2)
        command.wait_until(lambda: play(run_dir) == 6)
        ended(command)
    changes = [event["data"] for event in events(run_dir) if event["kind"] == "hosts"]
    found = [change["found"] for change in changes if "found" in change]
    assert len(found) == 3
    assert changes[0]["lost"] == [f"actor-{i}" for i in range(2, 6)] + ["relay-1", "relay-2"]


@pytest.mark.slow
def test_actors_on_a_draining_node_move_without_losing_steps(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with cluster(nodes=3) as made:
        command = train(tmp_path, made.address)
        command.wait_until(lambda: all(ready(run_dir, f"actor-{i}") for i in range(4)))
        nodes = {node.node_id: node for node in made.worker_nodes}
        announced = next(
            (node, role)
            for role, agent in agents().items()
            for node in nodes.values()
            if role.startswith("actor")
            and agent.ppid() in {p.process.pid for ps in node.all_processes.values() for p in ps}
        )
        made.add_node(num_cpus=2)
        drain(made.address, announced[0].node_id)
        command.wait_until(lambda: 1 in ready(run_dir, announced[1]))
        ended(command)
    assert not [event for event in events(run_dir) if event["kind"] == "lost"]
    texts = [event["text"] for event in events(run_dir) if event["kind"] == "hosts"]
    assert any("is about to end" in text for text in texts)

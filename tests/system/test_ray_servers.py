"""A parameter server whose shards are on other hosts of a Ray cluster than their learners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.launch.engines.ray_agent import LEASE_S
from ray_cluster import agents, cluster, ended, events, on_a_worker, ready, remove_node, train
from train_command import assert_balanced, last, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

SHARDS = ("server-0", "server-1")
OPTIONS = (
    "learner.count=2",
    "learner.pace=ssp",
    "learner.server_shards=2",
    "learner.server_spread=true",
    "actors.count=2",
)


@pytest.fixture
def nodes() -> Iterator[Any]:
    """Two cores each: for both learners, for the actors, and for a shard each."""
    with cluster(nodes=4) as made:
        yield made


def node_of(role: str) -> psutil.Process:
    """The process of Ray's node on which a role runs."""
    found = agents()[role].parent()
    assert found is not None
    return found


@pytest.mark.slow
def test_shards_run_on_separate_hosts_and_a_lost_shard_is_replaced(
    tmp_path: Path, nodes: Any
) -> None:
    options = (*OPTIONS, "checkpoint.every_steps=50")
    command, run_dir = train(tmp_path, nodes.address, *options), tmp_path / "run"
    everybody = ("learner-0", "learner-1", *SHARDS, "actor-0", "actor-1")
    command.wait_until(lambda: all(ready(run_dir, role) for role in everybody))
    assert node_of("learner-0") == node_of("learner-1")
    assert len({node_of(role) for role in ("learner-0", *SHARDS)}) == 3
    keys = tmp_path / "run" / "keys" / "learner.key_secret"
    assert keys.stat().st_mode & 0o077 == 0
    saved = run_dir / "checkpoints" / "last"
    command.wait_until(lambda: saved.exists() and last(run_dir)["learner_steps"] > 60)
    lost = next((role for role in SHARDS if on_a_worker(nodes, role)), "")
    assert lost, "only one of them is on the head node"
    nodes.add_node(num_cpus=2)
    remove_node(nodes, agents()[lost])
    command.wait_until(lambda: all(1 in ready(run_dir, role) for role in everybody[:4]))
    found = [e for e in events(run_dir) if e["kind"] == "restart" and e["role"] == lost]
    assert "the run continues from its newest checkpoint" in found[0]["text"]
    lines = len(metrics(run_dir))
    command.wait_until(lambda: any(m["learner_steps"] > 60 for m in metrics(run_dir)[lines + 1 :]))
    ended(command)


@pytest.mark.slow
def test_learners_save_by_their_shards_when_the_command_is_killed(
    tmp_path: Path, nodes: Any
) -> None:
    options = (*OPTIONS, "checkpoint.every_s=1000")
    command, run_dir = train(tmp_path, nodes.address, *options), tmp_path / "run"
    command.wait_until(lambda: metrics(run_dir) and last(run_dir)["learner_steps"] > 60)
    of_roles = [p for agent in set(agents().values()) for p in agent.children(recursive=True)]
    command.process.kill()
    command.process.communicate()
    _, alive = psutil.wait_procs(of_roles, LEASE_S + 20.0)
    assert not alive
    more = ("--resume", "must", "stop.learner_steps=100")  # no checkpoint was due before
    code, summary, err = train(tmp_path, nodes.address, *options, *more).end()
    assert (code, summary["exit_reason"]) == (0, "learner_steps"), err


@pytest.mark.slow
def test_learners_on_several_hosts_share_a_parameter_server(tmp_path: Path, nodes: Any) -> None:
    """Three learners need three cores, and no host has more than two."""
    options = (*OPTIONS, "learner.count=3", "actors.count=3", "stop.learner_steps=200")
    nodes.add_node(num_cpus=2)
    command, run_dir = train(tmp_path, nodes.address, *options), tmp_path / "run"
    learners = [f"learner-{rank}" for rank in range(3)]
    command.wait_until(lambda: all(ready(run_dir, role) for role in learners))
    assert len({agents()[role] for role in learners}) == 3
    code, summary, err = command.end()
    assert (code, summary["exit_reason"]) == (0, "learner_steps"), err
    assert summary["learner_steps"] >= 200
    assert_balanced(summary)

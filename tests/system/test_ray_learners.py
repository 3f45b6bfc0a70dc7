"""`learner.count=MIN..MAX` on a Ray cluster whose nodes come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_cluster import agents, cluster, ended, events, remove_node, train
from train_command import last, metrics

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

GROWS = (
    *("learner.count=1..2", "actors.count=2", "checkpoint.every_s=2"),
    # The preset's rate decays over 3 million steps, and a fast machine reaches a third of them.
    *("learner.lr=1e-3", "learner.lr_decay_steps=1e12", "learner.lr_scaling=linear"),
    "learner.reduce.codec=auto",
)


def report(run_dir: Path) -> dict[str, Any]:
    return last(run_dir) if metrics(run_dir) else {}


def training(run_dir: Path) -> set[int]:
    """The ranks that have trained in the last interval."""
    ranks = report(run_dir).get("ranks", [])
    return {rank["rank"] for rank in ranks if rank.get("trained_steps_per_s")}


def test_a_learner_joins_with_a_node_and_leaves_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with cluster(nodes=1, cores=3) as made:
        command = train(tmp_path, made.address, *GROWS)
        command.wait_until(lambda: report(run_dir).get("trained_steps", 0) > 2000)
        assert training(run_dir) <= {0}
        assert report(run_dir)["learners_alive"] == 1
        assert report(run_dir)["learning_rate"] == pytest.approx(1e-3, rel=0.1)
        made.add_node(num_cpus=1)
        command.wait_until(lambda: training(run_dir) == {0, 1})
        assert report(run_dir)["learners_alive"] == 2
        command.wait_until(lambda: report(run_dir)["learning_rate"] == pytest.approx(2e-3, rel=0.1))
        remove_node(made, agents()["learner-1"])
        command.wait_until(lambda: report(run_dir)["learners_alive"] == 1)
        steps = report(run_dir)["trained_steps"]
        command.wait_until(lambda: report(run_dir)["trained_steps"] > steps + 2000)
        assert report(run_dir)["learning_rate"] == pytest.approx(1e-3, rel=0.1)
        made.add_node(num_cpus=1)
        command.wait_until(lambda: training(run_dir) == {0, 1})
        ended(command)
    changes = [event["data"] for event in events(run_dir) if event["kind"] == "hosts"]
    assert changes[0]["lost"] == ["connector-1", "learner-1"]
    assert sum("learner-1" in change.get("found", ()) for change in changes) == 2
    texts = [event["text"] for event in events(run_dir) if event["kind"] == "note"]
    assert sum(text.startswith("learner.reduce.codec auto is") for text in texts) == 1
    restarts = [event["role"] for event in events(run_dir) if event["kind"] == "restart"]
    assert restarts == []

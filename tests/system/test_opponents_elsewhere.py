"""Actors of other hosts play against members of the learner's pool."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ray_cluster import cluster, events, ready
from train_command import SMALL, Command, Penstock, assert_balanced, last, metrics
from waiting import free_port

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

# Half of the rows play against three members at a time, each of which leaves after 20 games.
LEAGUE = (
    *("league.mirror=0.5", "league.chairs=3", "league.games=20"),
    *("league.snapshot_steps=500", "league.snapshot_win_rate=null"),
)


def has_played(run_dir: Path, games: int) -> bool:
    """Whether so many games against members are counted, by the newest line of the metrics."""
    return bool(metrics(run_dir)) and last(run_dir)["league_games"] >= games


def reasons(run_dir: Path) -> set[str]:
    """Why connectors refused messages."""
    return {event["data"]["reason"] for event in events(run_dir) if event["kind"] == "rejected"}


@pytest.mark.parametrize("connectors", [1, 2])
def test_actors_by_hand_play_matches_and_go_on_when_the_learner_is_killed(
    penstock: Penstock, tmp_path: Path, connectors: int
) -> None:
    """They have a relay, as on a host of their own, which stays when the learner does not."""
    address = f"tcp://127.0.0.1:{free_port()}"
    run_dir = tmp_path / "run"
    options = (*SMALL, *LEAGUE, f"transport.connectors={connectors}", "checkpoint.every_s=0.5")
    learner = penstock("learner", "kuhn", "--bind", address, *options, "run.dir=run", "--json")
    joined = ("--connect", address, "--transport=zmq", "--count=2")
    actors = penstock("actor", *joined, "--dir=actors", "--json")

    learner.wait_until(lambda: has_played(run_dir, 300))
    learner.wait_until((run_dir / "checkpoints" / "last").exists)
    assert actors.pid_of("relay-0")
    os.kill(learner.pid_of("learner-0"), signal.SIGKILL)
    learner.wait_until(lambda: last(run_dir).get("learners_restarted"))
    games = last(run_dir)["league_games"]
    learner.wait_until(lambda: has_played(run_dir, games + 300))
    assert last(run_dir)["league_members"] > 1

    learner.process.send_signal(signal.SIGTERM)
    code, summary, err = learner.end()
    assert code == 143, err
    assert_balanced(summary)
    assert reasons(run_dir) <= {"unknown"}, "only the actors are new to the second connector"
    actors.process.send_signal(signal.SIGTERM)
    assert actors.end()[0] in (0, 143)


@pytest.mark.slow
def test_actors_on_a_cluster_play_matches(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with cluster(nodes=2) as nodes:
        placed = ("--engine", "ray", "--address", nodes.address)
        command = Command(
            *(tmp_path, "train", "kuhn", *SMALL, *LEAGUE, "actors.count=2", "run.dir=run"),
            *("stop.env_steps=3000", "--json", *placed),
        )
        command.wait_until(lambda: all(ready(run_dir, f"actor-{i}") for i in range(2)))
        code, summary, err = command.end()
    assert (code, summary["exit_reason"]) == (0, "env_steps"), err
    assert_balanced(summary)
    assert has_played(run_dir, 200)
    assert not reasons(run_dir)

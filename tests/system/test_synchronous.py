"""`transport.max_policy_lag` below the updates of a batch, between processes: batches are played in
turns with training, or late in it.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train_command import SMALL, Command, metrics

pytestmark = pytest.mark.system

SYNCHRONOUS = (*SMALL, "run.dir=run", "transport.max_policy_lag=0", "learner.batch_slots=3")


def lags(folder: Path) -> Counter[int]:
    """Trained steps by policy lag."""
    found: Counter[int] = Counter()
    for line in metrics(folder / "run"):
        found.update({int(lag): n for lag, n in line["policy_lag_histogram"].items()})
    return found


@pytest.mark.parametrize(("kind", "connectors"), [("shm", 1), ("zmq", 1), ("zmq", 2)])
def test_killed_actor_causes_no_lag_and_no_dropped_steps(
    kind: str, connectors: int, penstock: Callable[..., Command], tmp_path: Path
) -> None:
    transport = (f"transport.kind={kind}", f"transport.connectors={connectors}")
    options = (*SYNCHRONOUS, *transport, "transport.slots=2")
    run = penstock("train", "cartpole", "--json", *options)

    def last() -> dict[str, Any]:
        return (metrics(tmp_path / "run") or [{}])[-1]

    run.wait_until(lambda: last().get("actors_alive") == 2)
    os.kill(run.pid_of("actor-1"), signal.SIGKILL)
    run.wait_until(lambda: (last()["actors_restarted"], last()["actors_alive"]) == (1, 2))
    before = last()["trained_steps"]
    run.wait_until(lambda: last()["trained_steps"] > before)
    run.process.send_signal(signal.SIGINT)
    code, result, err = run.end()
    assert code == 130, err
    assert lags(tmp_path).keys() == {0}
    counts = result["accounting"]
    assert counts["dropped"] == {}
    lost = sum(counts["lost"].values())
    assert counts["produced"] == counts["trained"] + lost + counts["in_flight"]


def test_each_update_of_a_batch_adds_one_to_the_lag(
    penstock: Callable[..., Command], tmp_path: Path
) -> None:
    options = (*SYNCHRONOUS, "learner.updates_per_batch=4", "transport.slots=2", "actors.count=2")
    run = penstock("train", "cartpole_ppo", "--json", *options, "stop.env_steps=20000")
    assert run.end()[0] == 0
    found = lags(tmp_path)
    assert found.keys() == {0, 1, 2, 3}
    assert max(found.values()) < 1.1 * min(found.values())  # equal shares but for reset rows


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_batch_is_played_during_the_last_updates_of_the_previous_batch(
    kind: str, penstock: Callable[..., Command], tmp_path: Path
) -> None:
    batches = ("algo.epochs=10", "learner.updates_per_batch=4", "learner.batch_slots=3")
    lag = ("transport.max_policy_lag=20", f"transport.kind={kind}", "transport.slots=2")
    options = (*SMALL, "run.dir=run", *batches, *lag, "actors.count=2", "stop.env_steps=20000")
    run = penstock("train", "cartpole_ppo", "--json", *options)
    code, result, err = run.end()
    assert code == 0, err
    found = lags(tmp_path)
    # 40 updates a batch; the four of an epoch add up to 3. Later slots of a batch may lag less.
    assert 20 <= max(found) <= 20 + 3
    assert result["accounting"]["dropped"] == {}

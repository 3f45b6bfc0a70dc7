"""What to do with each of 10,000 items is learnt by the number of the item alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from train_command import train

pytestmark = [pytest.mark.learning, pytest.mark.system, pytest.mark.timeout(240)]

OPTIONS = (
    *("env.kind=vector", "algo.discount=0", "model.critic=shared", "stop.minutes=3"),
    *("transport.kind=inproc", "actors.count=1", "actors.envs=256", "actors.unroll=21"),
    *("learner.batch_slots=1", "transport.slots=1", "learner.device=cpu"),
    *("algo.name=ppo", "algo.epochs=4", "learner.updates_per_batch=4", "learner.lr=3e-3"),
)


@pytest.mark.parametrize("kwargs", ["{}", pytest.param("{parts: true}", marks=pytest.mark.slow)])
def test_each_of_ten_thousand_items_is_learnt(tmp_path: Path, kwargs: str) -> None:
    """The best return is 20, and that of guesses 5. Each item is seen some fifteen times."""
    shutil.copy(Path(__file__).parents[1] / "shop_game.py", tmp_path)
    summary = train(
        tmp_path, "shop_game:test/Shop-v0", f"env.kwargs={kwargs}", *OPTIONS, "stop.return=19"
    )
    assert summary["exit_reason"] == "return"
    assert summary["trained_steps"] < 250_000

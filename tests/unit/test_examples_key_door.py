"""The example of a first game: what its board and its mask show is enough to play it as well as
its search says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def best_action(game: Any, shown: dict[str, Any]) -> tuple[int, bool]:
    """The move that comes nearest to the key, or with it to the door; the hand where it helps."""
    mask = shown["action_mask"]
    goal = game.door if shown["status"][0] > 0 or mask[5] else game.key
    ways = {move: game.distance(target, goal) for move, target in enumerate(beside(game.player))}
    return min(np.flatnonzero(mask[:4]).tolist(), key=ways.__getitem__), bool(mask[5])


def beside(cell: tuple[int, int]) -> list[tuple[int, int]]:
    row, column = cell
    return [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]


def test_best_return_equals_that_of_an_exhaustive_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    game = import_module("key_door").KeyDoor()
    for seed in range(20):
        shown, info = game.reset(seed=seed)
        assert game.observation_space.contains(shown)
        total, over = 0.0, False
        while not over:
            shown, reward, over, _, _ = game.step(best_action(game, shown))
            total += reward
        assert total == pytest.approx(info["optimum"])

"""The example of a first game: what its board and its mask show is enough to play it as well as
its search says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def best_action(game: Any, shown: dict[str, Any]) -> tuple[int, int]:
    """The move that comes nearest to the key, or with it to the door, by the observation alone."""
    has_key, can_use = shown["status"][0] > 0 or shown["action_mask"][5], shown["action_mask"][5]
    goal = game.door if has_key else game.key
    assert shown["board"][3 if has_key else 2][goal] > 0
    free = np.flatnonzero(shown["action_mask"][:4])
    return min(free, key=lambda move: game.distance(targets(game.player)[move], goal)), can_use


def targets(cell: tuple[int, int]) -> list[tuple[int, int]]:
    row, column = cell
    return [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]


def test_the_best_return_is_that_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from key_door import KeyDoor

    game = KeyDoor()
    for seed in range(20):
        shown, info = game.reset(seed=seed)
        assert game.observation_space.contains(shown)
        total, over = 0.0, False
        while not over:
            shown, reward, over, _, _ = game.step(best_action(game, shown))
            total += reward
        assert total == pytest.approx(info["optimum"])

"""The example of a custom environment: its pixels determine its rewards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.configs.sections import EnvConfig
from penstock.envs import make

EXAMPLES = Path(__file__).parents[2] / "examples"
EPISODE = 9  # eight steps, and the one that resets


@pytest.mark.parametrize("follows", [True, False])
def test_paddle_that_follows_the_ball_catches_it(
    monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    game = make(EnvConfig(id="catch:Catch"), 50)
    obs = np.zeros((50, 1, 45, 45), np.uint8)
    game.reset_into(3, obs)
    for step in range(1, 5 * EPISODE + 1):
        cells = obs[:, 0, ::5, ::5]
        ball = (cells == 255).any(1).argmax(1)
        paddle = (cells == 128).any(1).argmax(1) + 1  # its middle: it shows from its left end on
        towards = np.sign(ball - paddle)
        away = np.where(ball >= 4, -1, 1)
        reward, terminated, truncated = game.step_into((towards if follows else away) + 1, obs)
        ends = step % EPISODE == EPISODE - 1
        np.testing.assert_array_equal(reward, float(ends and follows))
        np.testing.assert_array_equal(terminated, ends)
        assert not truncated.any()
    game.close()

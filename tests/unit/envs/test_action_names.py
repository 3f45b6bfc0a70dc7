"""Names of actions, which videos show beside their probabilities."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv

from penstock.configs.load import resolve
from penstock.envs import make
from penstock.envs.action_names import action_names


@pytest.mark.parametrize(
    ("target", "module", "names"),
    [
        ("CartPole-v1", "gymnasium", ("left", "right")),
        ("Pendulum-v1", "gymnasium", ("torque",)),
        ("synthetic", "gymnasium", ()),
        ("minatar_breakout", "minatar", ("nothing", "left", "right")),
        ("lunarlander", "Box2D", ("nothing", "left engine", "main engine", "right engine")),
        ("pong", "ale_py", ("noop", "fire", "right", "left", "rightfire", "leftfire")),
    ],
)
def test_known_environments_have_action_names(
    target: str, module: str, names: tuple[str, ...]
) -> None:
    pytest.importorskip(module)
    config = resolve(target)
    game = make(config.env, 1, filmed=True)
    try:
        assert game.action_names == names
        assert not names or len(names) == (sum(game.info.counts) or 1)
    finally:
        game.close()


def test_names_of_another_number_of_actions_are_not_used() -> None:
    vector = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")])
    assert action_names("CartPole-v1", vector, 3) == ()
    assert action_names("module:CartPole-v1", vector, 2) == ("left", "right")
    vector.close()

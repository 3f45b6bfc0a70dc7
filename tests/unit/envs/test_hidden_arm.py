"""The bandit whose arm only the own rewards tell: its returns, lengths and options."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import make

ENVS = 200


def mean_return(arms: int, steps: int, *, searches: bool) -> float:
    """The mean return of one episode: of trying arms until one pays, or of the first arm alone."""
    game = make(EnvConfig(id="penstock/HiddenArm-v0", kwargs={"arms": arms, "steps": steps}), ENVS)
    obs = np.zeros((ENVS, 1), np.float32)
    game.reset_into(0, obs)
    arm = np.zeros(ENVS, np.int32)
    returns = np.zeros(ENVS)
    for step in range(1, steps + 1):
        reward, terminated, truncated = game.step_into(arm, obs)
        assert (obs == 1).all()
        assert (terminated == (step == steps)).all()
        assert not truncated.any()
        returns += reward
        if searches:
            arm += reward == 0

    reward, terminated, _ = game.step_into(np.zeros(ENVS, np.int32), obs)
    assert not reward.any()  # it only resets
    assert not terminated.any()
    game.close()
    return float(returns.mean())


@pytest.mark.parametrize(("arms", "steps", "best"), [(2, 10, 9.5), (4, 20, 18.5)])
def test_searching_for_the_arm_has_the_best_return(arms: int, steps: int, best: float) -> None:
    assert mean_return(arms, steps, searches=True) == pytest.approx(best, abs=0.25)
    # A guess is paid in each step or never: the mean of 200 deviates by 0.6 at most.
    assert mean_return(arms, steps, searches=False) == pytest.approx(steps / arms, abs=2.5)


def test_a_bandit_of_one_arm_is_refused() -> None:
    with pytest.raises(UserError, match="arms 1 must be at least 2, and steps 10 at least 1"):
        make(EnvConfig(id="penstock/HiddenArm-v0", kwargs={"arms": 1}), 2)

"""EnvPool's environments; without the package, only the error message is tested."""

from __future__ import annotations

import re
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from penstock.configs.errors import UserError
from penstock.configs.sections import EnvConfig
from penstock.envs import make
from penstock.envs.checking.checks import Checker
from penstock.envs.checking.vector import check_vector
from penstock.envs.envpool import PoolVectorEnv

CARTPOLE = EnvConfig(id="envpool/CartPole-v1", kwargs={"max_episode_steps": 15})


def test_a_missing_package_is_answered_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match=re.escape('run `pip install "penstock[envpool]"`')):
        make(CARTPOLE, 2)


def test_envpool_vector_passes_the_vector_checks() -> None:
    pytest.importorskip("envpool")
    for name, options in (("CartPole-v1", {"max_episode_steps": 15}), ("LunarLander-v3", {})):
        found = Checker()
        check_vector(found, partial(PoolVectorEnv, name, options, threads=1), 150)
        assert found.problems == []


def test_envpool_cartpole_equals_gymnasiums() -> None:
    pytest.importorskip("envpool")
    game, single = make(CARTPOLE, 3), gymnasium.make("CartPole-v1").unwrapped
    out = np.zeros((3, 4), np.float32)
    game.reset_into(3, out)
    ends = 0
    over = np.zeros(3, np.bool_)
    for step in range(40):
        before, action = out.copy(), np.full(3, step // 4 % 2, np.int32)
        reward, terminated, truncated = game.step_into(action, out)
        for i in np.flatnonzero(~over):
            theirs: Any = single
            theirs.reset()
            theirs.state = before[i].astype(np.float64)
            shown, their_reward, falls, *_ = theirs.step(int(action[i]))
            np.testing.assert_allclose(out[i], shown, atol=1e-5)
            assert (reward[i], terminated[i]) == (their_reward, falls)
        assert not reward[over].any()
        over = terminated | truncated
        ends += int(over.sum())
    assert ends >= 6
    game.close()


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (EnvConfig(id="envpool/LunarLander"), "EnvPool has no LunarLander; the nearest is Lunar"),
        (EnvConfig(id="envpool/CartPole-v1", kwargs={"seed": 3}), "not set here; set run.seed"),
        (
            EnvConfig(id="envpool/CartPole-v1", kwargs={"max_steps": 3}),
            "there is no option max_steps; the nearest is max_episode_steps",
        ),
    ],
)
def test_invalid_envpool_options_are_refused_in_one_sentence(env: EnvConfig, sentence: str) -> None:
    pytest.importorskip("envpool")
    with pytest.raises(UserError, match=re.escape(sentence)):
        make(env, 2)

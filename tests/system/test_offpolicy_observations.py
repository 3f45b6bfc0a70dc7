"""DQN and SAC in real runs, with observations of several parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.algos.samples import network_shape
from penstock.evaluation.loaded_policy import load_policy
from train_command import Penstock

pytestmark = [pytest.mark.system, pytest.mark.timeout(110)]

GAMES = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

class Masked(gymnasium.Env):
    '''Pays 1 for the allowed action that a flag names; one of four actions is not allowed, and
    taking it ends the program.'''
    observation_space = Dict(
        flag=MultiBinary(4), noise=Box(-1, 1, (3,), np.float32), action_mask=MultiBinary(4)
    )
    action_space = Discrete(4)
    def _show(self):
        best, closed = self.np_random.permutation(4)[:2]
        self.best, self.mask, flag = best, np.ones(4, np.int8), np.zeros(4, np.int8)
        self.mask[closed], flag[best] = 0, 1
        noise = self.np_random.uniform(-1, 1, 3).astype(np.float32)
        return {"flag": flag, "noise": noise, "action_mask": self.mask}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}
    def step(self, action):
        if not self.mask[action]:
            raise RuntimeError("a forbidden action was taken")
        reward, self.steps = float(action == self.best), self.steps + 1
        return self._show(), reward, False, self.steps == 20, {}

class Reach(gymnasium.Env):
    '''The nearer two numbers are to those shown, far from 0 and on scales of their own, the less it
    costs.'''
    observation_space = Dict(
        goal=Box(-1e4, 1e4, (2,), np.float32), frame=Box(0, 255, (2, 40, 40), np.uint8)
    )
    action_space = Box(-1, 1, (2,), np.float32)
    def _show(self):
        self.goal = self.np_random.uniform(-0.8, 0.8, 2)
        shown = (1000 + self.goal * [300, 3]).astype(np.float32)
        return {"goal": shown, "frame": np.full((2, 40, 40), 7, np.uint8)}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}
    def step(self, action):
        reward, self.steps = -float(np.abs(action - self.goal).sum()), self.steps + 1
        return self._show(), reward, False, self.steps == 20, {}
"""
SMALL = ("actors.count=1", "actors.envs=8", "actors.unroll=8", "run.dir=run", "--json")
REPLAY = ("replay.capacity=20000", "replay.min_size=500", "replay.batch_size=64")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "games.py").write_text(GAMES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_dqn_learns_with_dict_observations_and_action_masks(
    folder: Path, penstock: Penstock
) -> None:
    """At random a step pays 1/3, and 20 of them 6.7; a game in which a forbidden action is taken
    ends the actor, which the run does not survive."""
    options = ("algo.name=dqn", "algo.discount=0.5", "model.normalize_observations=true")
    ends = ("stop.return=16", "stop.minutes=1.2", "run.max_restarts=0", "learner.lr=2e-3")
    learnt = (*options, *ends, "algo.epsilon=0.2")
    run = penstock("train", "games:Masked", *learnt, *REPLAY, *SMALL)
    status, summary, errors = run.end()
    assert status == 0, errors
    assert summary["exit_reason"] == "return"
    steps = summary["learner_steps"] + 20
    again = ("--resume", "must", "stop.return=null", f"stop.learner_steps={steps}", "--json")
    status, summary, errors = penstock("train", "run", *again).end()
    assert status == 0, errors
    assert summary["learner_steps"] >= steps
    policy = load_policy("run", "last")
    flag, mask = np.eye(4, dtype=np.int8), 1 - np.roll(np.eye(4, dtype=np.int8), 1, 1)
    shown = {"flag": flag, "noise": np.zeros((4, 3), np.float32), "action_mask": mask}
    assert policy(shown)[0].tolist() == [0, 1, 2, 3]
    forbidden = {**shown, "action_mask": 1 - flag}
    assert (policy(forbidden)[0] != np.arange(4)).all()
    policy.save("policy.safetensors")
    assert load_policy("policy.safetensors")(shown)[0].tolist() == [0, 1, 2, 3]


def test_sac_trains_on_frames_with_normalised_numbers(folder: Path, penstock: Penstock) -> None:
    """The statistics that actors get are those of what the game shows: 1000 and the deviation of an
    even distribution, 0.8 / sqrt(3) of the scale."""
    options = ("algo.name=sac", "model.normalize_observations=true", "stop.return=null")
    ends = ("stop.learner_steps=40", "stop.minutes=1.2", "learner.publish_every=1")
    run = penstock("train", "games:Reach", *options, *ends, *REPLAY, *SMALL)
    status, summary, errors = run.end()
    assert status == 0, errors
    assert summary["exit_reason"] == "learner_steps"
    policy = load_policy("run", "last")
    # The weights hold what the actors got.
    named = network_shape(policy.config, policy.info).layout.views(policy._weights)
    assert named["normalizer.count"].item() >= 40 * 64
    deviation = 0.8 / np.sqrt(3) * np.array([300, 3])
    assert (np.abs(named["normalizer.mean"] - 1000) < 0.3 * deviation).all()
    np.testing.assert_allclose(np.sqrt(named["normalizer.var"]), deviation, rtol=0.15)
    action, _ = policy({"goal": [1000, 1000], "frame": np.full((2, 40, 40), 7, np.uint8)})
    assert action.shape == (2,)
    assert np.abs(action).max() <= 1

"""DQN with masks, a Dict and several choices at once, through the real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import penstock
from train_command import run_command, train

pytestmark = [pytest.mark.learning, pytest.mark.system, pytest.mark.timeout(240)]

LOCKS = '''
import gymnasium as gym
import numpy as np
from gymnasium import spaces

COUNTS = (3, 4)


class Locks(gym.Env):
    """A lock of two dials, which shows where both must stand; a wrong place of each is forbidden.

    A step pays a half for each dial that is right, so an episode of 8 steps pays 8 at most, and
    random play of what is allowed (1/2 + 1/3) * 4 = 3.3.
    """

    observation_space = spaces.Dict(
        {
            "places": spaces.MultiDiscrete(COUNTS),
            "noise": spaces.Box(-1, 1, (2,)),
            "action_mask": spaces.Box(0, 1, (sum(COUNTS),), np.int8),
        }
    )
    action_space = spaces.MultiDiscrete(COUNTS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return self._turn(), {}

    def step(self, action):
        starts = np.cumsum([0, *COUNTS[:-1]])
        if not self._mask[starts + action].all():
            raise RuntimeError(f"a forbidden place of {action}")
        reward = float((action == self._places).mean())
        self._steps += 1
        return self._turn(), reward, self._steps == 8, False, {}

    def _turn(self):
        rng = self.np_random
        self._places = np.array([rng.integers(count) for count in COUNTS])
        masks = []
        for place, count in zip(self._places, COUNTS, strict=True):
            mask = np.ones(count, np.int8)
            mask[(place + 1 + rng.integers(count - 1)) % count] = 0
            masks.append(mask)
        self._mask = np.concatenate(masks)
        noise = rng.uniform(-1, 1, 2).astype(np.float32)
        return {"places": self._places, "noise": noise, "action_mask": self._mask}
'''
OPTIONS = (
    *("algo.name=dqn", "algo.discount=0.5", "model.hidden=[32]", "learner.lr=1e-3"),
    *("replay.min_size=500", "replay.samples_per_insert=16", "replay.prioritized=true"),
    *("stop.return=7.6", "stop.minutes=3", "run.seed=1"),
)
PARTS = {
    "plain": ("algo.epsilon={from: 1, to: 0.02, steps: 2000}", "algo.epsilon_alpha=0"),
    "rainbow": ("algo.quantiles=5", "algo.noisy=true", "algo.epsilon=0", "algo.n_step=3"),
}


@pytest.mark.parametrize("parts", PARTS)
def test_a_lock_of_two_dials_is_opened_and_no_forbidden_place_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: str
) -> None:
    """The environment fails at a forbidden place, also of an action at random."""
    (tmp_path / "locks.py").write_text(LOCKS, encoding="utf-8")
    options = ("transport.kind=inproc", *OPTIONS, *PARTS[parts])
    summary = train(tmp_path, "locks:Locks", *options)
    assert summary["exit_reason"] == "return"
    result = run_command(tmp_path, "eval", "run", "--episodes", "20")
    assert result["return"]["mean"] > 7.6

    # What the policy knows of an observation: the values of all places, low where it must not go.
    monkeypatch.chdir(tmp_path)
    policy = penstock.load_policy("run")
    mask = np.array([1, 0, 1, 1, 1, 1, 0], np.int8)
    places = {"places": np.array([2, 1]), "noise": np.zeros(2, np.float32), "action_mask": mask}
    details = policy.details(places)
    assert details.action.tolist() == [2, 1]
    assert details.q is not None
    np.testing.assert_array_equal(details.q < -1e8, mask == 0)

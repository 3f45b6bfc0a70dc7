"""Hindsight replay against the list of all steps that were played."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.algos.hindsight import Hindsight, make_hindsight
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.core.observations import views
from penstock.envs import make
from penstock.envs.goals import Goals
from penstock.replay import Batch, Replay

DISCOUNT = 0.9


class Play(NamedTuple):
    """Steps that one environment played, and a replay that has them."""

    replay: Replay
    goals: Goals
    obs: Any
    """Packed observations ``[steps, nbytes]``."""
    next_obs: Any
    ended: Any
    """Whether each step was the last of its episode."""


def play(ends: bool, steps: int = 600) -> Play:
    config = EnvConfig(id="goal_games:PointReach", kwargs={"ends": ends})
    env = make(config, count=1)
    space = env.info.observation_space
    columns = {"obs": (np.uint8, space.shape), "action": (np.float32, (2,))}
    replay = Replay(columns, capacity=1000, discount=DISCOUNT, seed=0)
    rng = np.random.default_rng(1)
    now, then = np.zeros((2, 1, *space.shape), np.uint8)
    env.reset_into(0, now)
    observed, following, ended = [], [], []
    over = False
    for _ in range(steps):
        action = rng.uniform(-1, 1, (1, 2)).astype(np.float32)
        reward, terminated, truncated = env.step_into(action, then)
        if not over:
            replay.add(
                obs=now[0], action=action[0], reward=reward[0], terminated=terminated[0],
                truncated=truncated[0], next_obs=then[0],
            )  # fmt: skip
            observed.append(now[0].copy())
            following.append(then[0].copy())
            ended.append(bool(terminated[0] | truncated[0]))
        over = bool(terminated[0] | truncated[0])
        now[:] = then
    env.close()
    return Play(replay, Goals(config), np.stack(observed), np.stack(following), ended)


def relabelled(played: Play, fraction: float, **options: Any) -> tuple[Batch, Batch]:
    """A batch as it was played, and the same after hindsight."""
    cfg = resolve("x:f", ["algo.name=sac", *(f"algo.{k}={v}" for k, v in options.items())]).algo
    batch = played.replay.sample(512)
    original = Batch({name: array.copy() for name, array in batch.items()})
    rng = np.random.default_rng(3)
    hindsight = Hindsight(played.goals, fraction, cfg)
    hindsight(batch, partial(played.replay.future, batch.keys, rng=rng), rng)
    return original, batch


@pytest.mark.parametrize("ends", [False, True])
def test_goals_are_replaced_by_what_the_same_episode_achieves_later(ends: bool) -> None:
    played = play(ends)
    original, batch = relabelled(played, 0.8)
    parts = played.goals.parts
    now, then = views(parts, batch["obs"]), views(parts, batch["next_obs"])
    before = views(parts, original["obs"])
    steps = {obs.tobytes(): i for i, obs in enumerate(played.obs)}
    achieved = views(parts, played.next_obs)["achieved_goal"]

    replaced = (now["desired_goal"] != before["desired_goal"]).any(1)
    assert replaced.mean() == pytest.approx(0.8, abs=0.06)
    terminations = 0
    distances = []
    for i in range(512):
        goal = now["desired_goal"][i]
        assert np.array_equal(goal, then["desired_goal"][i])
        for part in ("observation", "achieved_goal"):
            assert np.array_equal(now[part][i], before[part][i])
        if not replaced[i]:
            for name in batch:
                assert np.array_equal(batch[name][i], original[name][i]), name
            continue

        step = steps[original["obs"][i].tobytes()]
        last = step + played.ended[step:].index(True) if True in played.ended[step:] else None
        [places] = np.nonzero((achieved[step : last and last + 1] == goal).all(1))
        assert len(places), "the goal is one of the rest of the episode"
        distances.append(places[0])
        reached = np.linalg.norm(then["achieved_goal"][i] - goal) < 0.1
        assert batch["reward"][i] == (0 if reached else -1)
        terminated = original["terminated"][i] or (ends and reached)
        terminations += int(terminated and not original["terminated"][i])
        assert batch["terminated"][i] == terminated
        assert batch["discount"][i] == pytest.approx(0 if terminated else DISCOUNT)
    assert max(distances) > 20
    assert (terminations > 50) == ends


def test_rewards_of_other_goals_are_clipped_and_scaled_like_all_others() -> None:
    original, batch = relabelled(play(False), 1.0, reward_clip=0.5, reward_scale=3)
    assert set(batch["reward"].tolist()) == {0.0, -1.5}
    assert set(original["reward"].tolist()) <= {0.0, -1.0}


@pytest.mark.parametrize(
    ("env_id", "sentence"),
    [
        ("Pendulum-v1", r"has no goals that algo\.hindsight could replace: its observation is a "),
        ("goal_games:WithoutReward", r"has no compute_reward\(achieved_goal, desired_goal, info\)"),
        ("goal_games:OneReward", r"compute_reward returned the shape \[\] for 3 rows of goals"),
        ("goal_games:NoNumber", r"compute_reward returned a reward of nan, and rewards must lie"),
        ("goal_games:Words", r"compute_reward of 3 rows failed with ValueError: could not conver"),
        ("goal_games:OtherGoal", r"achieved_goal of Box\(.*\(2,\).* desired_goal of Box\(.*\(3,\)"),
        ("goal_games:Choices", r"Discrete\(3\), and algo\.hindsight needs two Boxes of numbers"),
    ],
)
def test_an_environment_without_usable_goals_is_refused(env_id: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Goals(EnvConfig(id=env_id))


def test_hindsight_needs_transitions_of_single_steps() -> None:
    with pytest.raises(UserError, match=r"algo\.hindsight 0\.8 .* and algo\.name r2d2 draws seq"):
        resolve("goal_games:PointReach", ["algo.name=r2d2", "algo.hindsight=0.8"])
    with pytest.raises(UserError, match=r"algo\.hindsight 0\.5 .*n_step 3 sums several; set algo"):
        resolve("goal_games:PointReach", ["algo.name=dqn", "algo.hindsight=0.5", "algo.n_step=3"])
    assert make_hindsight(resolve("x:f", ["algo.name=sac"]), rank=0) is None

"""Unrolls of real environments against a naive replay of the same actions, one step at a time."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from fake_inference import ScriptedInference
from penstock.actors.rollout import Rollout
from penstock.algos.recorded import make_recorders
from penstock.algos.samples import slot_spec
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import LearnerGoneError
from penstock.core.params import Array, Stamp
from penstock.envs import BatchedEnv, make
from penstock.profiling.ledger import TimeLedger

ENVS, UNROLL, SEED = 3, 40, 7


def script(actions: Array | None = None) -> ScriptedInference:
    """Plays always the same actions, and counts its calls in the log-probabilities."""
    # Always to the same side: every pole falls, in each environment at its own time.
    actions = np.arange(ENVS, dtype=np.int32) % 2 if actions is None else actions
    logp = np.zeros(len(actions), np.float32)

    def decide(obs: Array) -> Array:
        np.subtract(logp, 1, out=logp)
        return actions

    return ScriptedInference(decide, behaviour_logp=logp)


def unrolls(count: int, *options: str) -> list[dict[str, Any]]:
    small = (f"actors.envs={ENVS}", f"actors.unroll={UNROLL}")
    config = resolve("cartpole", [*small, *options])
    game = make(config.env, ENVS)
    spec = slot_spec(config, game.info)
    inference = script()
    rollout = Rollout(game, inference, SEED, TimeLedger(), make_recorders(config, game))
    filled = []
    for version in range(count):
        columns = spec.views(spec.zeros())
        inference.stamp = Stamp(0, version)
        steps = rollout.fill(columns, version)
        assert steps == np.count_nonzero(columns["alive"])
        filled.append(columns)
    game.close()
    return filled


def test_columns_equal_the_steps_of_a_vector_environment() -> None:
    vector = gymnasium.make_vec("CartPole-v1", ENVS, vectorization_mode="vector_entry_point")
    obs, _ = vector.reset(seed=SEED)
    over = np.zeros(ENVS, bool)
    returns, lengths = np.zeros(ENVS), np.zeros(ENVS, int)
    ends = 0
    for version, columns in enumerate(unrolls(3)):
        assert (columns["policy_version"] == version).all()
        for t in range(UNROLL):
            np.testing.assert_array_equal(columns["obs"][t], obs)
            np.testing.assert_array_equal(columns["alive"][t], ~over)
            actions = np.arange(ENVS) % 2
            np.testing.assert_array_equal(columns["action"][t], actions)
            assert (columns["behaviour_logp"][t] == -(version * UNROLL + t + 1)).all()
            obs, reward, terminated, truncated, _ = vector.step(actions)
            np.testing.assert_array_equal(columns["reward"][t], reward)
            np.testing.assert_array_equal(columns["terminated"][t], terminated)
            np.testing.assert_array_equal(columns["truncated"][t], truncated & ~terminated)
            returns = np.where(over, 0, returns) + reward
            lengths = np.where(over, 0, lengths + 1)
            over = terminated | truncated
            np.testing.assert_array_equal(columns["episode_return"][t][over], returns[over])
            np.testing.assert_array_equal(columns["episode_length"][t][over], lengths[over])
            ends += int(over.sum())
        np.testing.assert_array_equal(columns["obs"][UNROLL], obs)
    assert ends > 10
    vector.close()


def test_each_row_has_the_version_that_chose_its_action() -> None:
    """Also where it changes within an unroll, and where a replaced server has older weights."""
    config = resolve("cartpole", [f"actors.envs={ENVS}", "actors.unroll=6"])
    env, inference = make(config.env, ENVS), script()
    spec = slot_spec(config, env.info)
    rollout = Rollout(env, inference, SEED, TimeLedger())
    stamps = iter([Stamp(1, version) for version in (4, 4, 7, 7, 6, 8, 8, 8, 8, 8, 8, 9)])
    decide = inference.decide

    def newer(observations: Array) -> tuple[Array, tuple[Array, ...]]:
        inference.stamp = next(stamps)
        return decide(observations)

    inference.decide = newer  # type: ignore[method-assign]
    columns = spec.views(spec.zeros())
    for versions, oldest in (([4, 4, 7, 7, 6, 8], 4), ([8, 8, 8, 8, 8, 9], 8)):
        rollout.fill(columns, 0)
        assert columns["policy_version"].tolist() == [[version] * ENVS for version in versions]
        assert rollout.oldest == Stamp(1, oldest)
    env.close()


def test_discounted_returns_are_summed_up_within_each_episode() -> None:
    options = ("algo.normalize_rewards=true", "algo.reward_scale=1", "algo.discount=0.9")
    found = unrolls(2, *options)
    sums = np.zeros(ENVS)
    for columns in found:
        for t in range(UNROLL):
            sums = 0.9 * sums + columns["reward"][t]
            np.testing.assert_allclose(columns["discounted_return"][t], sums, rtol=1e-5)
            sums[columns["terminated"][t] | columns["truncated"][t]] = 0
    assert "discounted_return" not in unrolls(1)[0]


def test_rollout_state_of_version_0_1_is_restored() -> None:
    """In it discounted returns stand beside the rest."""
    config = resolve(
        "cartpole", [f"actors.envs={ENVS}", "algo.normalize_rewards=true", "algo.reward_scale=1"]
    )
    env = make(config.env, ENVS)
    rollouts = [
        Rollout(env, script(), SEED, TimeLedger(), make_recorders(config, env)) for _ in range(2)
    ]
    spec = slot_spec(config, env.info)
    rollouts[0].fill(spec.views(spec.zeros()), 0)
    state = rollouts[0].state_dict()
    returns = state["recorders"]["discounted"]
    assert returns.any()
    old = {name: value for name, value in state.items() if name != "recorders"}
    rollouts[1].load_state_dict(old | {"discounted": returns})
    np.testing.assert_equal(rollouts[1].state_dict(), state)
    env.close()


@pytest.mark.parametrize("discount", [None, 1.0])
def test_small_rewards_count_in_a_large_return(discount: float | None) -> None:
    """Beyond 2**24 = 16,777,216 float32 does not count half a point."""

    class Long(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(-1, 1, (4,))
        action_space = spaces.Discrete(2)
        rewards = iter([1e6] * 20 + [0.5] * 20)

        def reset(self, **_: Any) -> Any:
            return np.zeros(4, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.zeros(4, np.float32), next(self.rewards), False, False, {}

    options = ["actors.envs=1", f"actors.unroll={UNROLL}", "algo.reward_scale=1"]
    if discount is not None:
        options += ["algo.normalize_rewards=true", f"algo.discount={discount}"]
    config = resolve("cartpole", options)
    vector = SyncVectorEnv([Long], autoreset_mode=AutoresetMode.NEXT_STEP)
    game = BatchedEnv("long", vector, 1, "how")
    spec, inference = slot_spec(config, game.info), script(np.zeros(1, np.int32))
    rollout = Rollout(game, inference, SEED, TimeLedger(), make_recorders(config, game))
    rollout.fill(columns := spec.views(spec.zeros()), 0)
    assert columns["episode_return"][-1].item() == 20_000_010
    if discount is not None:
        assert columns["discounted_return"][-1].item() == 20_000_010


def test_shortened_first_episode_does_not_count_as_a_return() -> None:
    config = resolve("pendulum_sac", ["actors.envs=1", "actors.unroll=350"])
    game = make(config.env, 1, first=0, stagger=True)
    spec = slot_spec(config, game.info)
    columns = spec.views(spec.zeros())
    inference = ScriptedInference(lambda obs: np.zeros((1, 1), np.float32))
    rollout = Rollout(game, inference, SEED, TimeLedger())
    assert rollout.fill(columns, 0) == 348  # all but two resets
    game.close()
    ends = np.flatnonzero(columns["truncated"])
    assert ends.tolist() == [123, 324]  # 124 = 200 x 0.618, rounded up; then one reset and 200
    assert columns["episode_length"][ends, 0].tolist() == [0, 200]
    returns = columns["episode_return"][:, 0]
    assert returns[324] == pytest.approx(columns["reward"][125:325].sum(), rel=1e-5)


def test_nan_observation_is_refused_in_one_sentence() -> None:
    config = resolve("synthetic", ["actors.envs=2", "env.kwargs.nan_at_step=3"])
    game = make(config.env, 2)
    spec = slot_spec(config, game.info)
    columns = spec.views(spec.zeros())
    rollout = Rollout(game, script(np.zeros(2, np.int32)), SEED, TimeLedger())
    with pytest.raises(UserError, match=r"nan at .* correct what the environment returns"):
        rollout.fill(columns, 0)
    game.close()


class Unsound(CartPoleVectorEnv):
    """CartPole whose last environment is given ``value`` as its reward in step 3."""

    value = 0.0
    calls = 0

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        self.calls += 1
        if self.calls == 3:
            reward = np.array(reward)
            reward[-1] = self.value
        return obs, reward, *rest


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2e6, 1000000.0625])
def test_out_of_range_reward_is_refused_in_one_sentence(value: float) -> None:
    vector = Unsound(ENVS)
    vector.value = value
    game = BatchedEnv("unsound", vector, 1, "")
    spec = slot_spec(resolve("cartpole", [f"actors.envs={ENVS}"]), game.info)
    rollout = Rollout(game, script(), SEED, TimeLedger())
    with pytest.raises(UserError) as told:
        rollout.fill(spec.views(spec.zeros()), 0)
    assert str(told.value) == (
        f"the environment gave a reward of {value:.9g}, and rewards must lie between -1e+06 and "
        "1e+06: correct what the environment returns, or set env.wrappers to a wrapper that scales "
        "its rewards"
    )
    game.close()


class Shuts(gymnasium.Env[Any, Any]):
    """Two choices, and from the third observation on nothing is allowed for the second one."""

    observation_space = spaces.Dict(it=spaces.Discrete(2), action_mask=spaces.MultiBinary(5))
    action_space = spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.mask = np.ones(5, np.int8)
        self.age = 0
        return {"it": 0, "action_mask": self.mask}, {}

    def step(self, action: Any) -> Any:
        self.age += 1
        self.mask[2:] = self.age < 2
        return {"it": 0, "action_mask": self.mask}, 0.0, False, False, {}


def test_mask_without_an_allowed_action_for_a_choice_is_refused_in_one_sentence() -> None:
    config = resolve("cartpole_ppo", ["actors.envs=2", "learner.updates_per_batch=1"])
    game = BatchedEnv("it", SyncVectorEnv([Shuts] * 2), 1, "how")
    spec = slot_spec(config, game.info)
    rollout = Rollout(game, script(np.zeros((2, 2), np.int32)), SEED, TimeLedger())
    with pytest.raises(UserError, match=r"no action allowed for choice 1 of 2.*0's.* in row 2"):
        rollout.fill(spec.views(spec.zeros()), 0)
    game.close()


def test_rollout_sends_beats_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a second: an unroll that takes longer than grants last must keep them."""
    config = resolve("cartpole", [f"actors.envs={ENVS}", f"actors.unroll={UNROLL}"])
    game = make(config.env, ENVS)
    spec = slot_spec(config, game.info)
    beats: list[int] = []
    ledger = TimeLedger()
    rollout = Rollout(game, script(), SEED, ledger)

    def beat() -> None:
        beats.append(ledger.since)

    rollout.fill(spec.views(spec.zeros()), 0, beat)
    assert len(beats) == 1
    monkeypatch.setattr("penstock.actors.rollout.BEAT_NS", 0)
    rollout._next_beat_ns = 0
    rollout.fill(spec.views(spec.zeros()), 1, beat)
    assert len(beats) == 1 + UNROLL
    game.close()


@pytest.mark.parametrize("row", range(0, UNROLL, 3))
def test_abandoned_unroll_is_continued_by_the_next(
    row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its learner was lost at ``row``; the same environments play on for another one."""
    (whole,) = unrolls(1)
    config = resolve("cartpole", [f"actors.envs={ENVS}", f"actors.unroll={UNROLL}"])
    game = make(config.env, ENVS)
    spec = slot_spec(config, game.info)
    monkeypatch.setattr("penstock.actors.rollout.BEAT_NS", 0)
    calls: list[int] = []

    def beat() -> None:
        calls.append(1)
        if len(calls) == row + 1:
            raise LearnerGoneError("the learner ended")

    rollout = Rollout(game, script(), SEED, TimeLedger())
    with pytest.raises(LearnerGoneError):
        rollout.fill(spec.views(spec.zeros()), 0, beat)
    columns = spec.views(spec.zeros())
    rollout.fill(columns, 1, beat)
    for name in ("obs", "reward", "terminated", "truncated", "alive", "episode_return"):
        np.testing.assert_array_equal(columns[name][: UNROLL - row], whole[name][row:UNROLL], name)
    game.close()

"""`env.on_error=drop_episode`: a step that fails costs the episode of its environment alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from broken_envs import Sound
from fake_inference import ScriptedInference
from penstock.actors.rollout import Rollout
from penstock.algos.samples import slot_spec
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.envs import make
from penstock.profiling.ledger import TimeLedger


class Sometimes(Sound):
    """Fails in the third step of each second episode, in another way each time."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episodes += 1
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        if self.age == 3 and self.episodes == 2:
            observation[0] = np.nan
        if self.age == 3 and self.episodes == 4:
            reward = np.inf
        if self.age == 3 and self.episodes == 6:
            raise StopIteration
        return observation, reward, *rest


class Always(Sound):
    def step(self, action: Any) -> Any:
        raise KeyError("no such board")


def only_vector(num_envs: int) -> SyncVectorEnv:
    return SyncVectorEnv([Sound] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def unroll(name: str, steps: int, threads: int = 1) -> tuple[dict[str, Any], Rollout]:
    sizes = "actors.envs=2", f"actors.unroll={steps}", f"actors.env_threads={threads}"
    config = resolve(f"{__name__}:{name}", ["env.on_error=drop_episode", *sizes])
    game = make(config.env, 2, config.actors.env_threads)
    spec = slot_spec(config, game.info)
    columns = spec.views(spec.zeros())
    inference = ScriptedInference(
        lambda obs: np.ones(2, np.int32), behaviour_logp=np.zeros(2, np.float32)
    )
    rollout = Rollout(game, inference, 0, TimeLedger())
    assert rollout.fill(columns, 0) == np.count_nonzero(columns["alive"])
    game.close()
    return columns, rollout


@pytest.mark.parametrize("threads", [1, 2])
def test_failed_step_becomes_a_reset_that_is_counted_as_dropped(threads: int) -> None:
    columns, rollout = unroll("Sometimes", 27, threads)
    # Five steps and a reset; two steps and one that fails; and again.
    resets = [5, 8, 14, 17, 23, 26]
    for env in range(2):
        assert np.flatnonzero(~columns["alive"][:, env]).tolist() == resets
        assert np.flatnonzero(columns["terminated"][:, env]).tolist() == [4, 13, 22]
        assert columns["episode_return"][[4, 13, 22], env].tolist() == [5, 5, 5]
        assert columns["episode_length"][[4, 13, 22], env].tolist() == [5, 5, 5]
        assert not columns["reward"][resets, env].any()
    assert np.isfinite(columns["obs"]).all()
    assert not columns["truncated"].any()
    assert rollout.dropped_steps == 2 * 3


def test_error_in_every_step_ends_the_run_after_many_episodes() -> None:
    sentence = r"100 episodes in a row failed, the last with KeyError: 'no such board' \(test_fail"
    with pytest.raises(UserError, match=sentence) as caught:
        unroll("Always", 110)
    assert "raise KeyError" in caught.value.traceback
    assert "vector_env.py" not in caught.value.traceback


def test_own_vector_form_is_turned_off_or_refused() -> None:
    game = make(EnvConfig(id="CartPole-v1", on_error="drop_episode"), 2)
    assert "env.on_error=drop_episode turns its own vector form off" in game.info.how
    game.close()
    with pytest.raises(UserError, match=r"env\.on_error=drop_episode resets single ones"):
        make(EnvConfig(id=f"{__name__}:only_vector", on_error="drop_episode"), 2)

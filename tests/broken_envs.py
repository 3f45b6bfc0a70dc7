"""Environments that have one thing wrong each, beside the sound one that they are made of."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.observations import MASK


class Sound(gymnasium.Env[Any, Any]):
    """Walks by chance for five steps; each of the broken ones changes one thing."""

    observation_space: Any = spaces.Box(-9, 9, (2,), np.float32)
    action_space: Any = spaces.Discrete(3)

    last = 5  # step of an episode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.age = 0
        return self.show(), {}

    def step(self, action: Any) -> Any:
        self.age += 1
        return self.show(), float(action), self.age == self.last, False, {}

    def show(self) -> Any:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)


class Masked(Sound):
    """A sound environment that refuses forbidden actions; its final mask forbids all."""

    observation_space = spaces.Dict(
        place=Sound.observation_space, action_mask=spaces.MultiBinary(5)
    )
    action_space = spaces.MultiDiscrete([2, 3])

    def step(self, action: Any) -> Any:
        if not self.mask[[action[0], 2 + action[1]]].all():
            raise ValueError("forbidden")
        observation, _, *rest = super().step(0)
        return observation, 0.5, *rest

    def allowed(self) -> Any:
        return np.array([1, self.age % 2, 0, 1, self.np_random.random() < 0.5])

    def show(self) -> Any:
        self.mask = np.array(self.allowed(), np.int8) * (self.age < self.last)
        return {"place": super().show(), MASK: self.mask}


class NoSpace(Sound):
    observation_space = (2,)


class Samples(Sound):
    class _Box(spaces.Box):
        def sample(self, *args: Any, **kwargs: Any) -> npt.NDArray[Any]:
            return np.full(2, 10, np.float32)

    observation_space = _Box(-9, 9, (2,), np.float32)


class Text(Sound):
    observation_space = spaces.Text(3)


class Unbounded(Sound):
    action_space = spaces.Box(-np.inf, np.inf, (1,))


class OldReset(Sound):
    """Returns no info from `reset`, as old environments do."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=seed)[0]


class NoSeed(Sound):
    """Has a `reset` that takes no seed."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class OldStep(Sound):
    """Returns four values from `step`, as old environments do."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class NoReward(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, None, *rest


class NanReward(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, np.nan, *rest


class LargeReward(Sound):
    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, -2e6, *rest


class IntFlags(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, int(terminated), 0, info


class NoInfo(Sound):
    def step(self, action: Any) -> Any:
        return (*super().step(action)[:4], None)


class Nan(Sound):
    """Shows NaN in its observations."""

    def show(self) -> Any:
        return np.array([0, np.nan if self.age == 3 else 0], np.float32)


class Doubles(Sound):
    """Shows float64 where its space says float32."""

    def show(self) -> Any:
        return super().show().astype(np.float64)


class Lists(Sound):
    """Shows lists instead of arrays."""

    def show(self) -> Any:
        return [0.0, 0.0]


class Ragged(Sound):
    def show(self) -> Any:
        return [[0.0], [0.0, 1.0]]


class Flags(Sound):
    def step(self, action: Any) -> Any:
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, np.array([False, self.age == 5]), truncated, info


class Maskless(Masked):
    def show(self) -> Any:
        return {**super().show(), MASK: None}


class Beyond(Sound):
    """Shows numbers outside its bounds."""

    def show(self) -> Any:
        return np.array([0, 9 + self.age], np.float32)


class Longer(Sound):
    def show(self) -> Any:
        return np.zeros(2 + (self.age > 3), np.float32)


class Partless(Sound):
    observation_space = spaces.Dict(near=spaces.Discrete(2), far=spaces.Discrete(2))

    def show(self) -> Any:
        return {"near": 1}


class GlobalChance(Sound):
    """Draws its observations without its seed."""

    def show(self) -> Any:
        return np.random.default_rng().uniform(-1, 1, 2).astype(np.float32)


class Keeps(Sound):
    """Seeds its generator in the first reset only."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def show(self) -> Any:
        return self.rng.uniform(-1, 1, 2).astype(np.float32)


class SharesPlace(Sound):
    """Keeps its place in a class attribute, which each reset sets anew."""

    place = np.zeros(2, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place[:] = 0
        return super().reset(seed=seed)

    def show(self) -> Any:
        self.place += super().show()
        return self.place.copy()


class SharesQuestion(Sound):
    """Keeps its question in a class attribute, which each step draws anew."""

    question = [0]  # noqa: RUF012

    def step(self, action: Any) -> Any:
        reward = float(action == self.question[0])
        observation, _, *rest = super().step(action)
        return observation, reward, *rest

    def show(self) -> Any:
        self.question[0] = int(self.np_random.integers(3))
        return np.full(2, self.question[0], np.float32)


class SharesTrail(Sound):
    """Keeps its trail in a class attribute, which grows over all episodes."""

    trail: list[int] = []  # noqa: RUF012

    def show(self) -> Any:
        self.trail.append(self.age)
        return np.full(2, len(self.trail) / 1e3, np.float32)


class SharesChance(Sound):
    """Draws from numpy's global generator, which each reset seeds."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            np.random.seed(seed)
        return super().reset(seed=seed)

    def show(self) -> Any:
        return np.random.uniform(-1, 1, 2).astype(np.float32)


class SharesMemory(Sound):
    """Shows observations that lie in memory of the class."""

    shown = np.zeros(2, np.float32)

    def show(self) -> Any:
        self.shown[:] = super().show()
        return self.shown


class Open(Sound):
    """Takes its bounds for values that are never reached."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> Any:
        if (np.abs(action) >= 1).any():
            raise ValueError("out of range")
        return super().step(0)


class Refuses(Sound):
    """Raises KeyError for action 2."""

    def step(self, action: Any) -> Any:
        if action == 2:
            raise KeyError("no such button")
        return super().step(action)


class Closed(Sound):
    observation_space = spaces.Dict(
        place=Sound.observation_space, action_mask=spaces.MultiBinary(3)
    )

    def show(self) -> Any:
        return {"place": super().show(), MASK: np.full(3, self.age < 2, np.int8)}


class Narrow(Sound):
    observation_space = spaces.Dict(
        place=Sound.observation_space, action_mask=spaces.MultiBinary(2)
    )

    def show(self) -> Any:
        return {"place": super().show(), MASK: np.ones(2, np.int8)}


class ResetsItself(Sound):
    """Resets itself at the end of an episode."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated:
            info = {"terminal_observation": observation}
            observation, _ = self.reset()
        return observation, reward, terminated, truncated, info


class Holds(Sound):
    """Raises OSError in `close`."""

    def close(self) -> None:
        raise OSError("the window is busy")


class ShowsTheNextBegin(Sound):
    """Shows the first observation of the next episode in the last step."""

    def show(self) -> Any:
        return np.full(2, self.age % 5, np.float32)

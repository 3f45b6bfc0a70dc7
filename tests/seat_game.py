"""A vector environment of games with two seats each, whose episodes end apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

LENGTHS = (3, 5)  # steps of an episode, by seat


class Pair(VectorEnv):
    """Row 2 g + s is seat s of game g. The first seat is out until the second one has ended.

    It records its seat in each step, and at an episode's end the outcome.
    """

    def __init__(self, num_games: int, lies: str = "") -> None:
        num_envs = 2 * num_games
        self.metadata = {
            "autoreset_mode": AutoresetMode.NEXT_STEP,
            "seats": 2,
            "sides": (0, 0),
            "recorded": {"whose": "|u1", "outcome": "<f4"},
        }
        self.num_envs = num_envs
        self.single_observation_space = spaces.Dict(
            age=spaces.Box(0, np.inf, (1,), np.float32), seat=spaces.Discrete(2)
        )
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._seat = np.arange(num_envs) % 2
        self._length = np.array(LENGTHS)[self._seat]
        self._lies = lies
        self._age = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._age = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self._age = (self._age + 1) % (max(LENGTHS) + 1)  # 0: a step that only resets
        ended = np.equal(self._age, self._length)
        playing = np.less(self._age, self._length)
        reward = np.where(self._age > 0, self._age <= self._length, False).astype(np.float32)
        info = {"playing": playing, "whose": self._seat, "outcome": np.where(ended, 0.5, 0.0)}
        if self._lies == "playing":
            info["playing"] = playing | ended
        elif self._lies:
            del info[self._lies]
        return self._observe(), reward, ended, np.zeros_like(ended), info

    def _observe(self) -> Any:
        age = np.full((self.num_envs, 1), self._age, np.float32)
        return {"age": age, "seat": self._seat.copy()}


class Script(VectorEnv):
    """Plays a script again and again, in which no action matters.

    Args:
        num_games: number of games.
        script: a step each, of which the last only resets: a dict of arrays ``[seats]`` with
            "reward", "ended" and "playing" by default 0, False and the opposite of "ended";
            "playing" or "outcome" reach `info` only if some step has them.
        sides: of the seats; by default each is one of its own.
    """

    def __init__(
        self, num_games: int, script: list[dict[str, Any]], sides: Any = None, seats: int = 2
    ) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "seats": seats}
        if sides is not None:
            self.metadata["sides"] = sides
        self.num_envs = num_games * seats
        self.single_observation_space = spaces.Box(0, 1, (2,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._script = script
        self._games = num_games
        self._zeros = [0] * seats
        self._at = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._at = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        step = self._script[self._at]
        self._at = (self._at + 1) % len(self._script)
        ended = self._of_rows(step, "ended", self._zeros).astype(np.bool_)
        reward = self._of_rows(step, "reward", self._zeros).astype(np.float32)
        info = {
            key: self._of_rows(step, key, np.zeros(len(self._zeros), dtype))
            for key, dtype in (("playing", np.bool_), ("outcome", np.float32))
            if any(key in each for each in self._script)
        }
        return self._observe(), reward, ended, np.zeros_like(ended), info

    def _of_rows(self, step: dict[str, Any], key: str, default: Any) -> Any:
        return np.tile(np.asarray(step.get(key, default)), self._games)

    def _observe(self) -> Any:
        return np.full((self.num_envs, 2), self._at / 10, np.float32)


PAYOFFS = np.array([[1.0, -2.0], [-0.5, 3.0]])  # of the first seat, by its move and the second's


class TwoPly(VectorEnv):
    """The first seat moves, then the second, who has seen it; the second pays `PAYOFFS`."""

    metadata = {  # noqa: RUF012
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "seats": 2,
    }

    def __init__(self, num_games: int) -> None:
        self.num_envs = 2 * num_games
        self.single_observation_space = spaces.Dict(
            action_mask=spaces.Box(0, 1, (2,), np.int8),
            observation=spaces.Box(-1, 1, (4,), np.float32),
        )
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._seat = np.arange(self.num_envs) % 2
        self._move = np.zeros(num_games, np.int64)
        self._ply = 0  # 0 and 1 before the moves, 2 at the end

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._ply = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        moves = np.asarray(actions).reshape(-1, 2)
        rewards = np.zeros((len(moves), 2), np.float32)
        if self._ply == 0:
            self._move = moves[:, 0].copy()
        elif self._ply == 1:
            payoffs = PAYOFFS[self._move, moves[:, 1]]
            rewards[:] = np.stack([payoffs, -payoffs], 1)
        self._ply = (self._ply + 1) % 3
        ended = np.full(self.num_envs, self._ply == 2)
        return self._observe(), rewards.ravel(), ended, np.zeros_like(ended), {}

    def _observe(self) -> Any:
        acts = self._seat == self._ply
        move = self._move.repeat(2) * 2.0 - 1 if self._ply else np.zeros(self.num_envs)
        columns = (np.full(self.num_envs, self._ply / 2), self._seat, acts, move)
        return {
            "action_mask": np.stack([np.ones_like(acts), acts], 1).astype(np.int8),
            "observation": np.stack(columns, 1).astype(np.float32),
        }


class BotGame(Script):
    """Has a scripted player, which always chooses the same."""

    def __init__(self, num_games: int, action_space: Any, chosen: Any) -> None:
        super().__init__(num_games, [{}])
        self.metadata["bots"] = ("scripted",)
        self.single_action_space = action_space
        self.action_space = batch_space(action_space, self.num_envs)
        self._chosen = chosen

    def bot(self, name: str, rows: Any) -> Any:
        return np.array(self._chosen)


class Rolling(VectorEnv):
    """Two rivals see the last two numbers of their own; each game has a length of its own."""

    metadata = {  # noqa: RUF012
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "seats": 2,
    }

    def __init__(self, num_games: int) -> None:
        self.num_envs = 2 * num_games
        self.single_observation_space = spaces.Box(0, np.inf, (2, 3), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._length = 3 + np.arange(self.num_envs) // 2
        self._age = np.zeros(self.num_envs, np.int64)
        self._stacks = np.zeros((self.num_envs, 2, 3), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._age[:] = 0
        return self._observe(np.ones(self.num_envs, np.bool_)), {}

    def step(self, actions: Any) -> Any:
        first = self._age == self._length
        self._age = np.where(first, 0, self._age + 1)
        ended = self._age == self._length
        reward = np.zeros(self.num_envs, np.float32)
        return self._observe(first), reward, ended, np.zeros_like(ended), {}

    def _observe(self, first: Any) -> Any:
        frames = self.np_random.random((self.num_envs, 3), np.float32) + 1
        self._stacks[:, 0] = np.where(first[:, None], frames, self._stacks[:, 1])
        self._stacks[:, 1] = frames
        return self._stacks.copy()

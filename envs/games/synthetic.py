"""`penstock/Synthetic-v0`: a known optimum, any size and speed, and faults on request.
`penstock/SyntheticGames-v0`: the same for games of several seats.

An observation shows the rewarded action: the part of it that belongs to that action is bright, the
rest is 0. That action earns 1, any other 0, so an episode returns `episode_steps` at best and
`episode_steps / n_actions` on average for uniformly random play. Snappy compresses the bright parts
about as much as Atari frames.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector.utils import batch_space

from penstock.envs.games.vector_game import Flags, StepResults, VectorGame
from penstock.envs.single import SingleEnv


class SyntheticVectorEnv(VectorGame):
    """`num_envs` synthetic environments, whose episodes begin and end together."""

    def __init__(
        self,
        num_envs: int = 1,
        *,
        obs_shape: Sequence[int] = (4,),
        obs_dtype: str = "float32",
        n_actions: int = 2,
        episode_steps: int = 100,
        truncate: bool = False,
        construct_time_s: float = 0.0,
        step_time_s: float = 0.0,
        busy: bool = False,
        crash_at_step: int | None = None,
        hang_at_step: int | None = None,
        exit_at_step: int | None = None,
        nan_at_step: int | None = None,
    ) -> None:
        """Make the environments.

        Args:
            num_envs: number of environments.
            obs_shape: of one observation.
            obs_dtype: of an observation, float32 (0 to 1) or uint8 (0 to 255).
            n_actions: number of actions, at most the values of an observation.
            episode_steps: length of every episode.
            truncate: whether episodes are truncated; else they terminate.
            construct_time_s: time that this takes.
            step_time_s: time that one step of one environment takes.
            busy: whether that time is spent computing; else asleep.
            crash_at_step: the call of `step`, counted from 1 since construction, that raises.
            hang_at_step: the call of `step` that never returns.
            exit_at_step: the call of `step` that kills this process.
            nan_at_step: the call of `step` that shows a NaN (float32 only).

        Raises:
            ValueError: for values that do not fit together.
        """
        if obs_dtype not in ("float32", "uint8"):
            raise ValueError(f"obs_dtype is {obs_dtype}; it must be float32 or uint8")
        if nan_at_step is not None and obs_dtype != "float32":
            raise ValueError("nan_at_step needs obs_dtype float32, as whole numbers have no NaN")
        if not 1 <= n_actions <= math.prod(obs_shape):
            raise ValueError(
                f"n_actions {n_actions} must be from 1 to the {math.prod(obs_shape)} values of an "
                "observation, which shows each action in a part of its own"
            )
        time.sleep(construct_time_s)

        shape = tuple(obs_shape)
        dtype = np.dtype(obs_dtype)
        high = 1 if obs_dtype == "float32" else 255
        super().__init__(num_envs, Box(0, high, shape, dtype.type), Discrete(n_actions))

        # The observation that shows each action.
        self._patterns = _patterns(n_actions=n_actions, shape=shape, dtype=dtype, high=high)
        self._episode_steps = episode_steps
        self._truncate = truncate
        # Time of a step of all environments.
        self._step_time_s = step_time_s * num_envs
        self._busy = busy

        # What happens at which call of `step`.
        self._faults = {crash_at_step: _crash, hang_at_step: _hang, exit_at_step: _exit}
        self._faults.pop(None, None)
        self._nan_at_step = nan_at_step

        # Calls of `step`, steps of the episode, and the rewarded action of each environment.
        self._calls = 0
        self._age = 0
        self._targets = np.zeros(num_envs, np.int64)

    def step(self, actions: npt.NDArray[np.integer]) -> StepResults:
        """Step all environments, or do the fault that is due."""
        self._calls += 1
        if fault := self._faults.get(self._calls):
            fault()
        self._pass_time()

        # A step after an episode's end only resets, and pays nothing.
        resets = self._age == self._episode_steps
        reward = (actions == self._targets).astype(np.float32)
        if resets:
            reward[:] = 0
            self._age = 0
        else:
            self._age += 1

        ends = np.full(self.num_envs, self._age == self._episode_steps)
        no_ends = np.zeros(self.num_envs, np.bool_)
        terminated, truncated = (no_ends, ends) if self._truncate else (ends, no_ends)
        return self._observe(), reward, terminated, truncated, {}

    def _begin(self, begins: Flags) -> None:
        self._age = 0

    def _observe(self) -> npt.NDArray[Any]:
        """Draw the rewarded actions, and return observations that show them."""
        self._targets = self.np_random.integers(len(self._patterns), size=self.num_envs)
        observations = self._patterns[self._targets]
        if self._calls == self._nan_at_step:
            observations.flat[0] = np.nan
        return observations

    def _pass_time(self) -> None:
        """Let the time of a step pass, computing or asleep."""
        if self._busy:
            end_s = time.perf_counter() + self._step_time_s
            while time.perf_counter() < end_s:
                pass
        elif self._step_time_s:
            time.sleep(self._step_time_s)


class SyntheticGames(SyntheticVectorEnv):
    """`num_games` synthetic games; each seat is paid for its own rewarded action."""

    def __init__(
        self,
        num_games: int = 1,
        *,
        seats: int = 2,
        turns: bool = False,
        rivals: bool = False,
        ends_apart: bool = False,
        **options: Any,
    ) -> None:
        """Make the games.

        Args:
            num_games: number of games.
            seats: of each game.
            turns: whether the seats act in turn, each in every ``seats``-th step. Observations then
                have an action mask, which allows the seats that wait the first choice alone.
            rivals: whether each seat is a side of its own, and pays the others its reward: the game
                is zero-sum.
            ends_apart: whether each seat's episode is a step longer than that of the seat after it.
            **options: of `SyntheticVectorEnv`, for each seat.

        Raises:
            ValueError: for values that do not fit together.
        """
        if seats < 1:
            raise ValueError(f"seats {seats} must be 1 or more")
        super().__init__(num_games * seats, **options)
        if ends_apart and seats > self._episode_steps:
            raise ValueError(
                f"seats {seats} must be at most episode_steps, {self._episode_steps}, where each "
                "ends at another step"
            )
        if rivals and (ends_apart or seats == 1):
            raise ValueError(
                "rivals need several seats that end together: seats=2 or more, ends_apart=false"
            )

        sides = tuple(range(seats)) if rivals else (0,) * seats
        self.metadata = {**self.metadata, "seats": seats, "sides": sides}
        self._seats = seats
        self._turns = turns
        self._rivals = rivals
        self._ends_apart = ends_apart
        self._seat = np.arange(self.num_envs) % seats
        self._lengths = np.full(self.num_envs, self._episode_steps)
        if ends_apart:
            self._lengths -= self._seat

        if turns:
            choices = Box(0, 1, (len(self._patterns),), np.int8)
            self.single_observation_space = Dict(
                action_mask=choices, observation=self.single_observation_space
            )
            self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def step(self, actions: npt.NDArray[np.integer]) -> Any:
        """Step all games; results as of `SyntheticVectorEnv.step`."""
        acted = self._acting() if self._turns or self._ends_apart else None
        observations, rewards, terminated, truncated, info = super().step(actions)
        if acted is not None:
            rewards *= acted
        if self._rivals:
            of_games = rewards.reshape(-1, self._seats)
            of_others = (of_games.sum(1, keepdims=True) - of_games) / (self._seats - 1)
            rewards = (of_games - of_others).reshape(-1)

        if self._ends_apart:
            ends = np.equal(self._age, self._lengths)
            no_ends = np.zeros_like(ends)
            terminated, truncated = (no_ends, ends) if self._truncate else (ends, no_ends)
            info["playing"] = self._age < self._lengths
        return observations, rewards, terminated, truncated, info

    def _acting(self) -> npt.NDArray[np.bool_]:
        """Returns the rows whose next action counts."""
        acting: npt.NDArray[np.bool_] = self._age < self._lengths
        if self._turns:
            acting &= self._seat == self._age % self._seats
        return acting

    def _observe(self) -> Any:
        """Returns the observations, with a mask if the seats act in turn."""
        observations = super()._observe()
        if not self._turns:
            return observations

        masks = np.ones((self.num_envs, len(self._patterns)), np.int8)
        masks[~self._acting(), 1:] = 0
        return {"action_mask": masks, "observation": observations}


def make_single(**options: Any) -> SingleEnv:
    """Make one synthetic environment; options as of `SyntheticVectorEnv`."""
    return SingleEnv(SyntheticVectorEnv(1, **options))


def _patterns(
    *, n_actions: int, shape: tuple[int, ...], dtype: np.dtype[Any], high: int
) -> npt.NDArray[Any]:
    """Returns the observation that shows each action, ``[n_actions, *shape]`` of ``dtype``.

    The values of an observation are divided among the actions, in order. Those of its action are
    ``high``, the others 0.
    """
    size = math.prod(shape)
    action_of_value = np.arange(size) * n_actions // size
    patterns = np.zeros((n_actions, size), dtype)
    patterns[action_of_value, np.arange(size)] = high
    return patterns.reshape(n_actions, *shape)


def _crash() -> None:
    raise RuntimeError("the synthetic environment crashed, as crash_at_step asked")


def _hang() -> None:
    while True:
        time.sleep(3600)


def _exit() -> None:
    os.kill(os.getpid(), signal.SIGKILL)

"""Environments of PettingZoo's two kinds, with scripted agents."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

# What each agent is paid in each ply of `Plies`, whose actors are "abcabab". The third agent dies
# in ply 3, and is paid in vain afterwards.
PLIES = "abcabab"
PAY = {
    "a": [1.0, 0.0, 2.0, -1.0, 0.0, 0.5, 3.0],
    "b": [0.0, 1.0, -2.0, 0.0, 4.0, 0.0, -3.0],
    "c": [5.0, 0.0, 0.0, -1.0, 9.0, 9.0, 9.0],
}
DEATH = 3


class Plies(AECEnv):  # type: ignore[misc]
    """Three agents act in turn; an observation is the number of plies, and whose it is."""

    metadata = {"name": "plies"}  # noqa: RUF012

    def __init__(self, masked: bool = False, box: bool = False, grows: bool = False) -> None:
        """``grows``: whether the third agent appears in the second ply."""
        self.possible_agents = [*PAY]
        self._grows = grows
        self._masked = masked
        self._box = box

    def observation_space(self, agent: str) -> Any:
        space = spaces.Box(0, 99, (2,), np.float32)
        mask = spaces.Box(0, 1, (4,), np.int8)
        return spaces.Dict(observation=space, action_mask=mask) if self._masked else space

    def action_space(self, agent: str) -> Any:
        return spaces.Box(-1, 1, (1,), np.float32) if self._box else spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = self.possible_agents[:]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: Any = {agent: {} for agent in self.agents}
        if self._grows:
            self._leave("c")
        self.ply = 0
        self.taken: list[int] = []
        self.agent_selection = PLIES[0]

    def _leave(self, agent: str) -> None:
        self.agents.remove(agent)
        for values in (self.rewards, self._cumulative_rewards, self.terminations, self.truncations):
            del values[agent]

    def observe(self, agent: str) -> Any:
        numbers = np.array([self.ply, self.possible_agents.index(agent)], np.float32)
        if not self._masked:
            return numbers
        # As in PettingZoo's classic games, agents that wait may do nothing at all.
        mask = np.zeros(4, np.int8)
        if agent == self.agent_selection:
            mask[1 + self.ply % 3] = 1
        return {"observation": numbers, "action_mask": mask}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        if self._masked:
            assert action == 1 + self.ply % 3
        self.taken.append(action)

        self._cumulative_rewards[agent] = 0.0
        for each in self.agents:
            self.rewards[each] = PAY[each][self.ply]
        self._accumulate_rewards()
        if self._grows and self.ply == 1:
            self.agents.append("c")
            self.rewards["c"] = self._cumulative_rewards["c"] = 0.0
            self.terminations["c"] = self.truncations["c"] = False
        if self.ply == DEATH:
            self.terminations["c"] = True
        self.ply += 1
        if self.ply == len(PLIES):
            self.terminations["a"] = True
            self.truncations["b"] = True
        self.agent_selection = PLIES[min(self.ply, len(PLIES) - 1)]
        self._deads_step_first()


class Together(ParallelEnv):  # type: ignore[misc]
    """Agents that come and go: `z` appears after two steps, `y` vanishes in the third, `x` ends in
    the fourth, and `z` is truncated in the fifth. Masks are in the infos."""

    metadata = {"name": "together"}  # noqa: RUF012

    def __init__(self, comes_back: bool = False) -> None:
        self.possible_agents = ["x", "y", "z"]
        self._comes_back = comes_back

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 99, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.age = 0
        self.agents = ["x", "y"]
        return self._observe(self.agents), self._infos()

    def step(self, actions: Any) -> Any:
        assert [*actions] == self.agents
        assert all(action in (0, 2) for action in actions.values())
        self.age += 1
        terminations = dict.fromkeys(self.agents, False)
        truncations = dict.fromkeys(self.agents, False)
        shown = self.agents
        if self.age == 2:
            self.agents = ["x", "y", "z"]
            shown = self.agents
        elif self.age == 3:
            self.agents = ["x", "z"]
            shown = self.agents
        elif self.age == 4:
            terminations["x"] = True
            self.agents = ["x", "z"] if self._comes_back else ["z"]
        elif self.age == 5:
            truncations["z"] = True
            self.agents = []
        # Also of agents that are not there.
        rewards = {agent: 1.0 + self.possible_agents.index(agent) for agent in self.possible_agents}
        return self._observe(shown), rewards, terminations, truncations, self._infos()

    def _observe(self, agents: list[str]) -> Any:
        return {
            agent: np.array([self.age, self.possible_agents.index(agent)], np.float32)
            for agent in agents
        }

    def _infos(self) -> Any:
        return {agent: {"action_mask": np.array([1, 0, 1], np.int8)} for agent in self.agents}


class Unlike(ParallelEnv):  # type: ignore[misc]
    """Two agents with other numbers of observations and choices; a step is an episode."""

    metadata = {"name": "unlike"}  # noqa: RUF012

    def __init__(self, actions: str = "unlike") -> None:
        self.possible_agents = ["low", "high"]
        self.seen: list[Any] = []
        self._actions = actions

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-9, 9, (2,) if agent == "low" else (2, 2), np.float32)

    def action_space(self, agent: str) -> Any:
        if self._actions == "mixed" and agent == "high":
            return spaces.Box(-1, 1, (1,), np.float32)
        return spaces.Discrete(2, start=5) if agent == "low" else spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = self.possible_agents[:]
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.seen.append(actions)
        flags = dict.fromkeys(self.agents, True)
        none = dict.fromkeys(self.agents, False)
        self.agents = []
        return self._observe(), {"low": 1.0, "high": -1.0}, flags, none, {}

    def _observe(self) -> Any:
        return {
            "low": np.array([1, 2], np.float32),
            "high": np.array([[3, 4], [5, 6]], np.float32),
        }

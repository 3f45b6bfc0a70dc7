"""Environments of PettingZoo: `pettingzoo/connect_four_v3`, a row for each agent. Extra
[pettingzoo].

The name is that of a module of PettingZoo or MPE2, or `module:function` of a function of yours
that returns a `ParallelEnv` or an `AECEnv`. Rows are seats (`penstock.envs.seats`) in the order of
`possible_agents`:

- In a parallel environment all agents that are alive act. One that is absent afterwards is out.
- In an AEC environment a step is a ply: the selected agent acts, and the others wait. The reward of
  a row is what its agent's cumulative reward gained in the ply. Steps of dead agents are taken at
  the end of the ply.
- Agents with different spaces have one padded space: their numbers, zeros, and one-hot the kind of
  agent; of unlike numbers of choices the largest, with a mask.

`env.kwargs` are those of the environment, and `sides`: the side of each agent, counted from 0, such
as `[0, 0, 0]` for agents that play together. Without it each agent is a side of its own.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from pkgutil import iter_modules
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from penstock.configs.errors import UserError
from penstock.core.loading import check_keywords, explaining_errors, load, nearest
from penstock.core.notes import note_logger
from penstock.core.observations import MASK

logger = note_logger(__name__)

PREFIX = "pettingzoo/"
# The packages whose modules are environments, in the order of the search.
FAMILIES = (
    "pettingzoo.classic",
    "pettingzoo.butterfly",
    "pettingzoo.sisl",
    "pettingzoo.atari",
    "mpe2",
)
# The key of an observation beside its action mask, in PettingZoo's environments.
OBSERVATION = "observation"
# The option of `env.kwargs` that is not the environment's.
SIDES = "sides"
SEEDS = 2**31
_NOBODY: frozenset[Any] = frozenset()

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
Space = spaces.Space[Any]


class GameStep(NamedTuple):
    """What a step or reset of one game gave, by the number of the agent."""

    observations: Sequence[Any]
    """The observation of each agent as it came; None where there is none."""
    infos: Sequence[Mapping[str, Any]]
    rewards: Sequence[float]
    terminated: Sequence[bool]
    truncated: Sequence[bool]
    playing: Sequence[bool]
    """Whether each agent is within its episode afterwards."""
    acts: Sequence[bool]
    """Whether each agent's next action counts."""


class AgentGame(Protocol):
    """One game, which `reset` begins again once no agent plays."""

    env: Any

    def reset(self, seed: int) -> GameStep: ...

    def step(self, actions: Sequence[Any]) -> GameStep:
        """Take an action of each agent; those of agents that do not act count for nothing."""


class ParallelGame:
    """A game whose agents act at the same time."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self._agents = list(env.possible_agents)
        self._playing: set[Any] = set()  # the agents within an episode
        self._ended: set[Any] = set()  # those whose episode in the present game has ended
        self._has_noted = False

    def reset(self, seed: int) -> GameStep:
        observations, infos = self.env.reset(seed=seed)
        self._ended = set()
        self._playing = {*self.env.agents}
        return self._results(observations, infos, {}, _NOBODY, _NOBODY)

    def step(self, actions: Sequence[Any]) -> GameStep:
        chosen = dict(zip(self._agents, actions, strict=True))
        acting = {agent: chosen[agent] for agent in self.env.agents}
        observations, rewards, terminations, truncations, infos = self.env.step(acting)

        present = {*self.env.agents}
        terminated = {agent for agent in self._playing if terminations.get(agent)}
        truncated = {agent for agent in self._playing if truncations.get(agent)}
        vanished = self._playing - present - terminated - truncated
        if vanished and not self._has_noted:
            self._has_noted = True
            names = ", ".join(sorted(map(str, vanished)))
            logger.info(
                "%s of %s vanished without an end of their episode, which counts as truncated",
                names,
                self.env,
            )

        # An agent that appears late begins an episode in mid-game. One that comes back does not, as
        # it may have one episode in a game.
        own_rewards = {agent: rewards.get(agent, 0.0) for agent in self._playing}
        self._ended |= terminated | truncated | vanished
        self._playing = present - self._ended
        return self._results(observations, infos, own_rewards, terminated, truncated | vanished)

    def _results(
        self,
        observations: Mapping[Any, Any],
        infos: Mapping[Any, Any],
        rewards: Mapping[Any, float],
        terminated: Set[Any],
        truncated: Set[Any],
    ) -> GameStep:
        agents = self._agents
        playing = [agent in self._playing for agent in agents]
        return GameStep(
            observations=[observations.get(agent) for agent in agents],
            infos=[infos.get(agent) or {} for agent in agents],
            rewards=[rewards.get(agent, 0.0) for agent in agents],
            terminated=[agent in terminated for agent in agents],
            truncated=[agent in truncated for agent in agents],
            playing=playing,
            acts=[agent in self.env.agents for agent in agents],
        )


class PlyGame:
    """A game whose agents act one after another."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self._agents = list(env.possible_agents)
        self._playing: set[Any] = set()  # as in a parallel game
        self._ended: set[Any] = set()

    def reset(self, seed: int) -> GameStep:
        self.env.reset(seed=seed)
        self._ended = set()
        self._playing = {*self.env.agents}
        return self._results({}, {}, _NOBODY, _NOBODY)

    def step(self, actions: Sequence[Any]) -> GameStep:
        env = self.env
        actor = env.agent_selection
        before = dict(env._cumulative_rewards)
        env.step(actions[self._agents.index(actor)])

        # An agent's step begins by clearing what it was told, so that of the actor counts whole.
        gained = {
            agent: after - (0.0 if agent == actor else before.get(agent, 0.0))
            for agent, after in env._cumulative_rewards.items()
            if agent in self._playing
        }
        terminated = {agent for agent in self._playing if env.terminations.get(agent)}
        truncated = {agent for agent in self._playing if env.truncations.get(agent)}
        vanished = self._playing - {*env.agents} - terminated - truncated
        final = {agent: env.observe(agent) for agent in terminated | truncated}

        self._ended |= terminated | truncated | vanished
        while env.agents and self._is_dead(env.agent_selection):
            env.step(None)
        self._playing = {*env.agents} - self._ended
        return self._results(final, gained, terminated, truncated | vanished)

    def _is_dead(self, agent: Any) -> bool:
        return bool(self.env.terminations.get(agent) or self.env.truncations.get(agent))

    def _results(
        self,
        final: Mapping[Any, Any],
        rewards: Mapping[Any, float],
        terminated: Set[Any],
        truncated: Set[Any],
    ) -> GameStep:
        """Returns the results, with the ``final`` observations of agents that have ended."""
        env = self.env
        agents = self._agents
        selected = env.agent_selection if env.agents else None
        observed = {**final, **{agent: env.observe(agent) for agent in self._playing}}
        return GameStep(
            observations=[observed.get(agent) for agent in agents],
            infos=[env.infos.get(agent) or {} for agent in agents],
            rewards=[rewards.get(agent, 0.0) for agent in agents],
            terminated=[agent in terminated for agent in agents],
            truncated=[agent in truncated for agent in agents],
            playing=[agent in self._playing for agent in agents],
            acts=[agent in self._playing and agent == selected for agent in agents],
        )


class ZooVectorEnv(VectorEnv):
    """`num_games` games of PettingZoo, stepped one after another."""

    def __init__(
        self, name: str, options: Mapping[str, Any], num_games: int, threads: int = 1
    ) -> None:
        """Make the games.

        Args:
            name: of a module of PettingZoo or MPE2, or `module:function`.
            options: of the environment (`env.kwargs`), and "sides".
            num_games: number of games.
            threads: of no effect.

        Raises:
            UserError: if there is no such environment, or Penstock cannot play it.
        """
        self._purpose = f"environment {PREFIX}{name}"
        make_env = _maker_of(name, self._purpose)
        env_options = {key: value for key, value in options.items() if key != SIDES}
        check_keywords(make_env, env_options, self._purpose)
        self._games = [_game_of(make_env(**env_options), self._purpose) for _ in range(num_games)]

        # The seats, and what their rows have in common.
        env = self._games[0].env
        agents = list(env.possible_agents)
        self._seats = len(agents)
        is_by_plies = isinstance(self._games[0], PlyGame)
        self._actions = _Actions(self._purpose, [env.action_space(agent) for agent in agents])
        if is_by_plies and self._actions.count is None:
            raise UserError(
                f"{self._purpose} has agents that act one after another, and actions of "
                f"{self._actions.space}: an agent that waits has one legal choice, which only a "
                "Discrete can have; offer the environment as a ParallelEnv"
            )
        self._observations = _Observations(
            self._purpose, [env.observation_space(agent) for agent in agents]
        )
        self._has_mask = (
            is_by_plies
            or self._observations.has_mask
            or self._actions.is_padded
            or self._has_mask_in_infos()
        )
        if self._has_mask and self._actions.count is None:
            raise UserError(
                f"{self._purpose} has an {MASK}, and actions of {self._actions.space}, where a "
                "mask of PettingZoo has no meaning; offer actions of a Discrete"
            )

        self.num_envs = num_games * self._seats
        self.metadata = {
            "autoreset_mode": AutoresetMode.NEXT_STEP,
            "seats": self._seats,
            "sides": tuple(options.get(SIDES, range(self._seats))),
            "render_fps": env.metadata.get("render_fps"),
        }
        self.render_mode = options.get("render_mode")
        self.single_observation_space = self._observations.space
        if self._has_mask:
            self.single_observation_space = self._with_mask(self._observations.space)
        self.single_action_space = self._actions.space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

        # The observation of each row, the rows that play, and the seeds of games to come.
        self._rows: list[Any] = []
        self._playing = np.zeros(self.num_envs, np.bool_)
        self._batch: Any = create_empty_array(self.single_observation_space, self.num_envs)
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        empty = self._observations.empty
        self._rows = [self._row(empty, mask=None) for _ in range(self.num_envs)]
        for number, game in enumerate(self._games):
            self._take(number, game.reset(self._next_seed()))
        return self._batched(), {"playing": self._playing.copy()}

    def step(self, actions: Array) -> Any:
        rewards = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        for number, game in enumerate(self._games):
            rows = self._rows_of(number)
            if not self._playing[rows].any():
                self._take(number, game.reset(self._next_seed()))
                continue

            results = game.step(self._actions.of_agents(actions[rows]))
            rewards[rows] = results.rewards
            terminated[rows] = results.terminated
            truncated[rows] = results.truncated
            self._take(number, results)
        info = {"playing": self._playing.copy()}
        return self._batched(), rewards, terminated, truncated, info

    def render(self) -> tuple[Any, ...]:
        return tuple(game.env.render() for game in self._games)

    def close_extras(self, **kwargs: Any) -> None:
        for game in self._games:
            game.env.close()

    def _rows_of(self, number: int) -> slice:
        return slice(number * self._seats, (number + 1) * self._seats)

    def _next_seed(self) -> int:
        """Returns a seed for a game: some environments are seeded anew by every reset."""
        return int(self._rng.integers(SEEDS))

    def _take(self, number: int, results: GameStep) -> None:
        """Take over the observations of a game, and which of its rows play.

        A row without an observation keeps its last one.
        """
        first = number * self._seats
        self._playing[self._rows_of(number)] = results.playing
        for seat, observation in enumerate(results.observations):
            own_mask = results.infos[seat].get(MASK)
            values = None
            if observation is not None:
                values, mask_in_observation = self._observations.split(seat, observation)
                own_mask = own_mask if mask_in_observation is None else mask_in_observation
            if not self._has_mask:
                if values is not None:
                    self._rows[first + seat] = values
                continue

            mask = self._actions.mask(seat, own_mask, acts=results.acts[seat])
            if values is None:
                self._rows[first + seat][MASK] = mask
            else:
                self._rows[first + seat] = self._row(values, mask)

    def _row(self, values: Any, mask: Array | None) -> Any:
        """Returns the observation of a row, with its mask if rows have one."""
        if not self._has_mask:
            return values
        if mask is None:
            mask = self._actions.mask(0, None, acts=False)
        parts = values if isinstance(values, dict) else {OBSERVATION: values}
        return {**parts, MASK: mask}

    def _with_mask(self, space: Space) -> spaces.Dict:
        """Returns the space of observations with a mask."""
        parts = space.spaces if isinstance(space, spaces.Dict) else {OBSERVATION: space}
        mask = spaces.MultiBinary(self._actions.count or 0)
        return spaces.Dict({**parts, MASK: mask})

    def _batched(self) -> Any:
        return concatenate(self.single_observation_space, self._rows, self._batch)

    def _has_mask_in_infos(self) -> bool:
        """Whether a game gives masks in the infos of its reset."""
        results = self._games[0].reset(0)
        return any(MASK in info for info in results.infos)


class _Actions:
    """The actions of unlike agents as those of one space."""

    space: Space
    count: int | None
    """The number of choices; None if actions are no Discrete."""
    is_padded: bool
    """Whether some agents have fewer choices than others."""

    def __init__(self, purpose: str, of_agents: Sequence[Space]) -> None:
        """Find the space of all agents; UserError if there is none."""
        self._spaces = of_agents
        self.is_padded = False
        if all(isinstance(space, spaces.Discrete) for space in of_agents):
            self._counts = [int(space.n) for space in of_agents]  # type: ignore[attr-defined]
            self._starts = [int(space.start) for space in of_agents]  # type: ignore[attr-defined]
            self.count = max(self._counts)
            self.is_padded = len({*self._counts}) > 1
            self.space = spaces.Discrete(self.count)
            return

        if any(space != of_agents[0] for space in of_agents):
            distinct = ", ".join(dict.fromkeys(map(str, of_agents)))
            raise UserError(
                f"{purpose} has agents with the actions {distinct}, and one policy plays all of "
                "them: their actions must be equal, or a Discrete each; leave agents out, or "
                "change their actions by a wrapper"
            )
        self.count = None
        self.space = of_agents[0]

    def of_agents(self, actions: Array) -> list[Any]:
        """Returns the actions of a game's agents, given those of its rows."""
        if self.count is None:
            return [*actions]
        return [int(action) + start for action, start in zip(actions, self._starts, strict=True)]

    def mask(self, seat: int, own: Any, *, acts: bool) -> Array:
        """Returns the mask ``[count]`` of an agent; the first choice alone if it does not act.

        ``own`` is the mask that the environment gives, or None.
        """
        assert self.count is not None
        mask = np.zeros(self.count, np.int8)
        if acts:
            mask[: self._counts[seat]] = 1 if own is None else np.asarray(own) != 0
        if not mask.any():
            mask[0] = 1
        return mask


class _Observations:
    """The observations of unlike agents, without their masks, as those of one space."""

    space: Space
    empty: Any
    """An observation of zeros."""
    has_mask: bool
    """Whether observations have masks."""

    def __init__(self, purpose: str, of_agents: Sequence[Space]) -> None:
        """Find the space of all agents; UserError if there is none."""
        self.has_mask = any(MASK in _parts(space) for space in of_agents)
        own_spaces = [_without_mask(space) for space in of_agents]
        self._kinds: list[int] | None = None
        self.space = own_spaces[0]
        if any(space != own_spaces[0] for space in own_spaces):
            self.space = self._pad(purpose, own_spaces)
        zeros = create_empty_array(self.space, n=1)
        self.empty = next(iter(iterate(batch_space(self.space, 1), zeros)))

    def split(self, seat: int, observation: Any) -> tuple[Any, Any]:
        """Returns an agent's observation in the common space, and its mask, None without one."""
        mask = None
        if isinstance(observation, dict) and MASK in observation:
            mask = observation[MASK]
            rest = {key: value for key, value in observation.items() if key != MASK}
            observation = rest[OBSERVATION] if [*rest] == [OBSERVATION] else rest
        if self._kinds is None:
            return observation, mask

        numbers = np.asarray(observation, np.float32).ravel()
        padded = np.zeros(self.space.shape or (), np.float32)
        padded[: len(numbers)] = numbers
        padded[self._width + self._kinds[seat]] = 1
        return padded, mask

    def _pad(self, purpose: str, own_spaces: Sequence[Space]) -> spaces.Box:
        """Returns the space of padded numbers, and one-hot the kind of agent."""
        if not all(isinstance(space, spaces.Box) for space in own_spaces):
            distinct = ", ".join(dict.fromkeys(map(str, own_spaces)))
            raise UserError(
                f"{purpose} has agents with the observations {distinct}, and one policy plays all "
                "of them: they must be equal, or a Box each, which is padded; change them by a "
                "wrapper"
            )
        kinds = list(dict.fromkeys(map(str, own_spaces)))
        self._kinds = [kinds.index(str(space)) for space in own_spaces]
        self._width = max(math.prod(space.shape) for space in own_spaces)  # type: ignore[arg-type]
        return spaces.Box(-np.inf, np.inf, (self._width + len(kinds),), np.float32)


def _maker_of(name: str, purpose: str) -> Callable[..., Any]:
    """Returns the function that makes an environment, a parallel one where there are both kinds.

    Args:
        name: of a module of PettingZoo or MPE2, or `module:function`.
        purpose: the environment, in words for errors.

    Raises:
        UserError: if there is no such environment, or a package is missing.
    """
    if ":" in name:
        return load(name, purpose)

    # PettingZoo warns of its modules, which are the only way in that all of its versions have.
    with explaining_errors(purpose), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        names: list[str] = []
        for family in FAMILIES:
            package = importlib.import_module(family)
            modules = [module.name for module in iter_modules(package.__path__)]
            if name in modules:
                module = importlib.import_module(f"{family}.{name}")
                maker: Callable[..., Any] = getattr(module, "parallel_env", None) or module.env
                return maker
            names += [module for module in modules if "_v" in module]
    raise UserError(f"{purpose}: PettingZoo and MPE2 have no {name}; {nearest(name, names)}")


def _game_of(env: Any, purpose: str) -> AgentGame:
    """Returns the game of an environment; UserError if it is none of PettingZoo's."""
    if not getattr(env, "possible_agents", None):
        raise UserError(
            f"{purpose} must be a ParallelEnv or an AECEnv of PettingZoo with possible_agents, not "
            f"{env}; list there all agents that may ever appear"
        )
    is_by_plies = isinstance(env, importlib.import_module("pettingzoo").AECEnv)
    return PlyGame(env) if is_by_plies else ParallelGame(env)


def _parts(space: Space) -> Mapping[str, Space]:
    return space.spaces if isinstance(space, spaces.Dict) else {}


def _without_mask(space: Space) -> Space:
    """Returns the space of an agent's observation beside its mask."""
    parts = {key: part for key, part in _parts(space).items() if key != MASK}
    if not parts:
        return space
    return parts[OBSERVATION] if [*parts] == [OBSERVATION] else spaces.Dict(parts)

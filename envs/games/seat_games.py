"""Games of several seats in numpy, stepped together: what all of them have in common.

A row is a seat: row ``game * seats + seat``. The metadata has the number of seats, the side of each
seat, and the names of the scripted players (`bot`).

Invariants:
- A seat acts, waits or is out. A seat that waits has exactly one legal choice, 0, without effect,
  and gets the rewards that happen to it. The episode of a seat that is out has ended, while the
  game goes on; it gets no reward.
- All seats of a game begin anew in the step after its last seat's episode has ended. That step does
  nothing else in this game.
- `info["outcome"]` is -1 ... 1 where an episode ends, and 0 elsewhere, float32 ``[rows]``.
- Where seats of a game may end apart, `info["playing"]` marks the rows within an episode, bool
  ``[rows]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Space
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import batch_space

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# The scripted player of every game, which takes any legal action with equal probability.
RANDOM = "random"


class SeatResults(NamedTuple):
    """What a step did to the seats. Each array is ``[games, seats]``."""

    rewards: Floats
    terminated: Flags
    truncated: Flags
    outcomes: Floats
    """Of the seats whose episode ends, -1 ... 1."""


def duel_results(
    gains: Ints, *, over: Flags, late: Flags | None = None, lead: Ints | None = None
) -> SeatResults:
    """Returns the results of games in which seat 0 gains what seat 1 loses, and both end together.

    Args:
        gains: of seat 0, ``[games]``.
        over: the games that end by the rules, ``[games]``.
        late: the games that are truncated, ``[games]``; by default none.
        lead: above 0 where seat 0 has won a game that ends, below 0 where seat 1 has, ``[games]``;
            by default the gains.
    """
    lead = np.sign(gains if lead is None else lead)
    terminated = np.repeat(over, 2).reshape(-1, 2)
    return SeatResults(
        rewards=np.stack((gains, -gains), 1).astype(np.float32),
        terminated=terminated,
        truncated=np.zeros_like(terminated) if late is None else np.repeat(late, 2).reshape(-1, 2),
        outcomes=np.stack((lead, -lead), 1).astype(np.float32),
    )


class SeatGames(VectorEnv, ABC):
    """``num_games`` games of the same kind.

    A subclass has the rules of one game, and writes them for all games at once: `_begin`, `_play`
    and `_observe`. A checkpoint holds the attributes by their names (`penstock.envs.saved_state`).
    """

    _ends_apart = False
    """Whether the episode of a seat may end before that of another one."""

    def __init__(
        self, num_games: int, observation_space: Space[Any], action_space: Space[Any]
    ) -> None:
        """Make the games.

        Args:
            num_games: number of games.
            observation_space: of one seat, the same for all seats.
            action_space: of one seat, the same for all seats.
        """
        self.num_games = num_games
        self.seats: int = self.metadata["seats"]
        self.num_envs = num_games * self.seats
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)

        # The numbers of the games, to index with.
        self._games = np.arange(num_games)
        # The seats within an episode, [games, seats].
        self._playing = np.ones((num_games, self.seats), np.bool_)
        # Draws the choices of the scripted players, so that they change no other chance.
        self._bot_random = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin all games anew."""
        super().reset(seed=seed)
        if seed is not None:
            self._bot_random = np.random.default_rng([seed, self.seats])

        self._begin(self._games)
        self._playing = np.ones((self.num_games, self.seats), np.bool_)
        return self._observe(), self._playing_info()

    def step(self, actions: Array) -> tuple[Any, Floats, Flags, Flags, dict[str, Any]]:
        """Step every game; those that have ended begin anew instead.

        Args:
            actions: of all rows, ``[rows, *shape]`` of the action space. Those of seats that wait
                or are out have no effect.

        Raises:
            ValueError: if a seat takes an illegal action.
        """
        was_playing = self._playing
        is_live = np.asarray(was_playing.any(1))
        moves = actions.reshape(self.num_games, self.seats, *actions.shape[1:])
        results = self._play(moves, is_live)

        terminated = results.terminated & was_playing
        truncated = results.truncated & was_playing
        over = terminated | truncated
        rewards = np.where(was_playing, results.rewards, np.float32(0))
        outcomes = np.where(over, results.outcomes, np.float32(0))

        # A new array each time, as the caller keeps it.
        playing = was_playing & ~over
        if not is_live.all():
            self._begin(np.flatnonzero(~is_live))
            playing[~is_live] = True
        self._playing = playing

        return (
            self._observe(),
            rewards.reshape(-1),
            terminated.reshape(-1),
            truncated.reshape(-1),
            {"outcome": outcomes.reshape(-1), **self._playing_info()},
        )

    def bot(self, name: str, rows: Ints) -> npt.NDArray[np.int32]:
        """Choose the actions of a scripted player.

        Call it once for a row between two steps, as a scripted player may have a memory.

        Args:
            name: one of ``metadata["bots"]``.
            rows: those that it plays.

        Returns:
            int32 ``[len(rows), *shape]`` of the action space.

        Raises:
            ValueError: for a name that is not one of them.
        """
        bots = self.metadata["bots"]
        if name not in bots:
            raise ValueError(f"there is no bot {name}; choose from {', '.join(bots)}")
        actions = self._random_actions(rows) if name == RANDOM else self._scripted(name, rows)
        return actions.astype(np.int32)

    def _playing_info(self) -> dict[str, Flags]:
        """Returns the entry of an info that marks the rows within an episode, if it is needed."""
        return {"playing": self._playing.reshape(-1)} if self._ends_apart else {}

    @abstractmethod
    def _begin(self, games: Ints) -> None:
        """Begin the games with these numbers anew."""

    @abstractmethod
    def _play(self, moves: Array, is_live: Flags) -> SeatResults:
        """Play a step of every game.

        Args:
            moves: the actions, ``[games, seats, *shape]``.
            is_live: the games that have not ended, ``[games]``. What is done to the others has no
                effect: they are begun anew afterwards.
        """

    @abstractmethod
    def _observe(self) -> Any:
        """Returns new observations of all rows."""

    def _scripted(self, name: str, rows: Ints) -> Ints:
        """Returns the actions of a scripted player other than `RANDOM`."""
        raise NotImplementedError(name)

    def _random_actions(self, rows: Ints) -> Ints:
        """Returns random actions; all are legal."""
        space = self.single_action_space
        if isinstance(space, MultiBinary):
            return self._bot_random.integers(2, size=(len(rows), *space.shape))
        assert isinstance(space, Discrete)
        return self._bot_random.integers(space.n, size=len(rows))


class MaskedGames(SeatGames):
    """Games in which a seat chooses one of several things, of which some may be illegal.

    Observations are a Dict of ``observation``, float32 ``[features]``, and ``action_mask``, int8
    ``[choices]``.
    """

    def __init__(self, num_games: int, *, features: int, choices: int, low: float = 0.0) -> None:
        """Make the games.

        Args:
            num_games: number of games.
            features: numbers that a seat observes.
            choices: things to choose from.
            low: the least number that a seat observes; the largest is 1.
        """
        observation_space = Dict(
            {
                "observation": Box(low, 1, (features,), np.float32),
                "action_mask": MultiBinary(choices),
            }
        )
        super().__init__(num_games, observation_space, Discrete(choices))

        # The legal choices of each row in the last observation.
        self._masks = np.ones((self.num_envs, choices), np.int8)

    def _observe(self) -> dict[str, Array]:
        self._masks = self._legal_choices().reshape(self.num_envs, -1).view(np.int8)
        return {"observation": self._features(), "action_mask": self._masks.copy()}

    @abstractmethod
    def _legal_choices(self) -> Flags:
        """Returns the legal choices, a new array ``[games, seats, choices]``."""

    @abstractmethod
    def _features(self) -> Floats:
        """Returns what the seats observe, a new array ``[rows, features]``."""

    def _random_actions(self, rows: Ints) -> Ints:
        """Returns random legal choices: of random numbers the largest one that is legal."""
        masks = self._masks[rows]
        return np.asarray((self._bot_random.random(masks.shape) * masks).argmax(1))

    def _refuse_illegal(self, moves: Ints, acting: Flags) -> None:
        """Raise ValueError if a seat that acts takes an illegal choice.

        Args:
            moves: the choices, ``[games, seats]``.
            acting: the seats that act, ``[games, seats]``.
        """
        is_legal = self._masks[np.arange(self.num_envs), moves.reshape(-1)] != 0
        is_illegal = acting & ~is_legal.reshape(acting.shape)
        if is_illegal.any():
            game, seat = np.argwhere(is_illegal)[0]
            legal = np.flatnonzero(self._masks[game * self.seats + seat]).tolist()
            raise ValueError(
                f"seat {seat} of game {game} took the illegal choice {moves[game, seat]}; its "
                f"action_mask allows {legal}"
            )


class TurnGames(MaskedGames):
    """Games in which one seat acts at a time, and the others wait."""

    def __init__(self, num_games: int, *, features: int, choices: int) -> None:
        """Make the games; arguments as of `MaskedGames`."""
        super().__init__(num_games, features=features, choices=choices)
        # The seat that acts, [games].
        self._mover = np.zeros(num_games, np.int64)

    def _play(self, moves: Ints, is_live: Flags) -> SeatResults:
        choices = moves[self._games, self._mover]
        row = self._games * self.seats + self._mover
        if not self._masks[row, choices][is_live].all():
            acting = np.zeros((self.num_games, self.seats), np.bool_)
            acting[self._games, self._mover] = is_live
            self._refuse_illegal(moves, acting)
        return self._move(choices)

    def _legal_choices(self) -> Flags:
        choices = self._masks.shape[1]
        legal = np.zeros((self.num_games, self.seats, choices), np.bool_)
        legal[:, :, 0] = True
        legal[self._games, self._mover] = self._movers_choices()
        return legal

    @abstractmethod
    def _move(self, choices: Ints) -> SeatResults:
        """Let the seat that acts take its choice, in every game.

        A choice may be illegal in a game that has ended, which is begun anew afterwards.

        Args:
            choices: ``[games]``.
        """

    @abstractmethod
    def _movers_choices(self) -> Flags:
        """Returns the legal choices of the seats that act, ``[games, choices]``."""

"""Those who play the rows of an actor's games that do not learn.

`Matches` (penstock.actors.matches) asks an `Opponent` for its actions in each step: a scripted
player of the environment, a frozen policy in an evaluation, or a `Chair`, on which the learner
seats one member of the pool after another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.draws import NO_DRAW, bot_draw, draw_number
from penstock.core.interfaces import ReadPolicy
from penstock.core.params import Stamp
from penstock.envs import BatchedEnv
from penstock.models.acting.policy import Policy

Flags = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]
Draws = npt.NDArray[np.uint64]


class Opponent(Protocol):
    """Plays R rows of the environments that do not learn, those of whole games, game by game.

    Calls come in this order: `reset`, then `begin` for all rows; between two unrolls `refresh` and
    `forget`; `act` and `take_rewards` once a step, and `begin` after it where episodes begin.
    """

    draws: Draws
    """The number of the draw, or of the scripted player, that plays each row, uint64 ``[R]``; the
    array is the same all the time (penstock.core.draws)."""

    def reset(self, seed: int) -> None:
        """All episodes begin anew; ``seed`` gives what is random from then on."""

    def begin(self, first: Flags, new_games: Flags) -> None:
        """Episodes have begun.

        Args:
            first: the rows whose next observation is the first of an episode, bool ``[R]``.
            new_games: the rows whose game has begun, bool ``[R]``. A seat may begin its episode
                later than its game.
        """

    def act(self, obs: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any]:
        """Returns the actions for observations ``[R, *shape]`` of ``rows``, int ``[R]``."""

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        """Take what the actions were paid, raw ``[R]``."""

    def refresh(self, read: ReadPolicy) -> bool:
        """Take newer weights; returns whether it has some. As `Environments.refresh`."""

    def forget(self) -> None:
        """As `Environments.forget`."""

    def state_dict(self) -> Any:
        """Returns the state between two steps, as plain data."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`."""


class _Steady:
    """What opponents have in common who never get other weights."""

    draws: Draws

    def reset(self, seed: int) -> None:
        pass

    def begin(self, first: Flags, new_games: Flags) -> None:
        pass

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        pass

    def refresh(self, read: ReadPolicy) -> bool:
        return True

    def forget(self) -> None:
        pass

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state: Any) -> None:
        pass


class BotPlayer(_Steady):
    """A scripted player of the environment, which may see the state of the game."""

    def __init__(self, env: BatchedEnv, name: str, rows: int) -> None:
        """Make the player.

        Args:
            env: the environments.
            name: one of `Seating.bots`.
            rows: the number of rows that it plays.
        """
        self._env = env
        self._name = name
        number = bot_draw(env.info.seating.bots.index(name))
        self.draws = np.full(rows, number, np.uint64)

    def act(self, obs: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any]:
        return self._env.bot(self._name, rows)


class FrozenPlayer(_Steady):
    """A policy that plays an evaluation, always with the same weights."""

    def __init__(self, policy: Policy, *, sample: bool = True) -> None:
        """Make the player.

        Args:
            policy: over as many environments as rows that it plays; it has its weights.
            sample: whether actions are drawn as in training; False takes the most probable ones.
        """
        self._policy = policy
        self._choose = policy.play if sample else policy.greedy
        self.draws = np.full(len(policy.state), NO_DRAW, np.uint64)

    def begin(self, first: Flags, new_games: Flags) -> None:
        self._policy.reset(first)

    def act(self, obs: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any]:
        return self._choose(obs)

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        self._policy.take_rewards(rewards)

    def state_dict(self) -> Any:
        return [self._policy.state.copy(), self._policy.state_dict()]

    def load_state_dict(self, state: Any) -> None:
        memory, decider = state
        self._policy.state[...] = memory
        self._policy.load_state_dict(decider)


class _Occupant:
    """A policy on a chair, with its weights."""

    policy: Policy
    draw = NO_DRAW
    """Number of the draw that the weights belong to; NO_DRAW before there are some."""

    def __init__(self, size: int) -> None:
        self.weights = np.zeros(size, np.float32)

    def sit(self, policy: Policy) -> None:
        """Compute by ``policy``, with the present weights."""
        self.policy = policy
        self.load(self.draw)

    def load(self, draw: int) -> None:
        """The weights have become those of ``draw``."""
        self.draw = draw
        if draw != NO_DRAW:
            self.policy.load(self.weights, number=self.draw)

    def state_dict(self) -> dict[str, Any]:
        return {
            "draw": self.draw,
            "weights": self.weights.copy(),
            "memory": self.policy.state.copy(),
            "decider": self.policy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights[...] = state["weights"]
        self.policy.state[...] = state["memory"]
        self.policy.load_state_dict(state["decider"])
        self.load(int(state["draw"]))


class Chair:
    """A policy that the learner publishes under an id of its own, one member of the pool at a time.

    When the learner has published another draw, games go over to it one by one, where they begin
    again. Meanwhile both policies compute all rows, so that their numbers of rows stay the same. A
    further draw is read when all games have gone over.
    """

    def __init__(self, policy_id: int, rows: int, size: int, make: Callable[[int], Policy]) -> None:
        """Make the chair, without weights.

        Args:
            policy_id: under which the learner publishes its weights.
            rows: the number of rows that it plays.
            size: of the flat vector of weights.
            make: returns a policy over these rows, whose random numbers are given by a seed.
        """
        self.draws = np.full(rows, NO_DRAW, np.uint64)
        self._policy_id = policy_id
        self._make = make
        self._present = _Occupant(size)
        self._next = _Occupant(size)
        self._stamp: Stamp | None = None  # stamp of the newest weights that were read
        self._is_changing = False  # whether `next` plays some rows, or will
        self._changed = np.zeros(rows, np.bool_)  # rows that `next` plays

    def reset(self, seed: int) -> None:
        present_seed, next_seed = np.random.SeedSequence(seed).generate_state(2)
        self._present.sit(self._make(int(present_seed)))
        self._next.sit(self._make(int(next_seed)))

    def begin(self, first: Flags, new_games: Flags) -> None:
        if self._is_changing:
            self._changed |= new_games
            self.draws[new_games] = self._next.draw
            if self._changed.all():
                self._present, self._next = self._next, self._present
                self._is_changing = False
                self._changed[:] = False
        self._present.policy.reset(first)
        if self._is_changing:
            self._next.policy.reset(first)

    def act(self, obs: npt.NDArray[Any], rows: Rows) -> npt.NDArray[Any]:
        actions = self._present.policy.play(obs)
        if not self._is_changing:
            return actions
        next_actions = self._next.policy.play(obs)
        changed = self._changed.reshape(-1, *(1,) * (actions.ndim - 1))
        return np.where(changed, next_actions, actions)

    def take_rewards(self, rewards: npt.NDArray[Any]) -> None:
        self._present.policy.take_rewards(rewards)
        if self._is_changing:
            self._next.policy.take_rewards(rewards)

    def refresh(self, read: ReadPolicy) -> bool:
        if self._is_changing:
            return True
        stamp = read(self._next.weights, self._stamp, policy_id=self._policy_id)
        if stamp is None:
            return self._present.draw != NO_DRAW

        self._stamp = stamp
        draw = draw_number(stamp)
        if draw == self._present.draw:  # read again after `forget`
            return True
        self._next.load(draw)
        if self._present.draw == NO_DRAW:
            self._present, self._next = self._next, self._present
            self.draws[:] = draw
        else:
            self._is_changing = True
        return True

    def forget(self) -> None:
        self._stamp = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "present": self._present.state_dict(),
            "next": self._next.state_dict(),
            "stamp": None if self._stamp is None else [*self._stamp],
            "changing": self._is_changing,
            "changed": self._changed.copy(),
            "draws": self.draws.copy(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._present.load_state_dict(state["present"])
        self._next.load_state_dict(state["next"])
        self._stamp = None if state["stamp"] is None else Stamp(*state["stamp"])
        self._is_changing = bool(state["changing"])
        self._changed[...] = state["changed"]
        self.draws[...] = state["draws"]

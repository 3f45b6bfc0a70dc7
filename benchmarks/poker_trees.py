"""Kuhn and Leduc poker as trees, written from their rules alone, and best responses in them.

It shares no code with `penstock.envs.games`, whose games it judges. All actions of these games are
public, so a tree has a node for each history of actions, and at each node all deals of the cards
are considered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import permutations
from typing import Protocol

import numpy as np
import numpy.typing as npt

Deal = tuple[int, ...]
History = tuple[int, ...]
Values = npt.NDArray[np.float64]
# Probabilities of all actions, also of illegal ones, for what the player of a node knows.
Policy = Callable[["Rules", Deal, History], Values]


class Rules(Protocol):
    """A game of two players, in which one gains what the other loses."""

    @property
    def actions(self) -> int:
        """The number of actions."""

    @property
    def deals(self) -> Sequence[Deal]:
        """All deals, which are equally likely."""

    def legal(self, history: History) -> tuple[int, ...]:
        """Returns the legal actions; none where the game has ended."""

    def player(self, history: History) -> int:
        """Returns whose turn it is."""

    def payoff(self, deal: Deal, history: History) -> float:
        """Returns what player 0 gains where the game has ended."""

    def knows(self, deal: Deal, history: History) -> Hashable:
        """Returns what the player whose turn it is knows."""


class Kuhn:
    """Three cards, 0 to 2. Actions: 0 is a pass, 1 a bet."""

    actions = 2
    deals = tuple(permutations(range(3), 2))

    def legal(self, history: History) -> tuple[int, ...]:
        is_open = len(history) < 2 or history == (0, 1)
        return (0, 1) if is_open else ()

    def player(self, history: History) -> int:
        return len(history) % 2

    def payoff(self, deal: Deal, history: History) -> float:
        bets = [1 + sum(history[player::2]) for player in (0, 1)]
        if bets[0] != bets[1]:
            return -1.0 if bets[0] < bets[1] else 1.0
        return float(bets[0] if deal[0] > deal[1] else -bets[0])

    def knows(self, deal: Deal, history: History) -> Hashable:
        return deal[self.player(history)], history


class Leduc:
    """Six cards, 0 to 5, of ranks 0 to 2; the third card of a deal is the open one.

    Actions: 0 is a fold, 1 a call, 2 a raise.
    """

    actions = 3
    deals = tuple(permutations(range(6), 3))

    @staticmethod
    def rounds(history: History) -> list[History]:
        """Returns the actions by round; the last round is open, or the game has ended in it."""
        rounds: list[History] = [()]
        for action in history:
            if len(rounds[-1]) > 1 and rounds[-1][-1] == 1:
                rounds.append(())
            rounds[-1] += (action,)
        if len(rounds) == 1 and len(rounds[0]) > 1 and rounds[0][-1] == 1:
            rounds.append(())
        return rounds

    def legal(self, history: History) -> tuple[int, ...]:
        now = self.rounds(history)
        called_twice = len(now) == 2 and len(now[1]) > 1 and now[1][-1] == 1
        if called_twice or 0 in history:
            return ()
        faces_raise = now[-1][-1:] == (2,)
        may_raise = now[-1].count(2) < 2
        return (0,) * faces_raise + (1,) + (2,) * may_raise

    def player(self, history: History) -> int:
        return len(self.rounds(history)[-1]) % 2

    def payoff(self, deal: Deal, history: History) -> float:
        paid = [1, 1]
        for added, actions in zip((2, 4), self.rounds(history), strict=False):
            for turn, action in enumerate(actions):
                player = turn % 2
                if action == 0:
                    return float(-paid[0] if player == 0 else paid[1])
                paid[player] = max(paid) + added * (action == 2)

        ranks = [card // 2 for card in deal]
        if ranks[0] == ranks[1]:
            return 0.0
        for player, sign in ((0, 1.0), (1, -1.0)):
            if ranks[player] == ranks[2]:
                return sign * paid[player]
        return float(paid[0] if ranks[0] > ranks[1] else -paid[0])

    def knows(self, deal: Deal, history: History) -> Hashable:
        shown = deal[2] // 2 if len(self.rounds(history)) == 2 else None
        return deal[self.player(history)] // 2, shown, history


def uniform(rules: Rules, deal: Deal, history: History) -> Values:
    """The policy that takes each legal action with equal probability."""
    probabilities = np.zeros(rules.actions)
    probabilities[list(rules.legal(history))] = 1
    return np.asarray(probabilities / probabilities.sum())


def best_response_value(rules: Rules, policy: Policy, player: int) -> float:
    """Returns what ``player`` gains at best against ``policy``."""
    sign = 1 if player == 0 else -1
    deals = rules.deals

    def values(history: History, weights: Values) -> Values:
        """Returns the weighted value of each deal; weights are chances that the other plays here.

        Weights and values are ``[deals]``.
        """
        legal = rules.legal(history)
        if not legal:
            gains = [sign * rules.payoff(deal, history) for deal in deals]
            return np.asarray(weights * gains)

        if rules.player(history) != player:
            probabilities = np.array([policy(rules, deal, history) for deal in deals])
            continued = [values((*history, a), weights * probabilities[:, a]) for a in legal]
            return np.asarray(np.sum(continued, axis=0))

        # The best action must be the same wherever the player knows the same.
        continued = [values((*history, a), weights) for a in legal]
        knowledge = [rules.knows(deal, history) for deal in deals]
        best = np.zeros(len(deals))
        for known in set(knowledge):
            same = np.array([each == known for each in knowledge])
            best[same] = max(continued, key=lambda action_values: action_values[same].sum())[same]
        return best

    return float(values((), np.full(len(deals), 1 / len(deals))).sum())


def exploitability(rules: Rules, policy: Policy) -> float:
    """Returns the mean gain of the two best responses to a policy that plays both sides."""
    return sum(best_response_value(rules, policy, player) for player in (0, 1)) / 2


def histories(rules: Rules, history: History = ()) -> list[History]:
    """Returns all histories, also those that end the game."""
    found = [history]
    for action in rules.legal(history):
        found += histories(rules, (*history, action))
    return found

"""Mixtures of poker policies: one of them is drawn before a game, and plays all of it.

A policy is a table, from what a player knows to the probabilities of its actions. A mixture is one
too: what it does in a situation is the mean over the policies, weighted by how likely each of them
is to have come there by its own actions (Kuhn 1953, realisation weights).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from poker_trees import History, Policy, Rules, Values

Table = dict[Hashable, Values]
"""Probabilities of all actions, 0 of illegal ones, by what a player knows."""


def policy_of(table: Table) -> Policy:
    """Returns a table as the policy that `poker_trees.exploitability` takes."""
    return lambda rules, deal, history: table[rules.knows(deal, history)]


def mixture(rules: Rules, tables: Sequence[Table], weights: Sequence[float]) -> Table:
    """Returns the table that plays as a policy drawn with these ``weights``."""
    chances = [_chances(rules, table) for table in tables]
    mixed = {}
    for known in tables[0]:
        shares = np.array([w * each[known] for w, each in zip(weights, chances, strict=True)])
        # Where none of them comes, what they would do does not matter.
        shares = shares / shares.sum() if shares.any() else np.asarray(weights)
        mixed[known] = shares @ [table[known] for table in tables]
    return mixed


def payoffs(rules: Rules, tables: Sequence[Table]) -> Values:
    """Returns what each policy gains of each on average over both seats, ``[n, n]``."""
    ends = [_ends(rules, table) for table in tables]
    gains = np.array([[rules.payoff(deal, end) for deal in rules.deals] for end in ends[0]])
    first, second = (
        np.array([[each[end][seat] for end in ends[0]] for each in ends]).reshape(len(tables), -1)
        for seat in (0, 1)
    )
    as_first = (first * gains.ravel() / len(rules.deals)) @ second.T
    return np.asarray((as_first - as_first.T) / 2)


def _chances(rules: Rules, table: Table) -> dict[Hashable, float]:
    """Returns how likely a policy's own actions lead to each situation, if all others' do."""
    chances: dict[Hashable, float] = {}

    def visit(history: History, reached: Values) -> None:
        legal = rules.legal(history)
        if not legal:
            return
        player = rules.player(history)
        for deal, chance in zip(rules.deals, reached[player], strict=True):
            chances[rules.knows(deal, history)] = float(chance)
        for action, after in _after(rules, table, history, reached):
            visit((*history, action), after)

    visit((), np.ones((2, len(rules.deals))))
    return chances


def _ends(rules: Rules, table: Table) -> dict[History, Values]:
    """Returns how likely the actions of each seat lead to each end, ``[2, deals]`` by history."""
    ends = {}

    def visit(history: History, reached: Values) -> None:
        if not rules.legal(history):
            ends[history] = reached
        for action, after in _after(rules, table, history, reached):
            visit((*history, action), after)

    visit((), np.ones((2, len(rules.deals))))
    return ends


def _after(
    rules: Rules, table: Table, history: History, reached: Values
) -> list[tuple[int, Values]]:
    """Returns the legal actions, each with the chances ``[2, deals]`` of both seats after it."""
    continued = []
    for action in rules.legal(history):
        player = rules.player(history)
        after = reached.copy()
        after[player] *= [table[rules.knows(deal, history)][action] for deal in rules.deals]
        continued.append((action, after))
    return continued

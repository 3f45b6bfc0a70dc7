"""Mixtures of poker policies, and the situations whose probabilities are asked of a network."""

from __future__ import annotations

import numpy as np
import pytest

from exploitability import POKER, exported, situations
from mixtures import Table, mixture, payoffs, policy_of
from poker_trees import Kuhn, Leduc, Rules, best_response_value, exploitability, histories

RULES: dict[str, Rules] = {"kuhn": Kuhn(), "leduc": Leduc()}


def random_table(rules: Rules, seed: int) -> Table:
    """Returns a policy with some certain actions, so that not every situation is reached."""
    random = np.random.default_rng(seed)
    table: Table = {}
    for history in histories(rules):
        legal = list(rules.legal(history))
        for deal in rules.deals if legal else ():
            probabilities = np.zeros(rules.actions)
            probabilities[legal] = random.dirichlet(np.full(len(legal), 0.3))
            if random.random() < 0.2:
                probabilities[legal] = np.eye(len(legal))[0]
            table.setdefault(rules.knows(deal, history), probabilities)
    return table


@pytest.mark.parametrize("name", RULES)
def test_a_mixture_gains_the_weighted_mean_of_its_policies(name: str) -> None:
    rules = RULES[name]
    tables = [random_table(rules, seed) for seed in range(4)]
    weights = [0.5, 0.2, 0.3]
    mixed = mixture(rules, tables[:3], weights)

    gains = payoffs(rules, [*tables, mixed])
    assert gains[4] == pytest.approx(weights @ gains[:3])
    assert gains == pytest.approx(-gains.T)


def test_the_mean_of_probabilities_is_not_the_mixture() -> None:
    rules = RULES["kuhn"]
    tables = [random_table(rules, seed) for seed in range(3)]
    mean = {known: np.mean([table[known] for table in tables], 0) for known in tables[0]}
    gains = payoffs(rules, [*tables, mean])
    assert gains[3] != pytest.approx(gains[:3].mean(0), abs=1e-3)


def test_a_mixture_of_a_policy_with_itself_is_the_policy() -> None:
    rules = RULES["leduc"]
    table = random_table(rules, 1)
    mixed = mixture(rules, [table, table], [0.4, 0.6])
    for known, probabilities in table.items():
        assert mixed[known] == pytest.approx(probabilities)


def test_the_equilibrium_of_kuhn_poker_gains_its_known_value() -> None:
    # Kuhn 1950, with the jack bet a third of the time: seat 0 loses 1/18, seat 1 gains it.
    bets = {(): [1 / 3, 0, 1], (0,): [1 / 3, 0, 1], (1,): [0, 1 / 3, 1], (0, 1): [0, 2 / 3, 1]}
    table: Table = {
        (card, history): np.array([1 - bets[history][card], bets[history][card]])
        for history in bets
        for card in range(3)
    }
    rules = RULES["kuhn"]
    assert best_response_value(rules, policy_of(table), 0) == pytest.approx(-1 / 18)
    assert best_response_value(rules, policy_of(table), 1) == pytest.approx(1 / 18)
    assert exploitability(rules, policy_of(table)) == pytest.approx(0, abs=1e-12)
    assert payoffs(rules, [table, random_table(rules, 0)])[0, 1] >= 0


@pytest.mark.parametrize("env_id", POKER)
def test_every_situation_is_seen_with_its_legal_actions(env_id: str) -> None:
    poker = POKER[env_id]
    seen = situations(poker)
    expected = random_table(poker.rules, 0)
    assert seen.keys() == expected.keys()
    assert len({each["observation"].tobytes() for each in seen.values()}) == len(seen)
    for known, observation in seen.items():
        legal = poker.rules.legal(known[-1])  # type: ignore[index]
        assert observation["action_mask"].nonzero()[0].tolist() == list(legal)


@pytest.mark.parametrize("env_id", POKER)
def test_exported_situations_have_names_of_their_own(env_id: str) -> None:
    table = random_table(POKER[env_id].rules, 0)
    assert len(exported(table)) == len(table)

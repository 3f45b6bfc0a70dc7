"""Kuhn and Leduc poker, played along every path of trees that were written from the rules alone.

One tree is that of `benchmarks/poker_trees.py`, the other OpenSpiel's where that is installed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from chi_square import assert_drawn_as
from penstock.envs.games.kuhn import KuhnPoker
from penstock.envs.games.leduc import LeducPoker
from penstock.envs.games.seat_games import TurnGames
from poker_trees import (
    Deal,
    History,
    Kuhn,
    Leduc,
    Policy,
    Rules,
    Values,
    exploitability,
    histories,
    uniform,
)

# So many that each deal of the ranks occurs.
GAMES = 500
RULES: dict[str, Rules] = {"kuhn": Kuhn(), "leduc": Leduc()}
KINDS: dict[str, Callable[[int], TurnGames]] = {"kuhn": KuhnPoker, "leduc": LeducPoker}
# The feature that shows whose turn it is.
TURN = {"kuhn": 4, "leduc": 7}


class SpielRules:
    """A game of OpenSpiel, as `Rules`."""

    def __init__(self, name: str) -> None:
        pyspiel = pytest.importorskip("pyspiel")
        self.deals = RULES[name].deals
        self._game = pyspiel.load_game(f"{name}_poker")
        self.actions: int = self._game.num_distinct_actions()
        self._states: dict[tuple[Deal, History], Any] = {}

    def legal(self, history: History) -> tuple[int, ...]:
        state = self._state(self.deals[0], history)
        return () if state.is_terminal() else tuple(state.legal_actions())

    def player(self, history: History) -> int:
        return int(self._state(self.deals[0], history).current_player())

    def payoff(self, deal: Deal, history: History) -> float:
        return float(self._state(deal, history).returns()[0])

    def knows(self, deal: Deal, history: History) -> Hashable:
        """What OpenSpiel shows the player; of Leduc's cards the ranks."""
        text = str(self._state(deal, history).information_state_string())
        return re.sub(r"(Private|Public): (\d)", lambda found: f"{int(found[2]) // 2}", text)

    def _state(self, deal: Deal, history: History) -> Any:
        """Returns the state after a deal and actions."""
        if (deal, history) not in self._states:
            state = self._game.new_initial_state()
            cards, actions = list(deal), list(history)
            while not state.is_terminal() and (state.is_chance_node() or actions):
                state.apply_action((cards if state.is_chance_node() else actions).pop(0))
            self._states[deal, history] = state
        return self._states[deal, history]


def dealt_cards(name: str, observations: dict[str, npt.NDArray[Any]]) -> list[Deal]:
    """Returns a deal of each game that shows the cards of its last observation.

    Of Leduc's two cards of a rank the deal has any, and any open card where none is shown.
    """
    seen = observations["observation"].reshape(GAMES, 2, -1)
    private = seen[:, :, :3].argmax(-1)
    if name == "kuhn":
        return [tuple(cards) for cards in private.tolist()]

    is_open = np.asarray(seen[:, :, 3:6].any(-1))
    assert (is_open[:, 0] == is_open[:, 1]).all()
    deal_of = {
        tuple(card // 2 for card in deal)[:count]: deal
        for deal in RULES[name].deals
        for count in (2, 3)
    }
    cards = (np.concatenate((private[i], np.flatnonzero(seen[i, 0, 3:6]))) for i in range(GAMES))
    return [deal_of[tuple(shown.tolist())] for shown in cards]


@pytest.mark.parametrize("source", ["rules", "openspiel"])
@pytest.mark.parametrize("name", RULES)
def test_every_path_through_a_game_equals_that_of_the_tree(name: str, source: str) -> None:
    rules = RULES[name] if source == "rules" else SpielRules(name)
    games = KINDS[name](GAMES)
    leaves = [history for history in histories(rules) if not rules.legal(history)]
    shown: dict[Hashable, set[bytes]] = defaultdict(set)
    all_rows = np.arange(2 * GAMES).reshape(GAMES, 2)

    for seed, leaf in enumerate(leaves):
        observations, _ = games.reset(seed=seed)
        for turn, action in enumerate(leaf):
            history = leaf[:turn]
            player = rules.player(history)
            rows, waiting = all_rows[:, player], all_rows[:, 1 - player]

            # Legal choices, and whose turn it is.
            mask = np.zeros(rules.actions, np.int8)
            mask[list(rules.legal(history))] = 1
            assert (observations["action_mask"][rows] == mask).all()
            assert (observations["action_mask"][waiting].argmax(1) == 0).all()
            assert (observations["action_mask"][waiting].sum(1) == 1).all()
            assert (observations["observation"][rows, TURN[name]] == 1).all()
            assert (observations["observation"][waiting, TURN[name]] == 0).all()
            for row, deal in zip(rows, dealt_cards(name, observations), strict=True):
                knowledge = rules.knows(deal, history)
                shown[knowledge].add(observations["observation"][row].tobytes())

            actions = np.zeros(2 * GAMES, np.int64)
            actions[rows] = action
            observations, rewards, terminated, truncated, info = games.step(actions)
            is_last = turn == len(leaf) - 1
            assert (terminated == is_last).all()
            assert not truncated.any()
            assert is_last or not rewards.any()

        deals = dealt_cards(name, observations)
        payoffs = np.array([rules.payoff(deal, leaf) for deal in deals])
        np.testing.assert_array_equal(rewards[0::2], payoffs)
        np.testing.assert_array_equal(rewards[1::2], -payoffs)
        np.testing.assert_array_equal(info["outcome"], np.sign(rewards))

    # An observation shows exactly what its player knows.
    assert len(shown) == {"kuhn": 12, "leduc": 288}[name]
    assert {len(observations_of_one) for observations_of_one in shown.values()} == {1}
    assert len(set.union(*shown.values())) == len(shown)


@pytest.mark.parametrize("name", RULES)
def test_all_deals_are_equally_likely(name: str) -> None:
    games = KINDS[name](GAMES)
    # A call or check by both seats of Leduc opens the third card.
    deals = []
    for seed in range(20):
        observations, _ = games.reset(seed=seed)
        for _ in range(2 if name == "leduc" else 0):
            observations, *_ = games.step(np.ones(2 * GAMES, np.int64))
        deals += dealt_cards(name, observations)

    rules = RULES[name]
    ranks = [tuple(c if name == "kuhn" else c // 2 for c in deal) for deal in rules.deals]
    distinct = sorted(set(ranks))
    drawn = [tuple(c if name == "kuhn" else c // 2 for c in deal) for deal in deals]
    shares = np.array([ranks.count(each) / len(ranks) for each in distinct])
    assert_drawn_as(np.array([distinct.index(each) for each in drawn]), shares)


def test_uniform_play_is_as_exploitable_as_published() -> None:
    assert exploitability(RULES["kuhn"], uniform) == pytest.approx(0.458333, abs=1e-6)
    assert exploitability(RULES["leduc"], uniform) == pytest.approx(2.373611, abs=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_exploitability_equals_that_of_openspiel(name: str) -> None:
    pyspiel = pytest.importorskip("pyspiel")
    policies: Any = pytest.importorskip("open_spiel.python.policy")
    theirs: Any = pytest.importorskip("open_spiel.python.algorithms.exploitability")
    game = pyspiel.load_game(f"{name}_poker")
    expected = theirs.exploitability(game, policies.UniformRandomPolicy(game))
    assert exploitability(RULES[name], uniform) == pytest.approx(expected, abs=1e-9)


def played_policy(bot: str) -> Policy:
    """Returns how often a scripted player of Kuhn poker passes and bets, by what it knows."""
    rules = RULES["kuhn"]
    counts: dict[Hashable, Values] = defaultdict(lambda: np.zeros(2))
    games = KuhnPoker(GAMES)
    all_rows = np.arange(2 * GAMES)
    for seed in range(40):
        for history in histories(rules):
            if not rules.legal(history):
                continue
            observations, _ = games.reset(seed=seed)
            for action in history:
                observations, *_ = games.step(np.full(2 * GAMES, action))
            rows = all_rows[rules.player(history) :: 2]
            choices = games.bot(bot, rows)
            for choice, deal in zip(choices, dealt_cards("kuhn", observations), strict=True):
                counts[rules.knows(deal, history)][choice] += 1

    return lambda rules, deal, history: (
        counts[rules.knows(deal, history)] / counts[rules.knows(deal, history)].sum()
    )


@pytest.mark.parametrize(("bot", "expected"), [("nash", 0.0), ("random", 0.458333)])
def test_scripted_players_of_kuhn_poker_are_as_exploitable_as_they_should_be(
    bot: str, expected: float
) -> None:
    assert exploitability(RULES["kuhn"], played_policy(bot)) == pytest.approx(expected, abs=0.02)


def test_a_raise_that_is_illegal_is_refused() -> None:
    games = LeducPoker(2)
    games.reset(seed=0)
    for _ in range(2):
        games.step(np.full(4, 2))
    with pytest.raises(ValueError, match=r"seat 0 of game 0 took the illegal choice 2.*\[0, 1\]"):
        games.step(np.full(4, 2))

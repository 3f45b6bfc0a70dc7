"""Decayed results against each opponent."""

import json

import pytest

from penstock.league.results import GameCounts, Results

WIN, DRAW, LOSS = GameCounts(1, 0, 0), GameCounts(0, 1, 0), GameCounts(0, 0, 1)


def results_of(*batches: GameCounts) -> Results:
    results = Results()
    for counts in batches:
        results.add("a", counts)
    return results


def test_without_a_game_the_win_rate_is_one_half() -> None:
    assert Results().win_rate("a") == 0.5
    assert Results().games("a") == 0


def test_one_game_moves_the_win_rate_to_two_thirds_one_half_or_one_third() -> None:
    rates = [results_of(game).win_rate("a") for game in (WIN, DRAW, LOSS)]
    assert rates == pytest.approx([2 / 3, 1 / 2, 1 / 3])


def test_an_earlier_game_counts_99_hundredths_after_the_next() -> None:
    results = results_of(WIN, LOSS)
    assert results.games("a") == pytest.approx(1.99)
    assert results.win_rate("a") == pytest.approx((0.99 + 1) / (1.99 + 2))


def test_games_against_one_opponent_do_not_decay_those_against_another() -> None:
    results = results_of(WIN)
    for _ in range(50):
        results.add("b", LOSS)
    assert results.games("a") == 1
    assert results.win_rate("a") == pytest.approx(2 / 3)


def test_a_batch_counts_as_much_as_its_games_one_by_one() -> None:
    batch = results_of(GameCounts(40, 0, 0))
    one_by_one = results_of(*[WIN] * 40)
    assert batch.games("a") == pytest.approx(one_by_one.games("a"))
    assert batch.win_rate("a") == pytest.approx(one_by_one.win_rate("a"))


def test_the_win_rate_of_a_batch_is_the_mean_over_the_orders_of_its_games() -> None:
    wins_first = results_of(WIN, WIN, LOSS).to_json()["a"]
    loss_first = results_of(LOSS, WIN, WIN).to_json()["a"]
    loss_between = results_of(WIN, LOSS, WIN).to_json()["a"]
    batch = results_of(GameCounts(2, 0, 1)).to_json()["a"]
    orders = zip(wins_first, loss_first, loss_between, strict=True)
    assert batch == pytest.approx([sum(counts) / 3 for counts in orders])


def test_results_forget_a_weaker_self() -> None:
    results = results_of(*[LOSS] * 500, *[WIN] * 500)
    assert results.win_rate("a") > 0.97
    assert results.games("a") < 100


def test_results_survive_json_bit_for_bit() -> None:
    results = results_of(GameCounts(7, 3, 5), WIN, LOSS)
    restored = Results(json.loads(json.dumps(results.to_json())))
    assert restored.to_json() == results.to_json()


def test_an_empty_batch_changes_nothing() -> None:
    results = results_of(WIN)
    results.add("b", GameCounts(0, 0, 0))
    assert results.to_json() == results_of(WIN).to_json()

"""Whom each rule draws. Expected numbers are worked out by hand from the published formulas."""

import numpy as np
import pytest

from penstock.configs.league import DRAWS
from penstock.league.matchmaking import Candidate, probabilities
from penstock.league.results import Results


def results_with(win_rates: dict[str, float]) -> Results:
    """Returns results whose win rates, with the prior of one win in two games, are these."""
    games = 98.0
    counts = {
        member: [rate * (games + 2) - 1, 0.0, games - rate * (games + 2) + 1]
        for member, rate in win_rates.items()
    }
    return Results(counts)


def line(name: str, count: int, draw: str = "pfsp:squared") -> list[Candidate]:
    return [Candidate(f"{name}{order}", name, order, draw) for order in range(count)]


def drawn(
    rule: str,
    candidates: list[Candidate],
    win_rates: dict[str, float] | None = None,
    nash: dict[str, float] | None = None,
) -> list[float]:
    results = results_with(win_rates or {})
    return list(probabilities(rule, candidates, results, name="a", nash=nash))


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("squared", [0.64 / 0.9, 0.25 / 0.9, 0.01 / 0.9]),
        ("linear", [0.8 / 1.4, 0.5 / 1.4, 0.1 / 1.4]),
        ("capped", [0.5 / 1.1, 0.5 / 1.1, 0.1 / 1.1]),
        ("variance", [0.16 / 0.5, 0.25 / 0.5, 0.09 / 0.5]),
    ],
)
def test_pfsp_weights_win_rates_as_published(weighting: str, expected: list[float]) -> None:
    win_rates = {"a0": 0.2, "a1": 0.5, "a2": 0.9}
    assert drawn(f"pfsp:{weighting}", line("a", 3), win_rates) == pytest.approx(expected)


def test_where_all_weights_are_zero_all_are_equally_likely() -> None:
    beaten = Results({"a0": [1e20, 0, 0], "a1": [1e20, 0, 0]})
    shares = probabilities("pfsp:squared", line("a", 2), beaten, name="a")
    assert list(shares) == [0.5, 0.5]


@pytest.mark.parametrize("rule", [rule for rule in DRAWS if rule != "newest"])
def test_without_snapshots_only_rules_that_draw_the_latest_draw_anyone(rule: str) -> None:
    latest = [Candidate("b/latest", "b", 0, "main", latest=True)]
    assert drawn(rule, latest) == [1.0 if rule == "main_exploiter" else 0.0]


def test_newest_is_the_last_of_each_line() -> None:
    candidates = [*line("a", 3), *line("b", 2)]
    assert drawn("newest", candidates) == [0, 0, 0.5, 0, 0.5]


def test_newest_prefers_the_latest_state_of_a_line_to_its_snapshots() -> None:
    candidates = [*line("b", 2), Candidate("b/latest", "b", 0, "main", latest=True)]
    assert drawn("newest", candidates) == [0, 0, 1]


def test_uniform_draws_all_snapshots_alike() -> None:
    candidates = [*line("a", 3), Candidate("b/latest", "b", 0, "main", latest=True)]
    assert drawn("uniform", candidates) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_uniform_with_a_number_draws_the_newest_of_each_line() -> None:
    candidates = [*line("a", 4), *line("b", 1)]
    assert drawn("uniform:2", candidates) == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])


def test_nash_draws_by_the_weights_of_the_members_that_it_knows() -> None:
    nash = {"a0": 0.25, "a1": 0.75}
    assert drawn("nash", line("a", 3), nash=nash) == [0.25, 0.75, 0]


def test_nash_without_weights_is_uniform() -> None:
    assert drawn("nash", line("a", 2)) == [0.5, 0.5]


def test_a_main_player_without_weak_spots_plays_pfsp() -> None:
    # Its own snapshots become harder with age, and the exploiter is beaten.
    candidates = [*line("a", 2, "main"), *line("x", 1, "main_exploiter")]
    win_rates = {"a0": 0.9, "a1": 0.5, "x0": 0.8}
    expected = [0.01 / 0.3, 0.25 / 0.3, 0.04 / 0.3]
    assert drawn("main", candidates, win_rates) == pytest.approx(expected)


def test_a_main_player_verifies_an_exploiter_that_beats_it() -> None:
    candidates = [*line("a", 1, "main"), *line("x", 2, "main_exploiter")]
    win_rates = {"a0": 0.5, "x0": 0.2, "x1": 0.5}
    # PFSP over all with 10/13, and over both exploiters with 3/13.
    total = 0.25 + 0.64 + 0.25
    expected = [
        10 / 13 * 0.25 / total,
        10 / 13 * 0.64 / total + 3 / 13 * 0.64 / 0.89,
        10 / 13 * 0.25 / total + 3 / 13 * 0.25 / 0.89,
    ]
    assert drawn("main", candidates, win_rates) == pytest.approx(expected)


def test_a_main_player_verifies_an_earlier_self_that_it_has_forgotten_to_beat() -> None:
    # a1 is easier than a0, so a0 and a1 are verified; from there on each is harder.
    win_rates = {"a0": 0.6, "a1": 0.9, "a2": 0.8, "a3": 0.5}
    total = 0.16 + 0.01 + 0.04 + 0.25
    expected = [
        10 / 13 * 0.16 / total + 3 / 13 * 0.16 / 0.17,
        10 / 13 * 0.01 / total + 3 / 13 * 0.01 / 0.17,
        10 / 13 * 0.04 / total,
        10 / 13 * 0.25 / total,
    ]
    assert drawn("main", line("a", 4, "main"), win_rates) == pytest.approx(expected)


def test_a_main_player_does_not_verify_an_earlier_self_that_it_still_beats() -> None:
    win_rates = {"a0": 0.75, "a1": 0.9}
    expected = [0.0625 / 0.0725, 0.01 / 0.0725]
    assert drawn("main", line("a", 2, "main"), win_rates) == pytest.approx(expected)


def test_the_age_of_snapshots_does_not_depend_on_their_place() -> None:
    win_rates = {"a0": 0.6, "a1": 0.9, "a2": 0.8, "a3": 0.5}
    candidates = line("a", 4, "main")
    shares = drawn("main", candidates, win_rates)
    assert drawn("main", candidates[::-1], win_rates) == pytest.approx(shares[::-1])


def test_a_main_exploiter_plays_the_latest_state_of_the_main_player() -> None:
    latest = Candidate("m/latest", "m", 0, "main", latest=True)
    candidates = [*line("m", 2, "main"), latest, *line("a", 2, "main_exploiter")]
    assert drawn("main_exploiter", candidates) == [0, 0, 1, 0, 0]


def test_a_main_exploiter_that_loses_always_plays_earlier_main_players_near_its_strength() -> None:
    latest = Candidate("m/latest", "m", 0, "main", latest=True)
    candidates = [*line("m", 2, "main"), latest]
    win_rates = {"m0": 0.5, "m1": 0.1, "m/latest": 0.05}
    assert drawn("main_exploiter", candidates, win_rates) == pytest.approx(
        [0.25 / 0.34, 0.09 / 0.34, 0]
    )


def test_a_main_exploiter_exploits_the_other_line_where_none_is_called_main() -> None:
    candidates = [*line("m", 2, "newest"), *line("a", 2, "main_exploiter")]
    assert drawn("main_exploiter", candidates) == [0, 1, 0, 0]


def test_a_league_exploiter_plays_all_snapshots_that_it_does_not_beat_alike() -> None:
    candidates = [*line("m", 2, "main"), *line("a", 1, "league_exploiter")]
    win_rates = {"m0": 0.9, "m1": 0.3, "a0": 0.5}
    expected = [0.1 / 1.1, 0.5 / 1.1, 0.5 / 1.1]
    assert drawn("league_exploiter", candidates, win_rates) == pytest.approx(expected)


@pytest.mark.parametrize("rule", [*DRAWS, "uniform:3"])
def test_probabilities_of_every_rule_add_up_to_one(rule: str) -> None:
    random = np.random.default_rng(0)
    for count in range(1, 8):
        candidates = [
            *line("a", count, "main"),
            *line("x", count // 2, "main_exploiter"),
            *line("y", count // 3, "league_exploiter"),
        ]
        win_rates = {each.id: random.uniform(0.02, 0.98) for each in candidates}
        shares = drawn(rule, candidates, win_rates, nash={"a0": 0.4, "x0": 0.6})
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0

"""What the games of several seats have in common, and the two that have no file of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.envs.games.connect_four import ConnectFour
from penstock.envs.games.kuhn import KuhnPoker
from penstock.envs.games.leduc import LeducPoker
from penstock.envs.games.predator_prey import PredatorPrey
from penstock.envs.games.rock_paper_scissors import RockPaperScissors
from penstock.envs.games.seat_games import MaskedGames, SeatGames, TurnGames
from penstock.envs.games.slime_volley import SlimeVolley
from penstock.envs.saved_state import restore, state_of

Kind = Callable[[int], SeatGames]
GAMES = 5
# As many steps end several games of each kind.
STEPS: dict[Kind, int] = {SlimeVolley: 2500}
KINDS: list[type[Any]] = [
    ConnectFour,
    KuhnPoker,
    LeducPoker,
    PredatorPrey,
    RockPaperScissors,
    SlimeVolley,
]
every_kind = pytest.mark.parametrize("kind", KINDS)


def steps_of(kind: Kind) -> int:
    return STEPS.get(kind, 250)


def flat(results: Any) -> list[Any]:
    """Returns all arrays of a step's or a reset's results."""
    if isinstance(results, dict):
        return [array for key in sorted(results) for array in flat(results[key])]
    if isinstance(results, tuple):
        return [array for part in results for array in flat(part)]
    return [results]


def assert_equal(first: Any, second: Any) -> None:
    for one, other in zip(flat(first), flat(second), strict=True):
        np.testing.assert_array_equal(one, other)


def by_game(games: SeatGames, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return rows.reshape(games.num_games, games.seats, *rows.shape[1:])


@every_kind
def test_seats_end_and_begin_together_and_are_paid_only_while_they_play(
    kind: Kind,
) -> None:
    games = kind(GAMES)
    rows = np.arange(games.num_envs)
    _, info = games.reset(seed=3)
    assert info.get("playing", np.True_).all()
    playing = np.ones((GAMES, games.seats), np.bool_)

    ended_games = 0
    returns = np.zeros((GAMES, games.seats))
    for _ in range(steps_of(kind)):
        observations, rewards, terminated, truncated, info = games.step(games.bot("random", rows))
        assert games.observation_space.contains(observations)
        assert rewards.dtype == np.float32
        ends = by_game(games, terminated | truncated)
        rewards = by_game(games, rewards)
        outcomes = by_game(games, info["outcome"])
        assert not (terminated & truncated).any()
        assert not rewards[~playing].any()
        # Bytes are compared elsewhere, so there is one zero.
        assert not np.signbit(rewards[rewards == 0]).any()
        assert not ends[~playing].any()
        assert not outcomes[~ends].any()
        assert (np.abs(outcomes) <= 1).all()

        # A game without a seat that plays has begun anew, with all seats.
        was_over = np.asarray(~playing.any(1))
        playing = np.where(was_over[:, None], True, playing & ~ends)
        if kind is PredatorPrey:
            np.testing.assert_array_equal(by_game(games, info["playing"]), playing)
        else:
            assert "playing" not in info
            assert (ends == ends[:, :1]).all()

        returns[was_over] = 0
        returns += rewards
        over = np.asarray(~playing.any(1))
        ended_games += int(over.sum())
        side = np.array(games.metadata["sides"])
        side_means = [returns[over][:, side == each].mean(1) for each in (0, 1)]
        np.testing.assert_allclose(side_means[0] + side_means[1], 0, atol=1e-6)
    assert ended_games >= GAMES


@every_kind
def test_the_same_seed_and_actions_give_the_same_games(kind: Kind) -> None:
    first, second = kind(GAMES), kind(GAMES)
    rows = np.arange(first.num_envs)
    assert_equal(first.reset(seed=9), second.reset(seed=9))
    for _ in range(steps_of(kind)):
        actions = first.bot("random", rows)
        # The scripted players of the second are asked for nothing, which changes no chance.
        assert_equal(first.step(actions), second.step(actions))


@every_kind
def test_actions_do_not_matter_where_a_game_begins_anew(kind: Kind) -> None:
    first, second = kind(GAMES), kind(GAMES)
    rows = np.arange(first.num_envs)
    first.reset(seed=1)
    second.reset(seed=1)
    first.action_space.seed(0)
    playing = np.ones(first.num_envs, np.bool_)
    tried = 0
    for _ in range(steps_of(kind)):
        actions = first.bot("random", rows)
        other_actions = actions.copy()
        other_actions[~playing] = first.action_space.sample()[~playing]
        tried += int((actions != other_actions).any())
        _, _, terminated, truncated, info = results = first.step(actions)
        assert_equal(results, second.step(other_actions))
        playing = info.get("playing", ~(terminated | truncated))
    assert tried


@every_kind
def test_a_saved_state_goes_on_bit_for_bit(kind: Kind) -> None:
    first, second = kind(GAMES), kind(GAMES)
    rows = np.arange(first.num_envs)
    first.reset(seed=4)
    second.reset(seed=5)
    bots = first.metadata["bots"]
    for _ in range(40):
        first.step(first.bot("random", rows))
    restore(second, state_of(first))
    for step in range(steps_of(kind)):
        bot = bots[step % len(bots)]
        actions = first.bot(bot, rows)
        np.testing.assert_array_equal(actions, second.bot(bot, rows))
        assert_equal(first.step(actions), second.step(actions))


@every_kind
def test_random_play_takes_each_legal_choice_equally_often(kind: Kind) -> None:
    games = kind(400)
    rows = np.arange(games.num_envs)
    observations, _ = games.reset(seed=6)
    actions = games.bot("random", rows)
    assert actions.dtype == np.int32
    assert games.action_space.contains(actions.astype(games.action_space.dtype))
    if kind is SlimeVolley:
        shares = actions.mean(0)
        assert np.abs(shares - 0.5).max() < 4 * 0.5 / np.sqrt(len(rows))
        return

    choices = int(games.single_action_space.n)  # type: ignore[attr-defined]
    masks = np.ones((len(rows), choices))
    if isinstance(games, MaskedGames):
        masks = observations["action_mask"]
    assert masks[rows, actions].all()
    expected = (masks / masks.sum(1, keepdims=True)).sum(0)
    counts = np.bincount(actions, minlength=choices)
    np.testing.assert_allclose(counts, expected, atol=4 * np.sqrt(len(rows)) / 2)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, TurnGames)])
def test_a_seat_that_waits_has_one_legal_choice_without_effect(kind: Kind) -> None:
    first, second = kind(GAMES), kind(GAMES)
    rows = np.arange(first.num_envs)
    observations, _ = first.reset(seed=2)
    second.reset(seed=2)
    for _ in range(200):
        masks = observations["action_mask"]
        open_rows = np.flatnonzero(masks.sum(1) > 1)
        assert len(set(open_rows // 2)) == len(open_rows)
        waiting = np.ones(len(rows), np.bool_)
        waiting[open_rows] = False
        forced = waiting & (masks[:, 0] == 1)
        assert (masks[waiting].sum(1) == 1).all()

        # Of a game with a choice the other seat waits, and whatever it does is ignored.
        partners = open_rows + 1 - 2 * (open_rows % 2)
        assert forced[partners].all()
        actions = first.bot("random", rows)
        other_actions = actions.copy()
        other_actions[partners] = masks.shape[1] - 1
        observations, *rest = first.step(actions)
        assert_equal((observations, *rest), second.step(other_actions))


@every_kind
def test_an_unknown_bot_is_refused(kind: Kind) -> None:
    games = kind(1)
    games.reset(seed=0)
    with pytest.raises(ValueError, match="there is no bot deepblue; choose from random"):
        games.bot("deepblue", np.array([0]))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (RockPaperScissors, {"rounds": 0}, "rounds is 0; a game has 1 round or more"),
        (PredatorPrey, {"prey": 0}, "prey is 0; it must be 1 or more"),
    ],
)
def test_options_that_make_no_game_are_refused(
    kind: Any, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(2, **options)


def test_paper_beats_rock_scissors_beat_paper_and_rock_beats_scissors() -> None:
    pairs = [(a, b) for a in range(3) for b in range(3)]
    games = RockPaperScissors(len(pairs), rounds=3)
    games.reset(seed=0)
    winners = {(1, 0): 1, (0, 1): -1, (2, 1): 1, (1, 2): -1, (0, 2): 1, (2, 0): -1}
    expected = [winners.get(pair, 0) for pair in pairs]
    for number in (1, 2, 3):
        _, rewards, terminated, _, info = games.step(np.array(pairs).reshape(-1))
        assert rewards[0::2].tolist() == expected
        assert rewards[1::2].tolist() == [-reward for reward in expected]
        assert (terminated == (number == 3)).all()
    assert info["outcome"][0::2].tolist() == expected


def test_the_seat_that_wins_more_rounds_wins_the_game() -> None:
    games = RockPaperScissors(1, rounds=3)
    games.reset(seed=0)
    outcomes = [games.step(np.array(pair))[4]["outcome"] for pair in ((1, 0), (2, 1), (0, 1))]
    assert outcomes[-1].tolist() == [1, -1]


# Of `PredatorPrey` with two hunters and two prey.
HUNTERS = np.array([0, 1])
DIRECTIONS = np.array([(1, 0), (-1, 0), (0, 1), (0, -1)])


def offsets(games: PredatorPrey, observations: dict[str, Any]) -> npt.NDArray[Any]:
    """Returns of each seat whether the others play, and where they are: [games, 4, 4, 3]."""
    return by_game(games, observations["observation"])[:, :, 5:].reshape(-1, 4, 4, 3)


def greedy(games: PredatorPrey, observations: dict[str, Any], role: str) -> npt.NDArray[Any]:
    """Returns the actions of all seats of a role: to the nearest of the others, or away from it."""
    seen = offsets(games, observations)
    masks = by_game(games, observations["action_mask"])
    seats, others = (slice(0, 2), slice(2, 4)) if role == "hunters" else (slice(2, 4), slice(0, 2))
    actions = np.zeros((games.num_games, 4), int)
    for game in range(games.num_games):
        for seat in range(4)[seats]:
            present, places = seen[game, seat, others, 0], seen[game, seat, others, 1:]
            distances = np.where(present > 0, np.linalg.norm(places, axis=-1), np.inf)
            towards = places[distances.argmin()]
            if role == "hunters":
                actions[game, seat] = 1 + (DIRECTIONS @ towards).argmax()
                continue
            # Prey that stands at a wall cannot go farther there, and dashes where it may.
            place = by_game(games, observations["observation"])[game, seat, 1:3]
            gains = DIRECTIONS @ -towards - (np.abs(place + 0.1 * DIRECTIONS) > 1).any(-1)
            best = 1 + gains.argmax()
            actions[game, seat] = best + 4 * masks[game, seat, 5]
    return actions


def hunters_outcome(role: str) -> float:
    """Returns the hunters' mean outcome where one role is greedy and the other random."""
    games = PredatorPrey(60)
    rows = np.arange(games.num_envs)
    observations, _ = games.reset(seed=8)
    results = np.full(60, np.nan)
    while np.isnan(results).any():
        actions = by_game(games, games.bot("random", rows))
        seats = slice(0, 2) if role == "hunters" else slice(2, 4)
        actions[:, seats] = greedy(games, observations, role)[:, seats]
        observations, _, terminated, _, info = games.step(actions.reshape(-1))
        ended = by_game(games, terminated)[:, 0] & np.isnan(results)
        results[ended] = by_game(games, info["outcome"])[ended, 0]
    return float(results.mean())


def test_each_role_wins_if_it_alone_plays_well() -> None:
    assert hunters_outcome("hunters") > 0.8
    assert hunters_outcome("prey") < -0.8


def test_caught_prey_is_out_and_the_others_play_on() -> None:
    games = PredatorPrey(30)
    rows = np.arange(games.num_envs)
    observations, info = games.reset(seed=1)
    seen_apart = 0
    for _ in range(120):
        playing = by_game(games, info["playing"])
        seen = offsets(games, observations)
        # Whoever is out is seen by nobody.
        live = playing[:, 0]
        present = np.broadcast_to(playing[live][:, None], (int(live.sum()), 4, 4))
        np.testing.assert_array_equal(seen[live][..., 0], present)

        apart = playing[:, :2].all(1) & (playing[:, 2:].sum(1) == 1)
        seen_apart += int(apart.sum())
        actions = by_game(games, games.bot("random", rows))
        actions[:, :2] = greedy(games, observations, "hunters")[:, :2]
        observations, rewards, terminated, _, info = games.step(actions.reshape(-1))
        caught = by_game(games, terminated)[:, 2:] & (by_game(games, rewards)[:, 2:] < 0)
        gains = by_game(games, rewards)[:, :2]
        free = by_game(games, terminated)[:, 2:] & ~caught
        expected = (caught.sum(1) - free.sum(1)) / 2
        np.testing.assert_array_equal(gains, np.stack([expected, expected], 1))
    assert seen_apart > 50


def test_prey_that_has_dashed_rests_for_ten_steps() -> None:
    games = PredatorPrey(1, hunters=1, prey=1)
    observations, _ = games.reset(seed=0)
    place = observations["observation"][1, 1:3].copy()
    observations, *_ = games.step(np.array([0, 6]))
    moved = observations["observation"][1, 1:3] - place
    np.testing.assert_allclose(moved, [-3 * 0.07, 0], atol=1e-6)
    for _ in range(10):
        assert not observations["action_mask"][1, 5:].any()
        observations, *_ = games.step(np.array([0, 0]))
    assert observations["action_mask"][1, 5:].all()
    assert not observations["action_mask"][0, 5:].any()
    with pytest.raises(ValueError, match="seat 0 of game 0 took the illegal choice 5"):
        games.step(np.array([5, 0]))

"""Policies on chairs that play games: which draw plays which game."""

from __future__ import annotations

from functools import cache

import numpy as np

from penstock.algos.batch_policy import BatchPolicy
from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.draws import NO_DRAW, draw_number
from penstock.core.params import Float32, ParamLayout, Stamp
from penstock.envs import EnvInfo, probe
from penstock.serving.match_draws import MIRROR
from penstock.serving.opponents import MOST_DRAWS, Opponents
from penstock.transport.shm.weights_board import WeightsBoard, board_of

SURE = 50.0  # a logit beside which all others have no probability


@cache
def rock_paper_scissors() -> tuple[Config, EnvInfo, ParamLayout]:
    config = resolve("penstock/RockPaperScissors-v0")
    info = probe(config.env)
    return config, info, network_shape(config, info).layout


def choosing(choice: int) -> Float32:
    """Weights of a policy that always takes one choice."""
    _, _, layout = rock_paper_scissors()
    flat = np.zeros(layout.size, np.float32)
    [bias] = [array for array in layout.views(flat).values() if array.shape == (3,)]
    bias[choice] = SURE
    return flat


class Chairs:
    """The boards of a learner with some chairs, and the opponents that read them."""

    def __init__(self, chairs: int, games: int) -> None:
        config, info, layout = rock_paper_scissors()
        self.boards = [
            WeightsBoard.create(layout.size, shared=False, policy_id=policy_id)
            for policy_id in range(1 + chairs)
        ]
        self.policies_made = 0
        self.drawn = 0

        def make(weights: Float32) -> BatchPolicy:
            self.policies_made += 1
            return BatchPolicy(config, info, weights)

        self.opponents = Opponents(chairs=chairs, size=layout.size, games=games, make=make)

    def show(self, chair: int, choice: int) -> int:
        """Publishes a policy that always takes one choice; returns the number of the draw."""
        self.drawn += 1
        stamp = Stamp(5, self.drawn)
        self.boards[chair].publish(choosing(choice), stamp, chair)
        return draw_number(stamp)

    def refresh(self) -> bool:
        return self.opponents.refresh(
            lambda out, newer_than, policy_id=0: board_of(self.boards, policy_id).read(
                out, newer_than, policy_id
            )
        )

    def choices(self, *games: int) -> list[int]:
        """The choices of the opponents of games."""
        count = len(games)
        actions, _ = self.opponents.decide(
            self.opponents.policies[[*games]], np.ones((count, 1)), np.zeros((count, 0), np.float32)
        )
        return [int(action) for action in actions]


def test_opponents_are_ready_when_each_chair_has_a_draw() -> None:
    chairs = Chairs(2, games=1)
    assert not chairs.refresh()
    chairs.show(2, 0)
    assert not chairs.refresh()
    chairs.show(1, 0)
    assert chairs.refresh()


def test_each_game_is_decided_by_its_own_chair_in_one_batch() -> None:
    chairs = Chairs(3, games=6)
    numbers = [chairs.show(chair, choice) for chair, choice in ((1, 0), (2, 1), (3, 2))]
    chairs.refresh()
    for game, chair in enumerate([3, 1, 2, 2, 1, 3]):
        chairs.opponents.begin(game, chair)
    assert chairs.choices(0, 1, 2, 3, 4, 5) == [2, 0, 1, 1, 0, 2]
    assert chairs.choices(4, 0) == [0, 2]
    assert chairs.opponents.draws.tolist() == [numbers[chair - 1] for chair in (3, 1, 2, 2, 1, 3)]


def test_a_game_goes_on_with_its_draw_after_its_chair_shows_another() -> None:
    chairs = Chairs(1, games=2)
    first = chairs.show(1, 0)
    chairs.refresh()
    chairs.opponents.begin(0, 1)
    second = chairs.show(1, 2)
    chairs.refresh()
    chairs.opponents.begin(1, 1)
    assert chairs.choices(0, 1) == [0, 2]
    assert chairs.opponents.draws.tolist() == [first, second]


def test_policies_that_play_no_game_are_used_again() -> None:
    chairs = Chairs(1, games=1)
    for choice in (0, 1, 2, 1, 0, 2, 2):
        draw = chairs.show(1, choice)
        chairs.refresh()
        chairs.opponents.begin(0, 1)
        assert chairs.choices(0) == [choice]
        assert chairs.opponents.draws.tolist() == [draw]
        chairs.opponents.end(0)
    assert chairs.policies_made == 2


def test_a_game_that_outlasts_its_draw_goes_on_without_a_result_and_holds_nobody_up() -> None:
    chairs = Chairs(1, games=MOST_DRAWS + 1)
    draws = []
    for game in range(MOST_DRAWS):
        draws.append(chairs.show(1, game % 2))
        chairs.refresh()
        chairs.opponents.begin(game, 1)
    assert chairs.opponents.draws.tolist() == [*draws, NO_DRAW]

    newest = chairs.show(1, 2)
    chairs.refresh()
    chairs.opponents.begin(MOST_DRAWS, 1)
    assert chairs.opponents.draws.tolist() == [NO_DRAW, *draws[1:], newest]
    assert chairs.choices(*range(MOST_DRAWS + 1)) == [2, 1, 0, 1, 2]
    assert chairs.policies_made == MOST_DRAWS

    # The games of a policy that has two draws of them are counted together.
    chairs.opponents.end(0)
    chairs.show(1, 1)
    chairs.refresh()
    assert chairs.choices(MOST_DRAWS) == [2]


def test_nobody_plays_in_a_mirror_game() -> None:
    chairs = Chairs(1, games=1)
    chairs.show(1, 0)
    chairs.refresh()
    chairs.opponents.begin(0, MIRROR)
    assert chairs.opponents.policies.tolist() == [-1]
    assert chairs.opponents.draws.tolist() == [NO_DRAW]
    chairs.opponents.end(0)

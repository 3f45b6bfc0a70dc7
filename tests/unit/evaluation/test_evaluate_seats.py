"""Evaluations of games of several seats: returns, outcomes and figures of each seat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algos.slots import UnrollSummary
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.envs import make, probe
from penstock.evaluation.evaluate import Episode, by_seat, play
from penstock.evaluation.evaluator import returns_of
from penstock.learner.checkpoints.checkpoint_history import checkpoint_folder
from penstock.learner.checkpoints.checkpoint_manager import CheckpointManager
from penstock.learner.trainer import Trainer
from seat_game import PAYOFFS

YES, NO = True, False


def played(env_id: str, rows: int, episodes: int, max_steps: int = 100, **kwargs: Any) -> Any:
    env = make(EnvConfig(id=env_id, kwargs=kwargs), rows, whole_games=True)

    def seat_number(obs: Any) -> Any:
        """The first seat takes choice 0, the second choice 1."""
        return np.arange(env.count, dtype=np.int32) % env.info.seating.seats

    found = play(env, seat_number, episodes, 0, max_steps)
    env.close()
    return found


def test_the_outcome_of_a_game_without_one_is_the_sign_of_the_difference_between_sides() -> None:
    payoff = PAYOFFS[0, 1]
    assert payoff < 0
    assert played("seat_game:TwoPly", 4, 4) == [
        Episode(payoff, 2, game=0, seat=0, outcome=-1),
        Episode(-payoff, 2, game=0, seat=1, outcome=1),
        Episode(payoff, 2, game=1, seat=0, outcome=-1),
        Episode(-payoff, 2, game=1, seat=1, outcome=1),
    ]


def test_sides_whose_returns_differ_by_rounding_have_drawn() -> None:
    # In float32 three times 0.1 is not 0.3.
    steps = [
        {"reward": [0.1, 0.3]},
        {"reward": [0.1, 0]},
        {"reward": [0.1, 0], "ended": [YES, YES]},
    ]
    episodes = played("seat_game:Script", 2, 2, script=[*steps, {}])
    assert episodes[0].episode_return != episodes[1].episode_return
    assert [episode.outcome for episode in episodes] == [0, 0]


def test_the_outcome_that_the_environment_says_is_taken() -> None:
    script = [{"ended": [YES, YES], "reward": [5, -5], "outcome": [-0.5, 0.5]}, {}]
    assert played("seat_game:Script", 2, 2, script=script) == [
        Episode(5, 1, seat=0, outcome=-0.5),
        Episode(-5, 1, seat=1, outcome=0.5),
    ]


@pytest.mark.parametrize(
    ("script", "sides", "max_steps"),
    [
        ([{"ended": [YES, YES], "reward": [5, 1]}, {}], [0, 0], 9),
        ([{}, {"ended": [YES, YES], "reward": [5, 1]}, {}], None, 1),
        (
            [
                {"playing": [NO, YES], "ended": [YES, NO], "reward": [5, 0]},
                {"playing": [NO, NO], "ended": [NO, YES]},
                {"playing": [YES, YES]},
            ],
            None,
            9,
        ),
    ],
    ids=["one side", "cut", "seats that end apart"],
)
def test_an_outcome_that_cannot_be_known_is_none(script: Any, sides: Any, max_steps: int) -> None:
    episodes = played("seat_game:Script", 2, 2, max_steps, script=script, sides=sides)
    assert [episode.outcome for episode in episodes] == [None, None]


def test_an_interval_counts_a_game_once_whose_seats_are_paid_alike() -> None:
    script = [{"ended": [YES, YES], "reward": [5, 7]}, {}, {"ended": [YES, YES]}, {}]
    episodes = played("seat_game:Script", 4, 7, script=script, sides=[0, 0])
    # Two rows play a second episode, and of the last game the first seat alone.
    assert [(episode.game, episode.episode_return) for episode in episodes] == [
        *[(0, 5), (0, 0), (0, 7), (0, 0), (1, 5), (1, 0), (1, 7)]
    ]
    assert returns_of(episodes) == [6, 0, 6, 0]
    alone = [Episode(1.0, 3), Episode(2.0, 3, number=1), Episode(1.0, 4, game=1)]
    assert returns_of(alone) == [1, 2, 1]


def test_figures_of_a_seat_are_those_of_its_episodes() -> None:
    figures = by_seat(
        [
            Episode(1.0, 3, seat=0, outcome=1.0),
            Episode(-1.0, 3, seat=1, outcome=-1.0),
            Episode(0.0, 3, seat=0, outcome=0.0, number=1),
            Episode(2.0, 3, seat=1, outcome=1.0, number=1),
            Episode(5.0, 3, seat=1, outcome=1.0, number=2),
        ]
    )
    assert [each["episodes"] for each in figures] == [2, 3]
    assert [each["return"]["mean"] for each in figures] == [0.5, 2.0]
    assert [each["won"] for each in figures] == pytest.approx([1 / 2, 2 / 3])
    assert [each["drawn"] for each in figures] == pytest.approx([1 / 2, 0])
    assert [each["lost"] for each in figures] == pytest.approx([0, 1 / 3])
    assert [each["win_rate"]["mean"] for each in figures] == pytest.approx([3 / 4, 2 / 3])
    assert by_seat([Episode(1.0, 3)])[0]["won"] is None


@pytest.mark.parametrize(("rivals", "best"), [(False, "best"), (True, "last")])
def test_a_mean_over_several_sides_makes_no_checkpoint_the_best(
    tmp_path: Path, rivals: bool, best: str
) -> None:
    options = [f"env.kwargs.rivals={str(rivals).lower()}", "learner.device=cpu"]
    cfg = resolve("penstock/SyntheticGames-v0", ["algo.name=impala", *options])
    trainer = Trainer(cfg, probe(cfg.env))
    checkpoints = CheckpointManager(tmp_path, trainer)
    shape = (1, 100)
    arrays = {
        "alive": np.ones(shape, bool),
        "policy_version": np.zeros(shape, np.uint32),
        "terminated": np.ones(shape, bool),
        "truncated": np.zeros(shape, bool),
        "episode_return": np.full(shape, 3.0, np.float32),
        "episode_length": np.full(shape, 7, np.int32),
    }
    progress = trainer.progress
    progress.count_unrolls(UnrollSummary.of(arrays), 100)
    progress.commit(progress.growth(), progress.growth())
    checkpoints.save()
    assert checkpoint_folder(tmp_path, "best").name == best

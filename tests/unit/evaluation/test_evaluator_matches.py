"""The evaluator in a game of several sides: matches rank the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algos.samples import network_shape
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.evaluation.evaluator import Evaluator
from penstock.learner.checkpoints import checkpoint_format, exported
from penstock.learner.checkpoints.checkpoint_format import Checkpoint
from penstock.learner.checkpoints.checkpoint_history import ENV, REQUEST
from penstock.learner.checkpoints.checkpoint_spaces import SPACES, spaces_as_json
from penstock.learner.evaluation_requests import CLOSING, FIRST
from penstock.learner.pool import PolicyPool
from transport_world import context, reports

RPS = "penstock/RockPaperScissors-v0"
ROCK, PAPER, SCISSORS = range(3)
OPTIONS = ("algo.name=ppo", "model.hidden=[8]", "actors.inference=numpy", "eval.episodes=6")


class Run:
    """The evaluator of a run, whose checkpoints always take one action."""

    def __init__(self, folder: Path, *options: str, env_id: str = RPS) -> None:
        folder.mkdir(exist_ok=True)
        self.config = resolve(env_id, [*OPTIONS, *options])
        self.info = probe(self.config.env)
        self.layout = network_shape(self.config, self.info).layout
        self.folder = folder
        self.ctx = context(folder, "evaluator", config=self.config)
        self.evaluator = Evaluator(self.ctx, self.config)

    def weights(self, action: int) -> Any:
        weights = np.zeros(self.layout.size, np.float32)
        self.layout.views(weights)["policy.bias"][action] = 50.0
        return weights

    def checkpoint(self, action: int, steps: int = 1, **meta: Any) -> Checkpoint:
        progress = {"time_s": 60.0, "lengths": [11], "returns": [0.0] * 20, "generation": 0}
        progress |= {"trained_steps": steps, "learner_steps": steps}
        own = {SPACES: spaces_as_json(self.info), ENV: self.config.env.identity()}
        return Checkpoint(
            self.layout, self.weights(action), meta=own | {"progress": progress} | meta
        )

    def save(self, action: int, steps: int = 1, **meta: Any) -> None:
        last = self.folder / "checkpoints" / "last"
        checkpoint_format.save(last, self.checkpoint(action, steps, **meta))

    def evaluate(self, action: int, steps: int = 1, request: str | None = None) -> None:
        self.save(action, steps, **({} if request is None else {REQUEST: request}))
        self.evaluator.evaluate_next()
        self.evaluator.release_checkpoint()

    def results(self) -> list[dict[str, Any]]:
        return reports(self.ctx, "evaluation")

    def best_action(self) -> int:
        stored = checkpoint_format.load(self.folder / "checkpoints" / "best")
        return int(self.layout.views(stored.weights)["policy.bias"].argmax())


def export(folder: Path, action: int) -> str:
    run = Run(folder)
    path = folder / "opponent.safetensors"
    exported.write(path, run.config, run.info.spaces, run.info, run.weights(action))
    return str(path)


def test_matches_against_all_opponents_alike_find_the_best(tmp_path: Path) -> None:
    rock = export(tmp_path, ROCK)
    run = Run(tmp_path, f"eval.against=[{rock}, bot:random]")
    for steps, action in enumerate((SCISSORS, PAPER, ROCK), 1):
        run.evaluate(action, steps)

    lost, won, drawn = run.results()
    assert [lost["best"], won["best"], drawn["best"]] == [True, True, False]
    assert run.best_action() == PAPER
    for result, rate in ((lost, 0.0), (won, 1.0), (drawn, 0.5)):
        by_rock, by_chance = result["against"]
        assert (by_rock["opponent"], by_rock["win_rate"]["mean"]) == (rock, rate)
        assert by_chance["opponent"] == "bot:random"
        assert by_rock["episodes"] == by_chance["episodes"] == 3
        assert result["win_rate"] == (rate + by_chance["win_rate"]["mean"]) / 2
        means = [by_rock["return"]["mean"], by_chance["return"]["mean"]]
        assert result["return"]["mean"] == pytest.approx(sum(means) / 2)


def test_newer_weights_that_win_as_often_are_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path, f"eval.against=[{export(tmp_path, ROCK)}]")
    for steps, action in enumerate((PAPER, PAPER, ROCK), 1):
        run.evaluate(action, steps)
    assert [result["best"] for result in run.results()] == [True, True, False]
    best = checkpoint_format.read_meta(tmp_path / "checkpoints" / "best")
    assert best["progress"]["trained_steps"] == 2


def test_a_best_that_met_other_opponents_is_evaluated_again(
    tmp_path: Path, notes: list[str]
) -> None:
    Run(tmp_path, f"eval.against=[{export(tmp_path, ROCK)}]").evaluate(PAPER)
    export(tmp_path, SCISSORS)  # the same name, with other weights
    run = Run(tmp_path, f"eval.against=[{tmp_path / 'opponent.safetensors'}]")
    run.evaluate(ROCK)
    assert "was evaluated first: mean return -10" in notes[-1]
    assert run.best_action() == ROCK


def test_the_cost_of_an_evaluation_includes_the_opponents(tmp_path: Path) -> None:
    costs = []
    for bot in ("random", "minimax4"):
        options = (f"eval.against=[bot:{bot}]", "eval.every_steps=1000")
        run = Run(tmp_path / bot, *options, env_id="penstock/ConnectFour-v0")
        run.evaluate(0, request=FIRST)
        assert run.results()[0]["against"][0]["episodes"] >= 2
        run.save(0)
        run.evaluator._take_checkpoint()
        costs.append(run.evaluator._estimated_cost(run.evaluator.envs(), [20]))
    random, minimax = costs
    # Minimax examines 400 positions for a turn; the ratio is 2.2 to 2.8, and 1 without opponents.
    assert minimax.cpu_s > 1.4 * random.cpu_s


@pytest.mark.parametrize("request_", [None, CLOSING])
def test_without_the_policy_before_training_nothing_is_evaluated_and_one_note_says_so(
    tmp_path: Path, notes: list[str], request_: str | None
) -> None:
    run = Run(tmp_path, "stop.return=5")
    for _ in range(2):
        run.evaluate(PAPER, request=request_)
    assert run.results() == []
    assert len([note for note in notes if "checkpoints are not evaluated" in note]) == 1
    verdicts = reports(run.ctx, "verdict")
    assert [verdict["solved"] for verdict in verdicts] == [False] * 2 * (request_ == CLOSING)

    pool = PolicyPool(tmp_path / "pool")
    pool.add("main", run.checkpoint(ROCK), steps=0, time_s=0.0, initial=True)
    run.evaluate(PAPER)
    assert run.results()[-1]["against"][0]["won"] == 1


def test_a_return_against_opponents_is_confirmed_by_further_matches(
    tmp_path: Path, notes: list[str]
) -> None:
    rock = export(tmp_path, ROCK)
    run = Run(tmp_path, f"eval.against=[{rock}]", "stop.return=9", "stop.confirm_episodes=30")
    run.evaluate(SCISSORS, 1, CLOSING)
    run.evaluate(PAPER, 2, CLOSING)
    assert [result["closing"]["solved"] for result in run.results()] == [False, True]
    assert run.results()[1]["closing"]["estimate"]["episodes"] == 30
    assert "stop.return 9 is confirmed by evaluation: greedy, 10 ± 0" in notes[-1]
    verdicts = reports(run.ctx, "verdict")
    assert [verdict["solved"] for verdict in verdicts] == [False, True]


@pytest.mark.parametrize(
    ("against", "words"),
    [
        ("nobody", "there is no opponent nobody"),
        ("bot:paper", "choose from bot:random"),
    ],
)
def test_an_opponent_that_there_is_not_is_refused_before_the_first_evaluation(
    tmp_path: Path, against: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        Run(tmp_path, f"eval.against=[{against}]").evaluator.check_opponents()
    Run(tmp_path, "eval.against=[initial, bot:random]").evaluator.check_opponents()

"""What the evaluator does with checkpoints and with what was evaluated before."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.evaluation import evaluator
from penstock.evaluation.evaluator import Evaluator
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint
from penstock.profiling.status import Phase
from transport_world import context, reports

GRADED = """
import gymnasium
import numpy as np


class Graded(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, pay=1.0):
        self.pay = pay

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(2, np.float32), self.pay * float(action), self.left == 0, False, {}
"""
OPTIONS = ("eval.every_s=1", "eval.episodes=2", "actors.inference=numpy")


class Run:
    """The checkpoints of a game whose action number n pays n in each of three steps."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.config = resolve("graded:Graded", [*OPTIONS, *options])
        self.layout = network_shape(self.config, probe(self.config.env)).layout
        self.folder = folder / "checkpoints"
        self.best = self.folder / "best"
        self.ctx = context(folder, "evaluator", config=self.config)
        self.evaluator = Evaluator(self.ctx, self.config)

    def save(self, name: str, action: int, **meta: Any) -> None:
        """Weights that always take ``action``, as a learner saves them after as many steps."""
        weights = np.zeros(self.layout.size, np.float32)
        self.layout.views(weights)["policy.bias"][action] = 1.0
        progress = {"time_s": 1.5, "trained_steps": action, "learner_steps": action}
        arrays = {"optimizer/steps": np.array(float(action))}
        state = Checkpoint(self.layout, weights, arrays, {"progress": progress, **meta})
        checkpoint_format.save(self.folder / name, state)

    def evaluate(self, action: int) -> dict[str, Any]:
        """Of weights that were saved last."""
        self.save("last", action)
        found = self.evaluator.evaluate()
        self.evaluator.let_go()
        return found

    def best_action(self) -> float:
        stored = checkpoint_format.load(self.best)
        assert stored.meta["progress"]["learner_steps"] == stored.arrays["optimizer/steps"]
        return float(stored.arrays["optimizer/steps"])


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graded.py").write_text(GRADED)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("game")
def test_the_best_is_kept_with_its_mean_over_a_restart(tmp_path: Path, notes: list[str]) -> None:
    run = Run(tmp_path)
    found = [run.evaluate(action) for action in (1, 2, 1)]
    assert [line["return"]["mean"] for line in found] == [3.0, 6.0, 3.0]
    assert [line["best"] for line in found] == [True, True, False]
    assert [line["best_return_mean"] for line in found] == [3.0, 6.0, 6.0]
    assert found[0]["env"]["id"] == "graded:Graded"
    again = Run(tmp_path)  # without a line of evaluations.jsonl
    line = again.evaluate(1)
    assert (line["best"], line["best_return_mean"], again.best_action()) == (False, 6.0, 2)
    assert notes == []  # it is known, and not evaluated again
    assert again.evaluate(3)["best"]
    assert again.best_action() == 3


@pytest.mark.usefixtures("game")
@pytest.mark.parametrize(
    "options", [(), ("eval.episodes=3",), ("run.seed=7",), ("eval.max_episode_steps=4",)]
)
def test_a_best_of_unknown_or_other_games_is_evaluated_first(
    tmp_path: Path, options: tuple[str, ...], notes: list[str]
) -> None:
    before = Run(tmp_path)
    if options:
        before.evaluate(2)
    else:
        before.save("best", 2, best_return=0.25)  # by a learner, without evaluation
    run = Run(tmp_path, *options)
    line = run.evaluate(1)
    assert (line["best"], line["best_return_mean"], run.best_action()) == (False, 6.0, 2)
    [note] = notes
    assert note == f"{run.best} was evaluated first: mean return 6"
    again = Run(tmp_path, *options)
    assert again.evaluate(1)["best_return_mean"] == 6.0
    assert notes == [note]


@pytest.mark.usefixtures("game")
def test_a_game_that_goes_on_is_cut_and_that_is_told_once(tmp_path: Path, notes: list[str]) -> None:
    run = Run(tmp_path, "eval.max_episode_steps=2")
    found = [run.evaluate(action) for action in (1, 2)]
    assert [line["return"]["mean"] for line in found] == [2.0, 4.0]
    assert [(line["length"]["max"], line["cut"]) for line in found] == [(2, 2)] * 2
    [note] = notes
    assert note == (
        "in an evaluation 2 of 2 episodes had to be cut at 2 steps, with the return so far; give "
        "the game a time limit (gymnasium's TimeLimit), or raise eval.max_episode_steps"
    )


@pytest.mark.usefixtures("game")
def test_the_best_of_another_game_is_kept_and_not_to_be_beaten(
    tmp_path: Path, notes: list[str]
) -> None:
    Run(tmp_path).evaluate(3)
    run = Run(tmp_path, "env.kwargs={pay: 0.5}")
    line = run.evaluate(1)
    assert (line["best"], line["best_return_mean"]) == (True, 1.5)
    kept = checkpoint_format.load(run.folder / "best-before-1").meta
    assert (kept["evaluation"]["mean"], kept["evaluation"]["env"]["kwargs"]) == (9.0, {})
    assert run.best_action() == 1
    [note] = notes
    assert note.endswith(f"it is kept as {run.folder / 'best-before-1'}")


@pytest.mark.usefixtures("game")
def test_a_full_disk_leaves_the_best_whole_and_the_next_better_one_becomes_it(
    tmp_path: Path, notes: list[str]
) -> None:
    run = Run(tmp_path)
    run.evaluate(1)
    in_the_way = run.best / f".{FILE}.tmp"
    in_the_way.mkdir()
    line = run.evaluate(3)
    assert (line["best"], line["best_return_mean"], run.best_action()) == (False, 3.0, 1)
    assert "stays as it was" in notes[0]
    in_the_way.rmdir()
    assert run.evaluate(2)["best"]
    assert run.best_action() == 2


def test_a_run_that_ends_during_an_evaluation_leaves_nothing_of_it(tmp_path: Path) -> None:
    config = resolve("cartpole", ["eval.every_s=0.01", "eval.episodes=1000000"])
    ctx = context(tmp_path, "evaluator", config=config)
    layout = network_shape(config, probe(config.env)).layout
    role = threading.Thread(target=evaluator.run, args=(ctx,), daemon=True)

    def wait_for(phase: Phase) -> None:
        until_s = time.monotonic() + 20
        while ctx.status.phase != phase:
            assert time.monotonic() < until_s, Phase(ctx.status.phase)
            time.sleep(0.01)

    role.start()
    try:
        wait_for(Phase.WAITING)
        state = Checkpoint(layout, np.zeros(layout.size, np.float32))
        checkpoint_format.save(tmp_path / "checkpoints" / "last", state)
        wait_for(Phase.ENVIRONMENT)
    finally:
        ctx.stop()
        role.join()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last"]
    assert reports(ctx, "evaluation") == []


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_is_held_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat(tmp_path / "no such file"))
    last, held = tmp_path / "last", tmp_path / "held"
    last.mkdir()
    for text in ("old", "new"):
        (last / "new").write_text(text)
        (last / "new").replace(last / "file")
        evaluator._hold(last, held, "file")
    (last / "new").write_text("newer")
    (last / "new").replace(last / "file")
    assert (held / "file").read_text() == "new"


@pytest.mark.usefixtures("game")
def test_a_damaged_checkpoint_is_passed_over_and_the_next_is_evaluated(
    tmp_path: Path, notes: list[str]
) -> None:
    """As after a resume: the learner goes on from an older one, and saves again."""
    run = Run(tmp_path, "eval.every_s=0.05")
    run.save("last", 1)
    (run.folder / "last" / FILE).write_bytes(b"cut")
    thread = threading.Thread(target=evaluator.run, args=(run.ctx,), daemon=True)
    thread.start()
    try:
        await_note(notes)
        run.save("last", 2)
        [evaluation] = await_reports(run, "evaluation")
    finally:
        run.ctx.stop()
        thread.join()
    assert "is damaged" in notes[0]
    assert evaluation["return"]["mean"] == 6.0


def await_note(notes: list[str], timeout_s: float = 10.0) -> None:
    ends_s = time.monotonic() + timeout_s
    while not notes:
        assert time.monotonic() < ends_s
        time.sleep(0.01)


def await_reports(run: Run, kind: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    ends_s = time.monotonic() + timeout_s
    while not (found := reports(run.ctx, kind)):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    return found

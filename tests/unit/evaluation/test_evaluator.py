"""How the evaluator handles checkpoints and earlier evaluations."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.algos.samples import network_shape
from penstock.configs.load import resolve
from penstock.envs import BatchedEnv, probe
from penstock.evaluation import evaluator
from penstock.evaluation.evaluator import TEMPORARY, Evaluator
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint
from penstock.learner.checkpoints.checkpoint_history import best_locked
from penstock.profiling.status import Phase
from transport_world import Heard, context, reports
from waiting import wait_until

GRADED = """
import gymnasium
import numpy as np


class Graded(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def __init__(self, pay=1.0, varied=False):
        self.pay, self.varied = pay, varied

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.before = 3, None
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        paid = float(action != self.before) if self.varied else self.pay * float(action)
        self.before = action
        return np.zeros(2, np.float32), paid, self.left == 0, False, {}
"""
OPTIONS = ("eval.every_s=1", "eval.episodes=2", "actors.inference=numpy")


class Run:
    """The checkpoints of a game whose action number n pays n in each of three steps; if it is
    ``varied``, an action pays 1 unless it is the one before again."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.config = resolve("graded:Graded", [*OPTIONS, *options])
        self.layout = network_shape(self.config, probe(self.config.env)).layout
        self.folder = folder / "checkpoints"
        self.best = self.folder / "best"
        self.ctx = context(folder, "evaluator", config=self.config)
        self.generation = 0
        self.evaluator = Evaluator(self.ctx, self.config)

    def save(self, name: str, action: int, **meta: Any) -> None:
        """Weights that always take ``action``, as a learner saves them after as many steps."""
        weights = np.zeros(self.layout.size, np.float32)
        self.layout.views(weights)["policy.bias"][action] = 50.0  # sampled as surely as greedy
        progress: dict[str, Any] = {"time_s": 1.5, "lengths": [3, 3]}
        progress |= {"trained_steps": action, "learner_steps": action}
        progress["generation"] = self.generation
        arrays = {"optimizer/steps": np.array(float(action))}
        state = Checkpoint(self.layout, weights, arrays, {"progress": progress, **meta})
        checkpoint_format.save(self.folder / name, state)

    def evaluate(self, action: int) -> dict[str, Any]:
        """Of weights that were saved last."""
        self.save("last", action)
        return self.work()

    def work(self) -> dict[str, Any]:
        self.evaluator.evaluate_next()
        self.evaluator.release_checkpoint()
        return reports(self.ctx, "evaluation")[-1]

    def best_action(self) -> float:
        stored = checkpoint_format.load(self.best)
        assert stored.meta["progress"]["learner_steps"] == stored.arrays["optimizer/steps"]
        return float(stored.arrays["optimizer/steps"])


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graded.py").write_text(GRADED)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("game")
def test_evaluator_waits_for_a_learner_that_writes_the_best(tmp_path: Path) -> None:
    """Its checkpoint would otherwise replace the evaluated one."""
    run = Run(tmp_path)
    run.save("last", 2)
    work = threading.Thread(target=run.work)
    with best_locked(run.best, wait=False) as locked:
        assert locked
        work.start()
        work.join(1.0)
        run.save("best", 1)
    work.join()
    assert run.best_action() == 2


@pytest.mark.usefixtures("game")
def test_best_and_its_mean_survive_a_restart(tmp_path: Path, notes: list[str]) -> None:
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
def test_best_from_an_unknown_or_other_environment_is_evaluated_first(
    tmp_path: Path, options: tuple[str, ...], notes: list[str]
) -> None:
    before = Run(tmp_path)
    if options:
        before.evaluate(2)
    else:
        before.save("best", 2, best_return=0.25)  # by a learner, without evaluation
    run = Run(tmp_path, *options)
    run.generation = 1  # it was resumed
    line = run.evaluate(1)
    assert (line["best"], line["best_return_mean"], run.best_action()) == (False, 6.0, 2)
    [note] = notes
    assert note == f"{run.best} was evaluated first: mean return 6"
    again = Run(tmp_path, *options)
    assert again.evaluate(1)["best_return_mean"] == 6.0
    assert notes == [note]


@pytest.mark.usefixtures("game")
def test_best_replaced_during_its_evaluation_does_not_get_the_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    Run(tmp_path).save("best", 2)  # by a run without evaluations
    run = Run(tmp_path)
    run.generation = 1  # it was resumed
    play = run.evaluator._play_both

    def play_meanwhile(folder: Path, episodes: int) -> Any:
        if folder == run.best:
            run.save("best", 3)
        return play(folder, episodes)

    monkeypatch.setattr(run.evaluator, "_play_both", play_meanwhile)
    line = run.evaluate(1)
    assert notes == []
    assert (line["best"], line["best_return_mean"], run.best_action()) == (True, 3.0, 1)


@pytest.mark.usefixtures("game")
def test_endless_episode_is_cut_with_one_note(tmp_path: Path, notes: list[str]) -> None:
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
def test_best_of_another_environment_is_set_aside_and_replaced(
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
def test_failed_write_keeps_the_old_best_and_a_later_better_one_replaces_it(
    tmp_path: Path, notes: list[str]
) -> None:
    run = Run(tmp_path)
    run.evaluate(1)
    in_the_way = run.best / TEMPORARY
    in_the_way.mkdir()
    line = run.evaluate(3)
    assert (line["best"], line["best_return_mean"], run.best_action()) == (False, 3.0, 1)
    assert "stays as it was" in notes[0]
    in_the_way.rmdir()
    assert run.evaluate(2)["best"]
    assert run.best_action() == 2


@pytest.mark.usefixtures("game")
def test_best_saved_by_the_learner_meanwhile_is_not_mixed_with_the_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, fsync = Run(tmp_path), os.fsync

    def meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        monkeypatch.setattr(os, "fsync", fsync)
        run.save("best", 1)

    run.save("last", 2)
    monkeypatch.setattr(os, "fsync", meanwhile)
    assert run.work()["best"]
    assert run.best_action() == 2


def test_run_ending_during_an_evaluation_leaves_no_part_of_it(tmp_path: Path) -> None:
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
        progress = {"time_s": 1.0, "trained_steps": 640, "learner_steps": 10, "lengths": [9]}
        state = Checkpoint(layout, np.zeros(layout.size, np.float32), {}, {"progress": progress})
        checkpoint_format.save(tmp_path / "checkpoints" / "last", state)
        wait_for(Phase.ENVIRONMENT)
    finally:
        ctx.stop()
        role.join()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last"]
    assert reports(ctx, "evaluation") == []


@pytest.mark.parametrize("links", [True, False])
def test_held_checkpoint_survives_its_replacement(
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
def test_damaged_checkpoint_is_skipped_and_the_next_is_evaluated(
    tmp_path: Path, notes: list[str]
) -> None:
    """As after a resume: the learner goes on from an older one, and saves again."""
    run = Run(tmp_path, "eval.every_s=0.05")
    run.save("last", 1)
    (run.folder / "last" / FILE).write_bytes(b"cut")
    thread = threading.Thread(target=evaluator.run, args=(run.ctx,), daemon=True)
    thread.start()
    try:
        wait_until(lambda: notes)
        run.save("last", 2)
        [evaluation] = await_reports(run, "evaluation")
    finally:
        run.ctx.stop()
        thread.join()
    assert "is damaged" in notes[0]
    assert evaluation["return"]["mean"] == 6.0


def await_reports(run: Run, kind: str) -> list[dict[str, Any]]:
    wait_until(lambda: reports(run.ctx, kind))
    return reports(run.ctx, kind)


VARIED = ("env.kwargs={varied: true}", "eval.episodes=20", "stop.confirm_episodes=100")


def undecided(run: Run, request: str | None, returns: Sequence[float] = ()) -> None:
    """Save weights with which every action is as probable: greedy takes the first always, which
    pays 1 in an episode, sampled ones pay 2.5 on average. Training had these ``returns``."""
    weights = np.zeros(run.layout.size, np.float32)
    progress: dict[str, Any] = {"time_s": 1.0, "trained_steps": 640, "learner_steps": 10}
    progress |= {"lengths": [3], "returns": [*returns]}
    meta = {"progress": progress, "evaluate": request}
    checkpoint_format.save(run.folder / ".requested", Checkpoint(run.layout, weights, {}, meta))


@pytest.mark.usefixtures("game")
def test_better_way_to_play_is_stored_with_the_best(tmp_path: Path) -> None:
    run = Run(tmp_path, *VARIED)
    undecided(run, "point")
    line = run.work()
    assert line["play"] == "sampled"
    assert line["greedy"] == {"mean": 1.0, "se": 0.0, "episodes": 20, "lower": 1.0}
    assert 2.0 < line["sampled"]["mean"] < 3.0
    assert line["return"]["mean"] == line["best_return_mean"] == line["sampled"]["mean"]
    meta = checkpoint_format.load(run.best).meta
    assert meta["play"]["way"] == "sampled"
    assert meta["play"]["trained_steps"] == 640
    assert "evaluate" not in meta
    assert run.evaluator.state()["play"] == meta["play"]
    assert [path.name for path in run.folder.iterdir()] == ["best"]


@pytest.mark.usefixtures("game")
@pytest.mark.parametrize(
    ("goal", "solved", "episodes", "note"),
    [
        (1.5, True, 100, "stop.return 1.5 is confirmed by evaluation: sampled, 2."),
        (2.45, False, 100, "but evaluation does not confirm it: sampled, 2."),
        (2.45, False, 100, "must reach 2.45, over 100 episodes at"),
        (3.5, False, None, "but not in evaluation (greedy 1 ± 0, sampled 2."),
    ],
)
def test_closing_evaluation_plays_new_episodes_in_the_better_way(
    tmp_path: Path,
    notes: list[str],
    goal: float,
    solved: bool,
    episodes: int | None,
    note: str,
) -> None:
    run = Run(tmp_path, *VARIED, f"stop.return={goal}")
    undecided(run, "closing")
    line = run.work()
    assert line["closing"]["solved"] is solved
    found = line["closing"]["estimate"]
    assert (found and found["episodes"]) == episodes
    if found:
        assert (found["mean"], found["se"]) != (line["sampled"]["mean"], line["sampled"]["se"])
    [text] = notes
    assert note in text
    assert text.endswith("training continues") is not solved


@pytest.mark.usefixtures("game")
def test_learner_receives_the_verdict_on_its_requested_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, *VARIED, "stop.return=1.5")
    thread = threading.Thread(target=evaluator.run, args=(run.ctx,), daemon=True)
    thread.start()
    try:
        await_reports(run, "evaluator")
        undecided(run, "closing")
        [verdict] = await_reports(run, "verdict")
        wait_until(lambda: reports(run.ctx, "evaluator")[-1]["done"])
        idle = reports(run.ctx, "evaluator")[-1]
    finally:
        run.ctx.stop()
        thread.join()
    assert (verdict["trained_steps"], verdict["solved"]) == (640, True)
    assert idle["done"] == 640
    assert idle["play"]["way"] == "sampled"


@pytest.mark.usefixtures("game")
@pytest.mark.parametrize(("se", "replaced"), [(1.0, True), (0.1, False)])
def test_confirmed_weights_replace_a_best_that_may_not_reach_the_goal(
    tmp_path: Path, se: float, replaced: bool
) -> None:
    """The best has the mean 2.9, so its lower end is 0.94 or 2.704; the goal is 1.5."""
    run = Run(tmp_path, *VARIED, "stop.return=1.5")
    run.save(".requested", 3, evaluate="point")
    run.work()
    stored = checkpoint_format.load(run.best)
    known = stored.meta["evaluation"] | {"mean": 2.9, "se": se, "lower": 2.9 - 1.96 * se}
    meta = {**stored.meta, "evaluation": known}
    checkpoint_format.save(run.best, dataclasses.replace(stored, meta=meta))
    run = Run(tmp_path, *VARIED, "stop.return=1.5")
    undecided(run, "closing")
    line = run.work()
    assert line["closing"]["solved"]
    assert line["sampled"]["lower"] < line["sampled"]["mean"] < 2.9
    assert line["best"] is replaced
    assert ("closing" in checkpoint_format.load(run.best).meta["play"]) is replaced


@pytest.mark.usefixtures("game")
@pytest.mark.parametrize(("confirms", "episodes"), [(False, 20), (True, 120)])
def test_best_is_chosen_by_all_its_episodes_and_records_their_number(
    tmp_path: Path, confirms: bool, episodes: int
) -> None:
    run = Run(tmp_path, *VARIED, "stop.return=1.5")
    undecided(run, "closing" if confirms else "point", returns=[0.0, 3.0] * 50)
    line = run.work()
    meta = checkpoint_format.load(run.best).meta
    chosen = meta["evaluation"]
    assert (chosen["episodes"], chosen["played"], meta["play"]["episodes"]) == (20, *[episodes] * 2)
    assert chosen["mean"] == meta["play"]["sampled"]["mean"] == line["best_return_mean"]
    assert chosen["lower"] < chosen["mean"] - 1.96 * chosen["se"]  # as training varies more
    assert (chosen["mean"] == line["sampled"]["mean"]) is not confirms


SLOW = ("eval.every_s=null", "eval.every_steps=2", "eval.episodes=20", "eval.share=1e-9")


@pytest.mark.usefixtures("game")
def test_too_expensive_evaluation_is_skipped_with_one_note(
    tmp_path: Path, notes: list[str]
) -> None:
    """At 2 steps in 1.5 s, two pairs of episodes of 3 steps cost more than a billionth of a core in
    four minutes."""
    run = Run(tmp_path, *SLOW)
    run.save(".requested", 2, evaluate="point")
    run.evaluator.evaluate_next()
    assert reports(run.ctx, "evaluation") == []
    state = run.evaluator.state()
    assert state["done"] == 2
    assert state["every"] > 2
    assert state["every"].bit_count() == 1  # doubled so many times
    [note] = notes
    assert "evaluations have fewer episodes than eval.episodes = 20, so that there is one" in note


@pytest.mark.usefixtures("game")
def test_the_first_evaluation_is_made_with_few_episodes_however_expensive(tmp_path: Path) -> None:
    run = Run(tmp_path, *SLOW)
    run.save(".requested", 1, evaluate="first")
    line = run.work()
    assert (line["episodes"], line["greedy"]["episodes"], line["sampled"]["episodes"]) == (2, 2, 2)
    assert run.evaluator.envs().count == 2
    run.save(".requested", 3, evaluate="point")  # at the same second of training
    run.evaluator.evaluate_next()
    assert len(reports(run.ctx, "evaluation")) == 1
    run.save("last", 2)
    assert run.evaluator.prepare_last_evaluation()
    run.evaluator.evaluate_next(last=True)
    assert reports(run.ctx, "evaluation")[-1]["episodes"] == 20  # the last one is complete


@pytest.mark.usefixtures("game")
def test_unlimited_share_evaluates_every_point(tmp_path: Path) -> None:
    options = ("eval.every_s=null", "eval.every_steps=1", "eval.share=null")
    run = Run(tmp_path, *options, "eval.episodes=20")
    for action in (1, 2, 3):
        run.save(".requested", action, evaluate="point")
        assert run.work()["trained_steps"] == action
    assert run.evaluator.state()["every"] == 1


@pytest.mark.usefixtures("game")
def test_killed_evaluator_repeats_its_evaluation_but_a_new_run_does_not(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(".requested", 1, evaluate="point")
    assert run.evaluator.has_request()
    run.evaluator.evaluate_next()  # and is killed, before it lets the checkpoint go
    assert not run.evaluator.has_request()
    ctx = context(tmp_path, "evaluator", incarnation=1, config=run.config)
    again = Evaluator(ctx, run.config)
    assert again.has_request()
    again.evaluate_next()
    assert len(reports(ctx, "evaluation")) == 1
    run.save(".requested", 2, evaluate="point")
    assert not Run(tmp_path).evaluator.has_request()  # a run that is resumed in this folder


BY_STEPS = ("eval.every_s=null", "eval.every_steps=2", "eval.share=null")


@pytest.mark.usefixtures("game")
def test_last_weights_replace_a_pending_request(tmp_path: Path, notes: list[str]) -> None:
    run = Run(tmp_path, *BY_STEPS)
    run.save(".requested", 2, evaluate="point")
    run.save("last", 3)
    assert run.evaluator.prepare_last_evaluation()
    assert (run.work()["trained_steps"], run.best_action()) == (3, 3)
    assert not run.evaluator.has_request()
    assert notes == ["the last weights are evaluated; Ctrl-C ends the run without that"]
    assert not run.evaluator.prepare_last_evaluation()  # a second time


@pytest.mark.usefixtures("game")
@pytest.mark.parametrize("saved", [(), (1,)])
def test_run_shorter_than_the_evaluation_interval_is_not_evaluated(
    tmp_path: Path, saved: tuple[int, ...]
) -> None:
    run = Run(tmp_path, *BY_STEPS)
    for action in saved:
        run.save("last", action)
    assert not run.evaluator.prepare_last_evaluation()


@pytest.mark.usefixtures("game")
def test_last_weights_that_are_damaged_are_not_evaluated(tmp_path: Path, notes: list[str]) -> None:
    run = Run(tmp_path, *BY_STEPS)
    run.save("last", 3)
    (run.folder / "last" / FILE).write_bytes(b"cut")
    assert not run.evaluator.prepare_last_evaluation()
    [note] = notes
    assert note.startswith("the last weights are not evaluated: ")


@pytest.mark.usefixtures("game")
def test_evaluator_plays_the_last_weights_of_a_finished_run_and_ends(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path, *BY_STEPS)
    run.save("last", 3)
    assert isinstance(run.ctx.channel, Heard)
    run.ctx.channel.arriving = [{"kind": "finish"}]
    evaluator.run(run.ctx)
    assert [line["trained_steps"] for line in reports(run.ctx, "evaluation")] == [3]
    assert [path.name for path in sorted(run.folder.iterdir())] == ["best", "last"]


@pytest.mark.usefixtures("game")
def test_an_evaluator_closes_its_environments_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, *BY_STEPS)
    run.save("last", 3)
    closed: list[str] = []
    monkeypatch.setattr(BatchedEnv, "close", lambda game: closed.append(game.info.how))
    assert isinstance(run.ctx.channel, Heard)
    run.ctx.channel.arriving = [{"kind": "finish"}]
    evaluator.run(run.ctx)
    assert len(closed) == 1

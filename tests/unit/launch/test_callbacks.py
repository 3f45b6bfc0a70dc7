"""A user's callbacks: their arguments, their errors, and how they end a run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.interfaces import Json, RunEvent
from penstock.core.notes import notes_to
from penstock.launch.callbacks import Callbacks, Evaluated, Hooks, Run, Saved, load_hooks

STATISTICS = {"mean": 3.0, "median": 2.5, "std": 1.0, "min": 1.0, "max": 5.0}
EVALUATION = {
    "time_s": 4.5, "trained_steps": 640, "learner_steps": 10, "episodes": 20, "best": True,
    "return": STATISTICS, "length": {**STATISTICS, "mean": 7.0}, "best_return_mean": 3.0,
    "seconds": 0.2,
}  # fmt: skip
CHECKPOINT = {
    "folder": "run/checkpoints/last", "best": False, "time_s": 4.5, "trained_steps": 640,
    "learner_steps": 10, "return_mean": None,
}  # fmt: skip

heard: list[Any] = []


def evaluation(result: Json = EVALUATION) -> RunEvent:
    return RunEvent("evaluation", "", "evaluator-0", 0, result=result)


class Listens(Callbacks):
    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool:
        heard.append((run, evaluated))
        return evaluated.return_mean > 2.9

    def on_checkpoint(self, run: Run, saved: Saved) -> None:
        heard.append(saved)


class OnlyTheEnd:
    """Needs no base."""

    def on_end(self, run: Run, summary: penstock.Summary) -> None:
        heard.append(summary)


class Counts(Callbacks):
    """Ends the run at 900 steps."""

    every_steps = 300

    def on_steps(self, run: Run, metrics: Json) -> bool:
        heard.append(metrics["env_steps"])
        return bool(metrics["env_steps"] >= 900)


class Fails(Callbacks):
    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool:
        raise ValueError("no disk\nleft")


class Leaves(Callbacks):
    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool:
        sys.exit("enough")


class Says:
    """Answers an evaluation with what it is made with."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def on_evaluation(self, run: Run, evaluated: Evaluated) -> object:
        return self._answer


class CannotBeMade:
    def __init__(self) -> None:
        raise RuntimeError("no token")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes as those of a module named `hooks`."""
    heard.clear()
    made = ModuleType("hooks")
    for kind in (Listens, OnlyTheEnd, Fails, Leaves, CannotBeMade):
        setattr(made, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "hooks", made)


def hooks(folder: Path, *names: str) -> Hooks:
    (folder / "logs").mkdir(exist_ok=True)
    return Hooks(load_hooks([f"hooks:{name}" for name in names]), Run(folder, resolve("cartpole")))


def test_on_evaluation_gets_the_result_and_may_end_the_run(tmp_path: Path) -> None:
    assert hooks(tmp_path, "OnlyTheEnd", "Listens").event(evaluation())
    [(run, evaluated)] = heard
    assert (run.folder, run.config.env.id) == (tmp_path, "CartPole-v1")
    assert evaluated == Evaluated(3.0, 1.0, 1.0, 5.0, 7.0, 20, 640, 10, 4.5, True)
    worse = {**EVALUATION, "return": {**STATISTICS, "mean": 2.0}}
    assert not hooks(tmp_path, "Listens").event(evaluation(worse))


def test_on_checkpoint_and_on_end_get_their_records(tmp_path: Path) -> None:
    both = hooks(tmp_path, "Listens", "OnlyTheEnd")
    assert not both.event(RunEvent("checkpoint", "was written", result=CHECKPOINT))
    accounting = {"produced": 6, "trained": 4, "dropped": {}, "lost": {"learner": 2}}
    result = {"exit_reason": "minutes", "accounting": {**accounting, "in_flight": 0}, "more": 1}
    both.event(RunEvent("end", "ended by minutes", result=result))
    both.close()
    saved, summary = heard
    assert saved == Saved(Path("run/checkpoints/last"), 640, 10, 4.5, None, False)
    assert isinstance(summary, penstock.Summary)
    assert (summary.run_dir, summary.reason) == (tmp_path, "minutes")
    assert summary.accounting.balanced
    assert summary.metrics == result


def test_on_steps_is_called_once_per_multiple_and_may_end_the_run(tmp_path: Path) -> None:
    made = Hooks(load_hooks([], [Counts(), Fails()]), Run(tmp_path, resolve("cartpole")))
    ends = [made.metrics({"env_steps": steps}) for steps in (200, 310, 599, 850, 860, 900, 1000)]
    assert heard == [310, 850, 900]
    assert ends == [False, False, False, False, False, True, False]
    assert not made.metrics({"env_steps": 2000}, final=True)
    assert not made.metrics({"accounting": {}})


def test_invalid_every_of_on_steps_is_refused(tmp_path: Path) -> None:
    counts = Counts()
    counts.every_steps = 0
    sentence = "every_steps of callback Counts is 0; it must be a whole number of at least 1"
    with pytest.raises(UserError, match=f"^{sentence}$"):
        Hooks(load_hooks([], [counts]), Run(tmp_path, resolve("cartpole")))


def test_exception_of_a_callback_is_noted_and_the_run_continues(tmp_path: Path) -> None:
    both = hooks(tmp_path, "Fails", "Listens")
    notes: list[str] = []
    with notes_to(notes.append):
        assert both.event(evaluation())  # the other one still asks for the end
    assert notes == [
        "callback hooks:Fails.on_evaluation failed with ValueError: no disk left; the run continues"
    ]
    log = (tmp_path / "logs" / "callbacks.log").read_text()
    assert "Traceback" in log
    assert "no disk\nleft" in log


def test_system_exit_of_a_callback_does_not_end_the_run(tmp_path: Path) -> None:
    both = hooks(tmp_path, "Leaves", "Listens")
    notes: list[str] = []
    (tmp_path / "logs" / "callbacks.log").symlink_to("/dev/full")  # nor does a full disk
    with notes_to(notes.append):
        assert both.event(evaluation())
    assert notes == [
        "callback hooks:Leaves.on_evaluation failed with SystemExit: enough; the run continues"
    ]


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (True, True),
        (np.bool_(True), True),
        (False, False),
        (np.array([True, True]), False),
        (1.5, False),
        ("yes", False),
    ],
)
def test_only_a_return_value_of_true_ends_the_run(
    tmp_path: Path, answer: object, ends: bool
) -> None:
    made = Hooks(load_hooks([], [Says(answer)]), Run(tmp_path, resolve("cartpole")))
    assert made.event(evaluation()) is ends


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere_at_all:Hooks", "callback nowhere_at_all:Hooks: there is no module"),
        ("hooks:Listen", "the nearest is Listens"),
        (
            "hooks:CannotBeMade",
            r"RuntimeError: no token \(.*, in __init__\); correct run.callbacks",
        ),
    ],
)
def test_callback_that_cannot_be_constructed_is_a_user_error(
    tmp_path: Path, path: str, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        Hooks(load_hooks([path]), Run(tmp_path, resolve("cartpole")))


class Misspelt(Callbacks):
    def on_evaluate(self, run: Run, evaluated: Evaluated) -> None: ...


class OnlyEnd:
    def on_end(self, run: Run, summary: penstock.Summary) -> None: ...


@pytest.mark.parametrize("made", [Misspelt(), object(), print])
def test_callback_without_any_hook_is_refused_with_the_hook_names(made: object) -> None:
    methods = "on_evaluation, on_checkpoint, on_steps, on_end; define at least one of them"
    sentence = f"callback {type(made).__name__} has none of the methods {methods}"
    with pytest.raises(UserError, match=f"^{sentence}$"):
        Hooks(load_hooks([], [made]), Run(Path(), resolve("cartpole")))
    Hooks(load_hooks([], [OnlyEnd()]), Run(Path(), resolve("cartpole")))


def test_callback_class_instead_of_an_object_is_refused() -> None:
    with pytest.raises(UserError, match=r"^callback OnlyEnd is a class; .*: OnlyEnd\(\)$"):
        Hooks(load_hooks([], [OnlyEnd]), Run(Path(), resolve("cartpole")))

"""Callbacks of a run, for code of your own: `run.callbacks=[my_module:MyCallbacks]`.

    from penstock.launch.callbacks import Callbacks, Evaluated, Run

    class MyCallbacks(Callbacks):
        every_steps = 50_000  # for on_steps

        def on_steps(self, run: Run, metrics: Mapping[str, Any]) -> None:
            print(metrics["env_steps"], metrics["episode_return_mean"])

        def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool:
            return evaluated.return_mean >= 20  # True ends the run

One object of the class is made, without arguments, in the supervisor's process, and its methods are
called there. While a method runs, the supervisor watches no process: keep methods short, and start
a thread or a process for longer work. An exception of a method is shown with the method's name and
written to `logs/callbacks.log`; the run continues.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError, whole_number
from penstock.core.files import open_private
from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.core.notes import note_logger

if TYPE_CHECKING:
    from penstock.configs.schema import Config
    from penstock.launch.run_summary import Summary

LOG = "callbacks.log"
logger = note_logger(__name__)


@dataclass(frozen=True)
class Run:
    """The run that calls the callbacks."""

    folder: Path
    config: Config


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: raw returns, in the better way to play."""

    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    length_mean: float
    """In agent steps."""
    episodes: int
    trained_steps: int
    """Agent steps that the weights were trained on."""
    learner_steps: int
    time_s: float
    """Seconds of training behind the weights."""
    best: bool
    """Whether its weights are the best so far, by the lower end of the interval of their mean; they
    are then `checkpoints/best`."""
    play: str = "greedy"
    """The better way to play: `greedy`, with the most probable actions, or `sampled`."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint that was written."""

    folder: Path
    """`checkpoints/last` of the run; the next checkpoint replaces it."""
    trained_steps: int
    learner_steps: int
    time_s: float
    return_mean: float | None
    """Mean raw return of the last 100 episodes in training; None before the first."""
    best: bool
    """Whether it is also `checkpoints/best`."""


class Callbacks:
    """Base of a user's class; every method is optional."""

    every_steps: int = 100_000
    """Agent steps between two calls of `on_steps`."""

    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool | None:
        """Called after an evaluation; True ends the run with `exit_reason` callback."""
        return None

    def on_checkpoint(self, run: Run, saved: Saved) -> None:
        """Called after a checkpoint was written."""

    def on_steps(self, run: Run, metrics: Mapping[str, Any]) -> bool | None:
        """Called with the first ``metrics`` (a line of `metrics.jsonl`, of which there is one per
        `run.interval_s`) that reach a multiple of `every_steps`, by their ``env_steps``. True ends
        the run with `exit_reason` callback.

        Multiples within one interval are one call. A resumed run calls it with its first metrics.
        """
        return None

    def on_end(self, run: Run, summary: Summary) -> None:
        """Called after the run has ended, however it did, when its files are complete."""


class Hook:
    """An object of the user, and how far `on_steps` was called for it."""

    def __init__(self, name: str, callbacks: object) -> None:
        """Check the object.

        Args:
            name: what names it in messages.
            callbacks: the object.

        Raises:
            UserError: it has none of the methods, or its `every_steps` is no number of steps.
        """
        _check_methods(name, callbacks)
        self.name = name
        self.callbacks = callbacks
        self._every_steps = whole_number(
            f"every_steps of callback {name}",
            getattr(callbacks, "every_steps", Callbacks.every_steps),
            1,
        )
        self._multiple = 0
        """The last multiple of `every_steps` for which `on_steps` was due."""

    def reaches_multiple(self, steps: int) -> bool:
        """Note the agent steps of a run; returns whether `on_steps` is due."""
        multiple = steps // self._every_steps
        is_due = multiple > self._multiple
        if is_due:
            self._multiple = multiple
        return is_due


def load_hooks(paths: Sequence[str], objects: Sequence[object] = ()) -> list[Hook]:
    """Make the callback objects of a run, and check them.

    Args:
        paths: ``module:Class`` of each object to make.
        objects: further objects.

    Raises UserError if an object cannot be made, has none of the methods, or an `every_steps` that
    is no number of steps.
    """
    named_objects = [(path, _make(path)) for path in paths]
    named_objects += [(type(each).__name__, each) for each in objects]
    return [Hook(name, each) for name, each in named_objects]


class Hooks(MetricSink):
    """Calls the callbacks of a run."""

    def __init__(self, hooks: Sequence[Hook], run: Run) -> None:
        """``hooks`` are those of `load_hooks`, which are called with ``run``."""
        self.run = run
        self._summary: Json | None = None
        self._hooks = hooks

    def metrics(self, metrics: Json, *, final: bool = False) -> bool:
        """Call `on_steps` where it is due; returns whether any of the callbacks ends the run."""
        steps = metrics.get("env_steps")
        if final or steps is None:
            return False

        due = [hook for hook in self._hooks if hook.reaches_multiple(steps)]
        return _any_true([self._call(hook, "on_steps", metrics) for hook in due])

    def event(self, event: RunEvent) -> bool:
        """Pass a result to the callbacks; returns whether any of them ends the run."""
        result = event.result
        if result is not None and event.kind == "checkpoint":
            saved = Saved(**{**result, "folder": Path(result["folder"])})
            self._call_all("on_checkpoint", saved)
        elif result is not None and event.kind == "evaluation":
            return _any_true(self._call_all("on_evaluation", _evaluated(result)))
        elif event.kind == "end":
            self._summary = result
        return False

    def close(self) -> None:
        """Call `on_end`: the run has ended and its files are complete."""
        summary, self._summary = self._summary, None
        if summary is not None and self._hooks:
            from penstock.launch.run_summary import make_summary

            self._call_all("on_end", make_summary(self.run.folder, summary))

    def _call_all(self, name: str, argument: object) -> list[Any]:
        """Call the method ``name`` of each object; returns their answers."""
        return [self._call(hook, name, argument) for hook in self._hooks]

    def _call(self, hook: Hook, name: str, argument: object) -> Any:
        """Call a method of a user's object, if it has it.

        Returns: the answer; None if the object has no such method, or the method has failed.
        """
        method = getattr(hook.callbacks, name, None)
        if method is None:
            return None

        # A callback may raise anything, and the run continues.
        try:
            return method(self.run, argument)
        except (Exception, SystemExit) as error:
            self._report_failure(f"callback {hook.name}.{name}", error)
            return None

    def _report_failure(self, name: str, error: BaseException) -> None:
        """Show the error of a callback, and write its traceback to the log."""
        text = " ".join(str(error).split())
        logger.warning(f"{name} failed with {type(error).__name__}: {text}; the run continues")
        path = self.run.folder / "logs" / LOG
        with suppress(OSError), open(path, "a", opener=open_private) as log:
            traceback.print_exception(error, file=log)


def _any_true(answers: Sequence[Any]) -> bool:
    """Returns whether one of the answers is True, also numpy's."""
    return any(type(answer).__name__ == "bool" and bool(answer) for answer in answers)


def _check_methods(name: str, callbacks: object) -> None:
    """Raise UserError for an object without any callback method, such as with a misspelt name."""
    if isinstance(callbacks, type):
        class_name = callbacks.__name__
        raise UserError(f"callback {class_name} is a class; give an object of it: {class_name}()")

    # A method that the object has only from the base class does nothing.
    methods = [method for method in vars(Callbacks) if method.startswith("on_")]
    for method in methods:
        function = getattr(callbacks, method, None)
        base_function = getattr(Callbacks, method)
        if callable(function) and getattr(function, "__func__", None) is not base_function:
            return

    raise UserError(
        f"callback {name} has none of the methods {', '.join(methods)}; define at least one of them"
    )


def _make(path: str) -> Any:
    """Import a user's class and make an object of it; raises UserError if that fails."""
    from penstock.core.loading import explaining_errors, load

    purpose = f"callback {path}"
    with explaining_errors(purpose, "run.callbacks"):
        return load(path, purpose)()


def _evaluated(message: Json) -> Evaluated:
    """Returns the result of an evaluation from its event."""
    returns = message["return"]
    return Evaluated(
        return_mean=returns["mean"],
        return_std=returns["std"],
        return_min=returns["min"],
        return_max=returns["max"],
        length_mean=message["length"]["mean"],
        episodes=message["episodes"],
        trained_steps=message["trained_steps"],
        learner_steps=message["learner_steps"],
        time_s=message["time_s"],
        best=message["best"],
        play=message.get("play", "greedy"),
    )

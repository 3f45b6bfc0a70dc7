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


@dataclass
class Hook:
    """An object of the user, and how far `on_steps` was called for it."""

    path: str
    """What names it in messages."""
    made: object
    every_steps: int = Callbacks.every_steps
    reached: int = 0
    """The last multiple of `every_steps`."""


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
    return [_checked(name, each) for name, each in named_objects]


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

        due = [hook for hook in self._hooks if steps // hook.every_steps > hook.reached]
        for hook in due:
            hook.reached = steps // hook.every_steps
        return _any_true([self._call(hook, "on_steps", metrics) for hook in due])

    def event(self, event: RunEvent) -> bool:
        """Pass a result to the callbacks; returns whether any of them ends the run."""
        result = event.result
        if result is not None and event.kind == "checkpoint":
            self._call_all("on_checkpoint", Saved(**{**result, "folder": Path(result["folder"])}))
        elif result is not None and event.kind == "evaluation":
            return _any_true(self._call_all("on_evaluation", _evaluated(result)))
        elif event.kind == "end":
            self._summary = result
        return False

    def close(self) -> None:
        """Call `on_end`: the run has ended and its files are complete."""
        summary, self._summary = self._summary, None
        if summary is not None and self._hooks:
            from penstock.launch.run_summary import summarized

            self._call_all("on_end", summarized(self.run.folder, summary))

    def _call_all(self, name: str, about: object) -> list[Any]:
        return [self._call(hook, name, about) for hook in self._hooks]

    def _call(self, hook: Hook, name: str, about: object) -> Any:
        """The answer of a callback; None where the object has no such method, or it fails."""
        method = getattr(hook.made, name, None)
        if method is None:
            return None
        try:
            return method(self.run, about)
        except (Exception, SystemExit) as error:
            self._failed(f"callback {hook.path}.{name}", error)
            return None

    def _failed(self, name: str, error: BaseException) -> None:
        text = " ".join(str(error).split())
        logger.warning(f"{name} failed with {type(error).__name__}: {text}; the run continues")
        path = self.run.folder / "logs" / LOG
        with suppress(OSError), open(path, "a", opener=open_private) as log:
            traceback.print_exception(error, file=log)


def _any_true(answers: Sequence[Any]) -> bool:
    """Whether one of the answers is True, also numpy's."""
    return any(type(answer).__name__ == "bool" and bool(answer) for answer in answers)


def _checked(path: str, made: object) -> Hook:
    """The hook of a user's object. Raises UserError for one that cannot be called."""
    _check_hears(path, made)
    every_steps = getattr(made, "every_steps", Callbacks.every_steps)
    return Hook(path, made, whole_number(f"every_steps of callback {path}", every_steps, 1))


def _check_hears(path: str, hook: object) -> None:
    """Refuse an object without any callback method, such as one with a misspelt name."""
    if isinstance(hook, type):
        name = hook.__name__
        raise UserError(f"callback {name} is a class; give an object of it: {name}()")
    names = [name for name in vars(Callbacks) if name.startswith("on_")]
    for name in names:
        method = getattr(hook, name, None)
        if callable(method) and getattr(method, "__func__", None) is not getattr(Callbacks, name):
            return
    raise UserError(
        f"callback {path} has none of the methods {', '.join(names)}; define at least one of them"
    )


def _make(path: str) -> Any:
    from penstock.core.loading import explained, load

    purpose = f"callback {path}"
    with explained(purpose, "run.callbacks"):
        return load(path, purpose)()


def _evaluated(message: Json) -> Evaluated:
    returns = {f"return_{key}": message["return"][key] for key in ("mean", "std", "min", "max")}
    same = ("episodes", "trained_steps", "learner_steps", "time_s", "best")
    return Evaluated(
        **returns,
        length_mean=message["length"]["mean"],
        **{name: message[name] for name in same},
        play=message.get("play", "greedy"),
    )

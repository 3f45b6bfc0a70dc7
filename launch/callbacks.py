"""Callbacks of a run, for code of your own: `run.callbacks=[my_module:MyCallbacks]`.

    from penstock.launch.callbacks import Callbacks, Evaluated, Run

    class MyCallbacks(Callbacks):
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

from penstock.configs.errors import UserError
from penstock.core.files import open_private
from penstock.core.interfaces import Json, MetricSink, RunEvent
from penstock.core.notes import note_logger

if TYPE_CHECKING:
    from penstock.configs.schema import Config

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

    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool | None:
        """Called after an evaluation; True ends the run with `exit_reason` callback."""
        return None

    def on_checkpoint(self, run: Run, saved: Saved) -> None:
        """Called after a checkpoint was written."""

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """Called after the run has ended with ``summary`` (`summary.json`)."""


class Hooks(MetricSink):
    """Calls the callbacks of a run."""

    def __init__(self, paths: Sequence[str], run: Run, made: Sequence[object] = ()) -> None:
        """``paths`` are ``module:Class``, ``made`` are objects. Raises UserError if an object
        cannot be made, or has none of the methods."""
        self.run = run
        self._summary: Json | None = None
        self._made: list[tuple[str, Any]] = [(path, _make(path)) for path in paths]
        self._made += [(type(hook).__name__, hook) for hook in made]
        for path, hook in self._made:
            _check_hears(path, hook)

    def event(self, event: RunEvent) -> bool:
        """Pass a result to the callbacks; returns whether any of them ends the run."""
        result = event.result
        if result is not None and event.kind == "checkpoint":
            self._call("on_checkpoint", Saved(**{**result, "folder": Path(result["folder"])}))
        elif result is not None and event.kind == "evaluation":
            said = self._call("on_evaluation", _evaluated(result))
            return any(type(end).__name__ == "bool" and bool(end) for end in said)  # also numpy's
        elif event.kind == "end":
            self._summary = result
        return False

    def close(self) -> None:
        """Call `on_end`: the run has ended and its files are complete."""
        summary, self._summary = self._summary, None
        if summary is not None:
            self._call("on_end", summary)

    def _call(self, name: str, about: object) -> list[Any]:
        said = []
        for path, hook in self._made:
            method = getattr(hook, name, None)
            if method is None:
                continue
            try:
                said.append(method(self.run, about))
            except (Exception, SystemExit) as error:
                self._failed(f"callback {path}.{name}", error)
        return said

    def _failed(self, name: str, error: BaseException) -> None:
        text = " ".join(str(error).split())
        logger.warning(f"{name} failed with {type(error).__name__}: {text}; the run continues")
        path = self.run.folder / "logs" / LOG
        with suppress(OSError), open(path, "a", opener=open_private) as log:
            traceback.print_exception(error, file=log)


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

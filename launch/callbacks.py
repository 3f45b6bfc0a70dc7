"""Your own code beside a run: `run.callbacks=[my_module:MyCallbacks]`.

    from penstock.launch.callbacks import Callbacks, Evaluated, Run

    class MyCallbacks(Callbacks):
        def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool:
            return evaluated.return_mean >= 20  # True ends the run

The class is made once, without arguments, in the process that supervises the run, and its methods
are called there: while one works nobody is watched, so keep them short, and start a thread or a
process for what is not. What they raise is told with their name, written to `logs/callbacks.log`,
and ends nothing.
"""

from __future__ import annotations

import sys
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
    """The run that calls."""

    folder: Path
    config: Config


@dataclass(frozen=True)
class Evaluated:
    """One evaluation (`eval.every_s`): raw returns of the likeliest actions."""

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
    """Whether no evaluation before had a mean as high: it is `checkpoints/best` now."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written, complete."""

    folder: Path
    """`checkpoints/last` of the run; the next checkpoint replaces it."""
    trained_steps: int
    learner_steps: int
    time_s: float
    return_mean: float | None
    """Mean raw return of the last 100 episodes in training; None before the first."""
    best: bool
    """Whether it is `checkpoints/best`, too."""


class Callbacks:
    """Base of a user's class; each method may be left out."""

    def on_evaluation(self, run: Run, evaluated: Evaluated) -> bool | None:
        """An evaluation has ended; True ends the run, with `exit_reason` callback."""
        return None

    def on_checkpoint(self, run: Run, saved: Saved) -> None:
        """A checkpoint was written."""

    def on_end(self, run: Run, summary: Mapping[str, Any]) -> None:
        """The run has ended, and left ``summary`` (`summary.json`)."""


class Hooks(MetricSink):
    """Calls the callbacks of a run."""

    def __init__(self, paths: Sequence[str], run: Run, made: Sequence[object] = ()) -> None:
        """``paths`` are ``module:Class``, ``made`` are objects of such. Raises UserError where one
        cannot be made, or hears of nothing."""
        self._run = run
        self._summary: Json | None = None
        self._made: list[tuple[str, Any]] = [(path, _make(path)) for path in paths]
        self._made += [(type(hook).__name__, hook) for hook in made]
        for path, hook in self._made:
            _check_hears(path, hook)

    def event(self, event: RunEvent) -> bool:
        """Pass a result on; whether any callback asks to end the run."""
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
        """The run has ended, and all that it writes is there."""
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
                said.append(method(self._run, about))
            except (Exception, SystemExit) as error:
                self._failed(f"callback {path}.{name}", error)
        return said

    def _failed(self, name: str, error: BaseException) -> None:
        text = " ".join(str(error).split())
        logger.warning(f"{name} failed with {type(error).__name__}: {text}; the run goes on")
        path = self._run.folder / "logs" / LOG
        with suppress(OSError), open(path, "a", opener=open_private) as log:
            traceback.print_exception(error, file=log)


def _check_hears(path: str, hook: object) -> None:
    """Refuse what no event would ever reach, such as a method with a slip in its name."""
    if isinstance(hook, type):
        name = hook.__name__
        raise UserError(f"callback {name} is a class; give an object of it: {name}()")
    names = [name for name in vars(Callbacks) if name.startswith("on_")]
    for name in names:
        method = getattr(hook, name, None)
        if callable(method) and getattr(method, "__func__", None) is not getattr(Callbacks, name):
            return
    raise UserError(
        f"callback {path} has none of the methods that are called: {', '.join(names)}; "
        "give it one of them"
    )


def _make(path: str) -> Any:
    if "" not in sys.path:
        sys.path.append("")  # a user's module lies where the command was given
    from penstock.envs.loading import explained, load

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
    )

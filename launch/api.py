"""Penstock from Python: train and evaluate, in a script or in a notebook.

`penstock.train` and `penstock.evaluate` are these. A run consists of programs of their own,
started by exec: a script needs no ``if __name__ == "__main__"``, and nothing of the caller's memory
goes along. So a game is named by ``module:function``, not handed over.
"""

from __future__ import annotations

import json
import operator
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.configs.errors import UserError
from penstock.core.interfaces import MetricSink
from penstock.core.run_dir import Resume, default_run_dir
from penstock.launch import topology
from penstock.launch.resumed import resolve_resumed
from penstock.launch.run import conduct
from penstock.launch.supervisor_messages import KILLED_AS_ASKED, Outcome
from penstock.monitor.record import METRICS, objects
from penstock.monitor.view import ProgressLine, Silent


@dataclass(frozen=True)
class StepCounts:
    """Where every agent step went: ``produced`` is the sum of the others, each counted on its own.
    Of this process's life: after a resume it starts anew."""

    produced: int
    trained: int
    dropped: Mapping[str, int]
    """By reason."""
    lost: Mapping[str, int]
    """By reason."""
    in_flight: int | None
    """None where the learner has ended without its last report."""

    @property
    def balanced(self) -> bool:
        """Whether all terms are known and the equation holds."""
        gone = sum(self.dropped.values()) + sum(self.lost.values())
        return self.in_flight is not None and (
            self.produced == self.trained + gone + self.in_flight
        )


Accounting = StepCounts  # the public name, `penstock.Accounting`


@dataclass(frozen=True)
class Summary:
    """How a run ended. Counters and seconds are of the whole run, across resumes."""

    run_dir: Path
    reason: str
    """`return`, `env_steps`, `learner_steps` or `minutes`: the limit that it reached;
    `callback`, or `interrupted`."""
    env_steps: int
    """Agent steps produced."""
    learner_steps: int
    """Optimizer steps."""
    episodes: int
    seconds: float
    """Of training: since the first unroll was begun."""
    return_mean: float | None
    """Raw return, mean of the last 100 episodes in training; None where none has ended."""
    solved_at_s: float | None
    """Seconds of training when `stop.return` was first reached; None if never."""
    rate: float
    """Agent steps per second of training."""
    utilization: float | None
    """Share of the learner's wall clock in forward, backward and optimizer, of this process's
    life; None where that was shorter than two intervals (`run.interval_s`)."""
    accounting: StepCounts
    metrics: Mapping[str, Any]
    """All of `summary.json`."""

    def history(self) -> list[dict[str, Any]]:
        """The metrics of each interval so far, as `metrics.jsonl` has them: docs/metrics.md."""
        return history(self.run_dir)


@dataclass(frozen=True)
class Evaluation:
    """Complete episodes, in the order of the environments that played them."""

    checkpoint: str
    """Which weights played: `best`, or `last` where there is no best one yet."""
    returns: tuple[float, ...]
    """Raw."""
    lengths: tuple[int, ...]
    """In agent steps."""
    cut: int = 0
    """How many of them would have gone on, and count with their return so far."""

    @property
    def return_mean(self) -> float:
        return statistics.fmean(self.returns)


def train(
    target: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: Resume = "no",
    resume_from: str | Path | None = None,
    progress: bool = True,
    callbacks: Sequence[object] = (),
) -> Summary:
    """Train on this host, and return when the run has ended: `penstock train` as a function.

    target: a preset, a YAML file, a gymnasium id, `module:EnvId-v0` or `module:function`; or, to
        resume it, the folder of a run.
    overrides: options of the config by name, ``{"learner.lr": 3e-4}``; or nested, as in YAML.
    run_dir: folder of the run; None: `run.dir` of the config, else `runs/<target>-<time>`.
    resume: go on from the folder's newest checkpoint: "no", "auto" (if there is one) or "must".
    resume_from: begin from this checkpoint, a folder or file, or from the newest of this run.
    progress: show one line that is written over.
    callbacks: objects with methods of `penstock.Callbacks`, called in this thread.

    Ctrl-C, or a notebook's stop button, ends the run cleanly, with a checkpoint, and returns its
    summary, whose reason is `interrupted`; a second one kills at once and is raised. SIGTERM ends
    it as cleanly, and is then passed on. In another thread than the main one signals are left to
    the program: give such a run a limit (`stop.minutes`).

    Raises UserError for what the caller can mend, and RuntimeError, with the traceback of the
    process as its note, where a process of the run failed.
    """
    if resume not in get_args(Resume):
        raise UserError(f'resume={resume!r} is unknown; give one of "no", "auto" and "must"')
    _check_named(target)
    _check_callbacks(callbacks)
    options = dict(overrides or {})
    if run_dir is not None:
        options["run.dir"] = os.fspath(run_dir)
    given = [_override(*item) for item in options.items()]
    source = None if resume_from is None else os.fspath(resume_from)
    resolved = resolve_resumed(os.fspath(target), given, resume, source)
    config = resolved.config
    path = Path(config.run.dir) if config.run.dir else default_run_dir(resolved.name)
    make_specs = partial(topology.train, config)

    def view(title: str) -> MetricSink:
        return ProgressLine(sys.stdout, title, config.stop) if progress else Silent()

    outcome, summary = conduct(
        resolved, path, resume, make_specs, view, callbacks=callbacks, source=source
    )
    _raise_failure(outcome, path)
    return _summary(path, summary)


def evaluate(
    run_dir: str | Path,
    episodes: int = 20,
    *,
    checkpoint: Literal["best", "last"] = "best",
    sample: bool = False,
    seed: int = 0,
    max_episode_steps: int | None = None,
) -> Evaluation:
    """Play whole episodes with the weights of a run: `penstock eval` as a function.

    sample: draw actions as in training; else the likeliest are taken.
    seed: the same seed plays the same games.
    max_episode_steps: cut longer episodes; None: at the run's `eval.max_episode_steps`.
    Raises UserError.
    """
    from penstock.evaluation.evaluate import evaluate as play

    count, first = _whole("episodes", episodes, 1), _whole("seed", seed, 0)
    most = max_episode_steps
    if most is not None:
        most = _whole("max_episode_steps", most, 1)
    found = play(os.fspath(run_dir), count, checkpoint, sample, first, most)
    returns, lengths = tuple(found["returns"]), tuple(found["lengths"])
    return Evaluation(found["checkpoint"], returns, lengths, found["cut"])


def history(run_dir: str | Path) -> list[dict[str, Any]]:
    """The metrics of each interval of a run, also while it goes on. Raises UserError."""
    try:
        text = (Path(run_dir) / METRICS).read_bytes()
    except OSError as error:
        raise UserError(
            f"{run_dir} has no {METRICS} to read ({error.strerror}); name a run's folder"
        ) from error
    return objects(text)


def _check_named(target: object) -> None:
    if not isinstance(target, str | os.PathLike):
        name = getattr(target, "__name__", type(target).__name__)
        raise UserError(
            f"train({name}): a game is named, not handed over: 'grid:make_env' in a file that "
            "actors can import"
        )


def _check_callbacks(callbacks: object) -> None:
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise UserError(f"callbacks={callbacks!r} is no list; give callbacks=[...], of objects")
    for hook in callbacks:
        if isinstance(hook, type):
            raise UserError(
                f"callbacks has the class {hook.__name__}, and objects are called; "
                f"give {hook.__name__}()"
            )


def _whole(name: str, value: int, least: int) -> int:
    """The same as an int, also of numpy's."""
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if found < least:
        raise UserError(f"{name}={value!r} is no whole number of at least {least}; give one")
    return found


def _override(name: str, value: Any) -> str:
    """``key=value`` as on the command line: JSON is YAML."""
    try:
        return f"{name}={json.dumps(value, default=_plain, allow_nan=False)}"
    except (AttributeError, TypeError, ValueError):
        raise UserError(
            f"override {name}: {value!r} is nothing that a config can hold; give "
            "a finite number, text, True, False, None, a list or a dict of these"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item()  # numpy's scalars; what has none raises AttributeError


def _raise_failure(outcome: Outcome, run_dir: Path) -> None:
    """Raise what kept the run from a proper end."""
    failure = outcome.failure
    if failure is not None and failure.user:
        raise UserError(failure.message)
    if failure is not None and KILLED_AS_ASKED not in failure.message:
        error = RuntimeError(f"{outcome.error}; the logs are in {run_dir / 'logs'}")
        error.add_note(failure.traceback)
        raise error
    if outcome.reason == "terminated":
        os.kill(os.getpid(), outcome.exit_code - 128)  # the run has ended: now it is the program's
    if failure is not None:
        raise KeyboardInterrupt


def _summary(run_dir: Path, final: Mapping[str, Any]) -> Summary:
    get = final.get
    seconds = get("time_s") or 0.0
    return Summary(
        run_dir=run_dir,
        reason=final["exit_reason"],
        env_steps=get("env_steps", 0),
        learner_steps=get("learner_steps", 0),
        episodes=get("episodes", 0),
        seconds=seconds,
        return_mean=get("episode_return_mean"),
        solved_at_s=get("solved_at_s"),
        rate=get("env_steps", 0) / seconds if seconds else 0.0,
        utilization=get("utilization"),
        accounting=StepCounts(**final["accounting"]),
        metrics=final,
    )

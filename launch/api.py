"""The Python API: train and evaluate, in a script or in a notebook.

`penstock.train` and `penstock.evaluate` are defined here. The processes of a run are separate
programs, started by exec: a script needs no ``if __name__ == "__main__"``, and the caller's memory
is not copied. An environment is therefore named by ``module:function`` instead of being passed.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.configs import load
from penstock.configs.errors import UserError, whole_number
from penstock.configs.schema import Config
from penstock.core.interfaces import MetricSink
from penstock.core.run_dir import Resume, default_run_dir
from penstock.launch import topology
from penstock.launch.resumed import resolve_resumed
from penstock.launch.run import run_in_folder
from penstock.launch.run_summary import Summary, make_summary
from penstock.launch.supervisor_messages import Outcome
from penstock.monitor.json_view import JsonView
from penstock.monitor.view import ProgressLine, Silent


@dataclass(frozen=True)
class Evaluation:
    """Returns and lengths of episodes, in the order of the environments that played them."""

    checkpoint: str
    """The checkpoint that was played: `best`, or `last` if there is no best one yet."""
    returns: tuple[float, ...]
    """Raw returns."""
    lengths: tuple[int, ...]
    """In agent steps."""
    cut: int = 0
    """Number of episodes that were cut at the step limit; they count with their return so far."""
    sampled: bool = False
    """Whether actions were sampled as in training, instead of the most probable ones."""
    win_rates: Mapping[str, float | None] = field(default_factory=dict)
    """By opponent, the share of games that were won, where a draw counts half; None where it is not
    known who has won."""

    @property
    def return_mean(self) -> float:
        return statistics.fmean(self.returns)


def resolve(target: str | Path | Config, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the complete, checked config of a target: `penstock config show` as a function.

    No process is started, and the environment is not imported.

    Args:
        target: a preset, a YAML file, a gymnasium id, `module:EnvId-v0` or `module:function`; or a
            config, which the overrides then change.
        overrides: options of the config by name, as for `train_roles`.

    Raises:
        UserError: the target or an override is wrong.
    """
    return load.resolve(_checked_target("resolve", target), _as_overrides(overrides or {}))


def train(
    target: str | Path | Config,
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | Path | None = None,
    resume: Resume = "no",
    resume_from: str | Path | None = None,
    progress: bool = True,
    callbacks: Sequence[object] = (),
) -> Summary:
    """Train on this host until the run has ended: `penstock train` as a function.

    Args:
        target: a preset, a YAML file, a gymnasium id, `module:EnvId-v0` or `module:function`; a
            `penstock.Config`; or, to resume it, the folder of a run.
        overrides: options of the config by name, ``{"learner.lr": 3e-4}``; or nested, as in YAML.
        run_dir: folder of the run; None: `run.dir` of the config, else `runs/<target>-<time>`.
        resume: whether to resume from the folder's last complete checkpoint: "no", "auto" (if one
            exists) or "must".
        resume_from: start from this checkpoint, a folder or file, or from the last one of this run.
        progress: show the progress in one line that is overwritten.
        callbacks: objects with methods of `penstock.Callbacks`, called in this thread.

    Returns: the summary of the run.

    Ctrl-C, or a notebook's stop button, ends the run cleanly with a checkpoint, and its summary is
    returned with the reason `interrupted`. A second one kills all processes and raises
    KeyboardInterrupt. SIGTERM ends the run cleanly too, and is then delivered to the program. In a
    thread other than the main one signals are not handled: give such a run a limit
    (`stop.minutes`).

    Raises:
        UserError: an argument or the environment is wrong in a way that the caller can correct.
        RuntimeError: a process of the run has failed; the traceback of the process is its note.
        KeyboardInterrupt: a second Ctrl-C has ended the run.
    """
    if resume not in get_args(Resume):
        raise UserError(f'resume={resume!r} is unknown; give "no", "auto" or "must"')

    checked_target = _checked_target("train", target)
    _check_callbacks(callbacks)
    options = dict(overrides or {})
    if run_dir is not None:
        options["run.dir"] = os.fspath(run_dir)

    source = None if resume_from is None else os.fspath(resume_from)
    resolved = resolve_resumed(checked_target, _as_overrides(options), resume, source)
    config = resolved.config
    path = Path(config.run.dir) if config.run.dir else default_run_dir(resolved.name)

    def make_view(title: str) -> MetricSink:
        if not progress:
            return Silent()
        view = JsonView if config.run.log == "json" else ProgressLine
        return view(sys.stdout, title, config.stop)

    outcome, summary = run_in_folder(
        resolved, path, resume, topology.train_roles, make_view, callbacks=callbacks, source=source
    )
    _raise_failure(outcome, path)
    return make_summary(path, summary)


def evaluate(
    run_dir: str | Path,
    episodes: int = 20,
    *,
    checkpoint: Literal["best", "last"] = "best",
    sample: bool | None = None,
    seed: int = 0,
    max_episode_steps: int | None = None,
    against: str | Path | Sequence[str | Path] = (),
    allow: Sequence[str] = (),
) -> Evaluation:
    """Play episodes with the weights of a run: `penstock eval` as a function.

    Args:
        run_dir: folder of the run, or a file that `penstock export` wrote.
        episodes: number of episodes.
        checkpoint: "best", by evaluation, or "last" if there is no best one yet; or "last".
        sample: True samples actions as in training, False takes the most probable ones; None does
            what the run's evaluation found to be better, and takes the most probable ones if there
            was none.
        seed: seed of the environments; the same seed gives the same episodes.
        max_episode_steps: cut episodes after so many agent steps; None: the run's
            `eval.max_episode_steps`.
        against: an opponent in a game of several sides, or several that share the episodes:
            `bot:NAME`, `initial`, the folder of a run, or an exported file. Without any the policy
            plays all seats.
        allow: names that the run may import, as for `load_policy`.

    Returns: returns and lengths of the episodes, and win rates against opponents.

    Raises:
        UserError: there is no such run or checkpoint, or an argument is wrong.
    """
    from penstock.evaluation.evaluate import evaluate as play

    episodes = whole_number("episodes", episodes, 1)
    seed = whole_number("seed", seed, 0)
    if max_episode_steps is not None:
        max_episode_steps = whole_number("max_episode_steps", max_episode_steps, 1)

    opponents = [against] if isinstance(against, str | Path) else against

    result = play(
        os.fspath(run_dir),
        episodes,
        checkpoint,
        sample,
        seed,
        max_episode_steps,
        allow,
        against=[os.fspath(opponent) for opponent in opponents],
    )
    return Evaluation(
        checkpoint=result["checkpoint"],
        returns=tuple(result["returns"]),
        lengths=tuple(result["lengths"]),
        cut=result["cut"],
        sampled=result["sample"],
        win_rates={
            each["opponent"]: each["win_rate"] and each["win_rate"]["mean"]
            for each in result.get("against", ())
        },
    )


def _checked_target(function: str, target: str | Path | Config) -> str | Config:
    """Returns the target as text or as a config; raises UserError for anything else.

    ``function`` is the name of the caller, for the message.
    """
    if isinstance(target, Config):
        return target
    if not isinstance(target, str | os.PathLike):
        name = getattr(target, "__name__", type(target).__name__)
        raise UserError(
            f"{function}({name}): the environment must be given by name, such as 'grid:make_env', "
            "in a module that actors can import"
        )
    return os.fspath(target)


def _check_callbacks(callbacks: object) -> None:
    """Raise UserError for callbacks that are not a list."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise UserError(
            f"callbacks={callbacks!r} is not a list; give a list of objects, callbacks=[...]"
        )


def _as_overrides(options: Mapping[str, Any]) -> list[str]:
    """Returns options by name as overrides, each ``key=value``."""
    return [_override(name, value) for name, value in options.items()]


def _override(name: str, value: Any) -> str:
    """Returns an option as ``key=value``, as on the command line: JSON is YAML.

    Raises:
        UserError: the value is not one of a config.
    """
    try:
        return f"{name}={json.dumps(value, default=_plain, allow_nan=False)}"
    except (AttributeError, TypeError, ValueError):
        raise UserError(
            f"override {name}: {value!r} is not a value of a config; give a finite number, text, "
            "True, False, None, or a list or dict of these"
        ) from None


def _plain(value: Any) -> Any:
    """Returns a path or a scalar of numpy as a value of JSON."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.item()  # numpy's scalars; what has none raises AttributeError


def _raise_failure(outcome: Outcome, run_dir: Path) -> None:
    """Raise the error that has ended the run, if any, or deliver the signal that has."""
    failure = outcome.failure
    if failure is not None and failure.user:
        mistake = UserError(failure.message)
        # Errors of the environment's own code have a traceback.
        if failure.traceback:
            mistake.add_note(failure.traceback)
        raise mistake

    if failure is not None and not failure.ordered_by_user:
        error = RuntimeError(f"{outcome.error}; the logs are in {run_dir / 'logs'}")
        error.add_note(failure.traceback)
        raise error

    # The run has ended by a signal, which the program still has to get.
    if outcome.reason == "terminated":
        os.kill(os.getpid(), outcome.exit_code - 128)
    if failure is not None:
        raise KeyboardInterrupt

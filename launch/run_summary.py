"""The result of a run, as `penstock.train` returns it and callbacks get it at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.files import open_regular
from penstock.monitor.run_folder.lines import lines
from penstock.monitor.run_folder.record import METRICS


@dataclass(frozen=True)
class StepCounts:
    """Accounting of agent steps since the start or the last resume of a run.

    ``produced`` equals the sum of the other terms, although each is counted on its own.
    """

    produced: int
    trained: int
    dropped: Mapping[str, int]
    """By reason."""
    lost: Mapping[str, int]
    """By reason."""
    in_flight: int | None
    """None if the learner ended without a final report."""

    @property
    def balanced(self) -> bool:
        """Whether all terms are known and the equation holds."""
        if self.in_flight is None:
            return False
        dropped = sum(self.dropped.values())
        lost = sum(self.lost.values())
        return self.produced == self.trained + dropped + lost + self.in_flight


Accounting = StepCounts  # the public name, `penstock.Accounting`


@dataclass(frozen=True)
class Summary:
    """Result of a run. Counters and seconds cover the whole run, across resumes."""

    run_dir: Path
    reason: str
    """Reason of the end: `return`, `env_steps`, `learner_steps` or `minutes` for the limit that was
    reached; `callback`, or `interrupted`. A callback may also get the others of `exit_reason`
    (docs/metrics.md), with which `penstock.train` raises an error instead."""
    env_steps: int
    """Agent steps produced."""
    learner_steps: int
    """Optimizer steps."""
    episodes: int
    seconds: float
    """Seconds of training, since the start of the first unroll."""
    return_mean: float | None
    """Mean raw return of the last 100 episodes in training; None if no episode has ended."""
    solved_at_s: float | None
    """Seconds of training when an evaluation confirmed that `stop.return` is reached; None if
    never. With `stop.confirm_episodes` 0, when the return in training first reached it."""
    rate: float
    """Agent steps per second of training."""
    utilization: float | None
    """Share of the learner's wall-clock time in forward, backward and optimizer, since the start or
    the last resume; None if that was shorter than two intervals (`run.interval_s`)."""
    accounting: StepCounts
    metrics: Mapping[str, Any]
    """All of `summary.json`."""

    def history(self) -> list[dict[str, Any]]:
        """The metrics of each interval so far, as `metrics.jsonl` has them: docs/metrics.md."""
        return history(self.run_dir)


def history(run_dir: str | Path) -> list[dict[str, Any]]:
    """The metrics of each interval of a finished or live run, as `metrics.jsonl` has them.

    Raises UserError if the folder has no such file.
    """
    path = Path(run_dir) / METRICS
    try:
        open_regular(path).close()
    except OSError as error:
        raise UserError(
            f"{run_dir} has no readable {METRICS} ({error.strerror}); give the folder of a run"
        ) from error
    return lines(path)


def make_summary(run_dir: Path, final: Mapping[str, Any]) -> Summary:
    """The result of a run as an object.

    Args:
        run_dir: folder of the run.
        final: its `summary.json`. A run that ended early lacks some of the keys.
    """
    seconds = final.get("time_s") or 0.0
    env_steps = final.get("env_steps", 0)
    return Summary(
        run_dir=run_dir,
        reason=final["exit_reason"],
        env_steps=env_steps,
        learner_steps=final.get("learner_steps", 0),
        episodes=final.get("episodes", 0),
        seconds=seconds,
        return_mean=final.get("episode_return_mean"),
        solved_at_s=final.get("solved_at_s"),
        rate=env_steps / seconds if seconds else 0.0,
        utilization=final.get("utilization"),
        accounting=StepCounts(**final["accounting"]),
        metrics=final,
    )

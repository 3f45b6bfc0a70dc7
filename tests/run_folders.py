"""Run folders with given figures, written by the classes that write those of a real run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.configs.load import CONFIG_FILE, dump, resolve
from penstock.core.interfaces import RunEvent
from penstock.core.machine import record_versions
from penstock.evaluation.evaluate import summary
from penstock.monitor.run_folder.events import EventLog
from penstock.monitor.run_folder.record import Record

STEPS = 100  # between two measurements
LEDGER = {"compute": 0.75, "wait_data": 0.25}
ACCOUNTING = {
    "produced": 1000, "trained": 900, "dropped": {"lag": 60}, "lost": {}, "in_flight": 40,
}  # fmt: skip


def make_run(
    folder: Path,
    returns: Sequence[float | None],
    *options: str,
    target: str = "cartpole",
    evaluated: Mapping[int, float] | None = None,
    seconds: float = 1.0,
    ends: bool = True,
) -> Path:
    """A run with a measurement of each of ``returns``, every `STEPS` agent steps and every
    ``seconds``, and evaluations by their trained steps."""
    config = resolve(target, options)
    (folder / "logs").mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(dump(config))
    record_versions(folder)
    record, log = Record(folder, config.env), EventLog(folder / "logs")
    log.event(RunEvent("start", "was started", "actor-0", 0))
    for i, value in enumerate(returns):
        record.metrics(_measurement(i, value, seconds))
    best = float("-inf")
    for steps, value in (evaluated or {}).items():
        best = max(best, value)
        figures = {"trained_steps": steps, "learner_steps": steps // 10, "best": value == best}
        about = {"return": summary((value, value + 2.0)), "length": summary((5, 7))}
        record.event(
            RunEvent(
                "evaluation",
                "",
                result={
                    **figures,
                    **about,
                    "time_s": steps / STEPS * seconds,
                    "episodes": 2,
                    "cut": 0,
                    "best_return_mean": best + 1.0,
                    "seconds": 0.5,
                    "env": {"id": config.env.id},
                },
            )
        )
    if ends:
        record.metrics({"accounting": ACCOUNTING}, final=True)
        result = record.summary("env_steps", None)
        record.event(RunEvent("end", "ended by env_steps", result=result))
    record.close()
    log.close()
    return folder


def _measurement(i: int, value: float | None, seconds: float) -> dict[str, Any]:
    """Returns one line of metrics.jsonl."""
    return {
        "time_s": i * seconds,
        "interval_s": seconds,
        "env_steps": STEPS * i,
        "env_frames": STEPS * i,
        "trained_steps": STEPS * i,
        "learner_steps": i,
        "episodes": 10 * i,
        "steps_per_s": STEPS / seconds,
        "trained_steps_per_s": STEPS / seconds,
        "episode_return_mean": value,
        "episode_length_mean": 20.0 + i,
        "policy_lag_mean": 1.5,
        "learner_wait_fraction": 0.25,
        "learner_compute_fraction": 0.75,
        "ledger": LEDGER,
        "policy_loss": 0.5 - 0.01 * i,
        "grad_norm": 1.0 + i,
    }

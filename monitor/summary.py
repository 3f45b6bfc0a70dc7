"""The summary at the end of a run: steps, returns, accounting of samples, next commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from penstock.core.formatting import clock, count, number, percent, reasons
from penstock.core.run_dir import has_checkpoint
from penstock.monitor.figures import Metrics, evaluated, frames_per_s
from penstock.monitor.run_folder.checkpoints import Best, best

Rows = list[tuple[str, str]]

RECENT = 100  # episodes that `episode_return_mean` is of, at most
LIMITS = ("return", "env_steps", "learner_steps", "minutes")  # of `stop`
INTERRUPTED = ("interrupted", "terminated")


def rows(summary: Metrics, run_dir: Path) -> Rows:
    """The rows of the summary: labels and texts."""
    m = summary.get
    seconds, steps = m("time_s") or 0.0, m("env_steps") or 0
    rate = steps / seconds if seconds else None
    shown = {
        "ended by": _ended_by(summary),
        "steps": f"{count(steps)} agent steps in {clock(seconds)}, {count(rate)}/s"
        + _frames(summary, rate),
        "return": _return(summary),
    }
    if m("solved_at_s") is not None or m("return_reached_at_s") is not None:
        shown["solved"] = _solved(summary)
    if "eval_return_mean" in summary:
        shown["evaluation"] = evaluated(summary)
    if (found := best(run_dir, follow_links=True)) is not None:
        shown["best"] = _best(found)
    shown |= accounting(summary["accounting"])
    failed = {"actors": m("actors_restarted"), "learners": m("learners_restarted")}
    if restarts := [f"{count(n)} of failed {what}" for what, n in failed.items() if n]:
        shown["restarts"] = f"{', '.join(restarts)}; the causes are in logs"
    if m("utilization") is not None:
        shown["learner"] = (
            f"{percent(m('utilization'))} of the time in forward, backward and optimizer"
        )
    following = _next(summary["exit_reason"], run_dir) if steps else []
    return [*shown.items(), ("folder", str(run_dir)), *following]


def accounting(a: Mapping[str, Any]) -> dict[str, str]:
    """Accounting of all samples, and whether it balances."""
    terms = {
        key: "unknown" if a[key] is None else f"{a[key]:,}"
        for key in ("produced", "trained", "in_flight")
    }
    shown = {
        "samples": f"produced {terms['produced']} = trained {terms['trained']} + dropped "
        f"{reasons(a['dropped'])} + lost {reasons(a['lost'])} + in flight {terms['in_flight']}"
    }
    if "unknown" in terms.values():
        return shown
    went = a["trained"] + sum(a["dropped"].values()) + sum(a["lost"].values()) + a["in_flight"]
    if went != a["produced"]:
        shown["defect"] = (
            f"the terms differ by {a['produced'] - went:,}; this is a bug, please report it"
        )
    return shown


def _next(exit_reason: str, run_dir: Path) -> Rows:
    """Commands that are useful next."""
    if not has_checkpoint(run_dir):
        return []
    commands = [f"penstock {name} {run_dir}" for name in ("eval", "record", "plot")]
    if exit_reason in INTERRUPTED:
        commands.append(f"penstock train {run_dir} --resume must")
    return [("next" if i == 0 else "", command) for i, command in enumerate(commands)]


def show(shown: Rows, stream: TextIO) -> None:
    """Print the rows as a panel on a terminal, otherwise as lines."""
    if not stream.isatty():
        width = max(len(label) for label, _ in shown)
        lines = (f"{label:{width}}  {text}" for label, text in shown)
        print(*lines, sep="\n", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, text in shown:
        table.add_row(Text(label, style="dim"), Text(text, overflow="fold"))
    Console(file=stream).print(Panel(table, title="summary", title_align="left", expand=False))


def _ended_by(summary: Metrics) -> str:
    """The exit reason, and what to do where a resumed run was at its limit already."""
    reason = str(summary["exit_reason"])
    if reason in LIMITS and summary.get("env_steps") and summary["accounting"]["produced"] == 0:
        return f"{reason}, which was reached before; raise stop.{reason} to train on"
    return reason


def _solved(summary: Metrics) -> str:
    """Whether `stop.return` was reached, and by which evidence."""
    m = summary.get
    solved_s, closing = m("solved_at_s"), m("closing_evaluation")
    if solved_s is None:
        return (
            "no: the return in training reached stop.return after "
            f"{m('return_reached_at_s'):.2f} s, and no evaluation confirmed it"
        )
    if closing is None or not closing["solved"]:
        return f"by the return in training, after {solved_s:.2f} s; no evaluation confirmed it"
    by = closing["estimate"]
    return (
        f"stop.return {number(closing['goal'])} is confirmed after {solved_s:.2f} s of training: "
        f"{closing['play']} {number(by['mean'])}, standard error {number(by['se'])}, over "
        f"{count(by['episodes'])} episodes"
    )


def _best(found: Best) -> str:
    """The return of the best checkpoint, and by which episodes."""
    if found.way is None:
        return f"{number(found.mean)} by the return in training, in checkpoints/best"
    return (
        f"{number(found.mean)} by evaluation: {found.way}, {count(found.episodes)} episodes at "
        f"{count(found.trained_steps)} steps, in checkpoints/best"
    )


def _return(summary: Metrics) -> str:
    """The mean return, and the episodes that it covers."""
    episodes = summary.get("episodes") or 0
    if not episodes:
        return "none, because no episode has ended"
    mean = summary.get("episode_return_mean")
    if mean is None:  # several learners do not resume the returns of their last episodes
        return f"unknown, after {count(episodes)} episodes"
    of = f"the last {RECENT} of {count(episodes)}" if episodes > RECENT else f"all {episodes}"
    of = "the only episode" if episodes == 1 else f"{of} episodes"
    return f"{number(mean)} over {of}"


def _frames(summary: Metrics, rate: float | None) -> str:
    """Emulator frames, if the environment has an emulator."""
    steps, frames = summary.get("env_steps"), summary.get("env_frames")
    if not steps or frames in (None, steps):
        return ""
    return f" ({count(frames)} frames, {count(frames_per_s({**summary, 'steps_per_s': rate}))}/s)"

"""The summary at the end of a run: steps, returns, accounting of samples, next commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from penstock.core.formatting import clock, count, falls_short, number, percent, reasons
from penstock.core.run_dir import has_checkpoint, is_temporary
from penstock.monitor.figures import ALL, EXPLORING, RECENT, Metrics, evaluated, frames_per_s
from penstock.monitor.run_folder.checkpoints import Best, best
from penstock.monitor.student_t import NORMAL_95

Rows = list[tuple[str, str]]

LIMITS = ("return", "env_steps", "learner_steps", "minutes")  # limits in `stop`
INTERRUPTED = ("interrupted", "terminated")
FAILED = ("fault", "user_error")
STOPPED = "stopped"  # ended by the learner of another machine


def rows(summary: Metrics, run_dir: Path, *, games_play: bool = False) -> Rows:
    """Returns the rows of the summary, as labels and texts.

    Args:
        summary: the contents of `summary.json`.
        run_dir: the folder of the run.
        games_play: whether games play, which drive their own loop, in place of actors.
    """
    m = summary.get
    resumed = bool(m("resumed"))

    # How far the run came.
    shown = {
        "ended by": _ended_by(summary),
        "steps": _steps(summary),
        "return": _return(summary),
    }
    if m("solved_at_s") is not None or m("return_reached_at_s") is not None:
        shown["solved"] = _solved(summary)
    if "eval_return_mean" in summary:
        shown["evaluation"] = evaluated(summary)
    best_checkpoint = best(run_dir, follow_links=True)
    if best_checkpoint is not None:
        shown["best"] = _best(best_checkpoint)

    # What became of samples and processes, and what the learner did.
    shown |= accounting(summary["accounting"], resumed=resumed)
    restarted = {"actors": m("actors_restarted"), "learners": m("learners_restarted")}
    restarts = [f"{count(n)} of failed {role}" for role, n in restarted.items() if n]
    if restarts:
        shown["restarts"] = f"{', '.join(restarts)}; the causes are in logs"
    if m("utilization") is not None:
        since = " since the resume" if resumed else ""
        shown["learner"] = (
            f"{percent(m('utilization'))} of the time{since} in forward, backward and optimizer"
        )

    if is_temporary(run_dir):  # it is removed before anyone could go there
        return [*shown.items()]
    next_steps: Rows = []
    if m("env_steps"):
        next_steps = _next_steps(summary["exit_reason"], run_dir, games_play=games_play)
    return [*shown.items(), ("folder", str(run_dir)), *next_steps]


def _steps(summary: Metrics) -> str:
    """Returns the agent steps of the run and their rate; also its frames, if it has some."""
    seconds = summary.get("time_s") or 0.0
    steps = summary.get("env_steps") or 0
    rate = steps / seconds if seconds else None
    text = f"{count(steps)} agent steps in {clock(seconds)}, {count(rate)}/s"
    return text + _frames(summary, rate)


def accounting(terms: Mapping[str, Any], *, resumed: bool = False) -> dict[str, str]:
    """Returns the accounting of all samples as a row, and a second one if it does not balance.

    Args:
        terms: ``accounting`` of `summary.json`, since the start or the resume; a number that is
            unknown is None.
        resumed: whether the run was resumed.
    """
    texts = {
        key: "unknown" if terms[key] is None else f"{terms[key]:,}"
        for key in ("produced", "trained", "in_flight")
    }
    since = "since the resume: " if resumed else ""
    shown = {
        "samples": f"{since}produced {texts['produced']} = trained {texts['trained']} + dropped "
        f"{reasons(terms['dropped'])} + lost {reasons(terms['lost'])} + in flight "
        f"{texts['in_flight']}"
    }
    if "unknown" in texts.values():
        return shown

    dropped = sum(terms["dropped"].values())
    lost = sum(terms["lost"].values())
    difference = terms["produced"] - (terms["trained"] + dropped + lost + terms["in_flight"])
    if difference:
        shown["defect"] = f"the terms differ by {difference:,}; this is a bug, please report it"
    return shown


def _next_steps(exit_reason: str, run_dir: Path, *, games_play: bool) -> Rows:
    """Returns rows that say what to do next, by how the run has ended.

    Where games have played, no command has their environment.
    """
    folder = shlex.quote(str(run_dir))
    command = "serve-env" if games_play else "train"
    resume = f"penstock {command} {folder} --resume must"
    names = ("serve", "plot") if games_play else ("eval", "record", "plot")
    commands = [f"penstock {name} {folder}" for name in names]
    if exit_reason in INTERRUPTED:
        commands.append(resume)
    elif exit_reason in FAILED:
        correct = f"correct the cause, which the error names; the logs are in {run_dir / 'logs'}"
        commands = [correct, resume]
    elif exit_reason == "diverged":
        commands = [f"penstock plot {folder} --metric grad_norm", resume]
    elif exit_reason == "profiled":
        # The verdict of the profile is printed below.
        commands = []

    # All commands but the correction need a checkpoint.
    if not has_checkpoint(run_dir):
        commands = commands[:1] if exit_reason in FAILED else []
    return [("next" if i == 0 else "", command) for i, command in enumerate(commands)]


def show(shown: Rows, stream: TextIO) -> None:
    """Prints the rows as a panel on a terminal, otherwise as lines.

    Args:
        shown: what `rows` returned.
        stream: where it is printed.
    """
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
    """Returns the exit reason, and what to do where a resumed run was at its limit already."""
    reason = str(summary["exit_reason"])
    if reason == STOPPED:
        return "stopped, because the learner of another machine has reached a limit"
    if reason in LIMITS and summary.get("env_steps") and summary["accounting"]["produced"] == 0:
        return f"{reason}, which was reached before; raise stop.{reason} to train on"
    return reason


def _solved(summary: Metrics) -> str:
    """Returns whether `stop.return` was reached, and by which evidence."""
    solved_s = summary.get("solved_at_s")
    closing = summary.get("closing_evaluation")
    if solved_s is None:
        return _not_solved(summary, closing)
    if closing is None or not closing["solved"]:
        by = "an evaluation" if "eval_win_rates" in summary else "the return in training"
        return f"by {by}, after {solved_s:.2f} s; no evaluation confirmed it"

    estimate = closing["estimate"]
    return (
        f"stop.return {number(closing['goal'])} is confirmed by evaluation, after {solved_s:.2f} s "
        f"of training: {closing['play']} {number(estimate['mean'])}, standard error "
        f"{number(estimate['se'])}, over {count(estimate['episodes'])} episodes"
    )


def _not_solved(summary: Metrics, closing: Mapping[str, Any] | None) -> str:
    """Returns why `stop.return`, which was reached at first, does not count as reached.

    Args:
        summary: the contents of `summary.json`.
        closing: its last evaluation that was to confirm the return; None without one.
    """
    # In a game of several sides evaluations take the place of returns in training.
    what = "an evaluation" if "eval_win_rates" in summary else "the return in training"
    reached = f"{what} reached stop.return after {summary['return_reached_at_s']:.2f} s"
    if closing is None and summary["exit_reason"] == STOPPED:
        return f"{reached}; rank 0 evaluates, and its summary says whether that was confirmed"
    if closing is None or closing["estimate"] is None:
        return f"no: {reached}, and no evaluation confirmed it"

    estimate = closing["estimate"]
    half = NORMAL_95 * estimate["se"]
    shortfall = falls_short(estimate["mean"], half, closing["goal"])
    return (
        f"no: {reached}, and the last evaluation did not confirm it: {closing['play']} "
        f"{shortfall}, over {count(estimate['episodes'])} episodes"
    )


def _best(checkpoint: Best) -> str:
    """Returns the return of the best checkpoint as text, and by which episodes."""
    mean = number(checkpoint.mean)
    if checkpoint.way is None:
        return f"{mean} by the return in training, in checkpoints/best"
    return (
        f"{mean} by evaluation: {checkpoint.way}, {count(checkpoint.episodes)} episodes at "
        f"{count(checkpoint.trained_steps)} steps, in checkpoints/best"
    )


def _return(summary: Metrics) -> str:
    """Returns the mean return in training as text, and the episodes that it covers."""
    episodes = summary.get("episodes") or 0
    if not episodes:
        return "none, because no episode has ended"
    mean = summary.get("episode_return_mean")
    if mean is None:  # several learners do not resume the returns of their last episodes
        return f"unknown, after {count(episodes)} episodes of training"

    if episodes == 1:
        covered = "the only episode"
    elif episodes > RECENT:
        covered = f"the last {RECENT} of {count(episodes)} episodes"
    else:
        covered = f"all {episodes} episodes"
    if ALL in summary:
        everywhere = number(summary[ALL])
        return f"{number(mean)} in training {EXPLORING}, {everywhere} over {covered}"
    return f"{number(mean)} in training, over {covered}"


def _frames(summary: Metrics, rate: float | None) -> str:
    """Returns emulator frames as text; empty if the environment has no emulator.

    Args:
        summary: the contents of `summary.json`.
        rate: agent steps per second.
    """
    steps = summary.get("env_steps")
    frames = summary.get("env_frames")
    if not steps or frames in (None, steps):
        return ""

    frame_rate = frames_per_s({**summary, "steps_per_s": rate})
    return f" ({count(frames)} frames, {count(frame_rate)}/s)"

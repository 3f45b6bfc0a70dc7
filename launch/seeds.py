"""`penstock train --seeds N`: runs of the same config with several seeds.

The runs are in folders ``seed-K`` of one folder, which `penstock plot` shows as a group. As many
run at a time as the cores allow: one by one in this process, with its live view, or several in
processes of their own, whose lines are shown with their seed. Ctrl-C ends the current runs cleanly,
and the group with them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

from penstock.configs.errors import UserError
from penstock.configs.load import Resolved, resolve_target
from penstock.configs.schema import Config
from penstock.configs.transports import TRANSPORTS
from penstock.core.cores import usable_cores
from penstock.core.formatting import clock, count, number
from penstock.core.processes import die_with, python
from penstock.core.run_dir import Resume, check, default_run_dir
from penstock.launch import run, topology
from penstock.launch.resumed import check_folder_named
from penstock.launch.supervisor import SIGNALS
from penstock.monitor.intervals import ConfidenceInterval, interval
from penstock.monitor.registry import PrometheusOptions
from penstock.monitor.summary import INTERRUPTED

Summary = Mapping[str, Any]

SIGNALLED = tuple(128 + signum for signum in SIGNALS)
POLL_S = 0.05
DRAIN_S = 5.0  # that the last lines of a process have to arrive


@dataclass(frozen=True)
class Ended:
    """The exit code of a run, and its summary."""

    code: int
    summary: Summary

    @property
    def ends_group(self) -> bool:
        """Whether no further run is started: the user has made a mistake, or ended this one."""
        return self.code == 2 or self.code in SIGNALLED


def train(
    target: str,
    overrides: Sequence[str],
    seeds: int,
    resume: Resume,
    as_json: bool,
    parallel: int | None = None,
) -> int:
    """Train ``seeds`` times, with run.seed, run.seed + 1, ...; ``parallel`` runs at a time, None:
    as many as the cores allow. Returns the exit code: that of an interrupted run, otherwise 2 after
    a mistake of the user, otherwise 1 if a run failed, otherwise 0."""
    resolved = resolve_target(target, overrides)
    config = resolved.config
    check_folder_named(config, resume)
    folder = Path(config.run.dir or default_run_dir(resolved.name))
    stream = sys.stderr if as_json else sys.stdout
    first = config.run.seed
    paths = {seed: folder / f"seed-{seed}" for seed in range(first, first + seeds)}
    for path in paths.values():
        check(path, resume)
    at_once = min(seeds, parallel or runs_at_once(config, usable_cores()))
    _check_shared(config, at_once)
    if at_once == 1:
        ended = _one_by_one(resolved, paths, resume, as_json, stream)
    else:
        needed = cores_of(config)
        _say(f"{at_once} runs at a time: {usable_cores():g} cores, and a run uses {needed}", stream)
        commands = {
            seed: python(__name__, os.getpid(), seed, path, resume, target, *overrides)
            for seed, path in paths.items()
        }
        ended = run_commands(commands, at_once, partial(_say, stream=stream))
    summaries = {seed: found.summary for seed, found in ended.items()}
    code = max((found.code for found in ended.values()), default=SIGNALLED[0])  # before any began
    result = together(summaries, config.stop.return_)
    plot = _plot(folder)
    with suppress(OSError):
        _show(summaries, result, folder, plot, stream)
    if as_json:
        runs = [{"seed": seed, **summary} for seed, summary in summaries.items()]
        about = {"run_dir": str(folder), "exit_code": code, "asked": seeds, "plot": plot}
        print(json.dumps({**about, **result, "runs": runs}))
    return code


def _check_shared(config: Config, at_once: int) -> None:
    """Raise UserError for options that several runs of one command cannot share."""
    if config.run.log == "json":
        raise UserError(
            "run.log=json is the output of one run, and --seeds starts several; start each seed by "
            "a command of its own, or set run.log=text"
        )
    port = PrometheusOptions.of(config.run).metrics_port
    if at_once > 1 and port:
        raise UserError(
            f"run.metrics_port={port} is one port, and {at_once} runs at a time would each need "
            "it; set run.metrics_port=0, or --parallel 1"
        )


def cores_of(config: Config) -> int:
    """Cores that a run keeps busy: those of its learners and, unless they take turns, of its
    actors."""
    learners = config.learner.count * config.learner.first_threads
    if TRANSPORTS.one_process(config.transport.kind):
        return learners
    actors = config.actors
    return learners + config.first_actors * max(actors.threads, actors.env_threads)


def runs_at_once(config: Config, cores: float) -> int:
    """How many runs so many cores allow; at least one."""
    return max(1, int(cores // cores_of(config)))


def _one_by_one(
    resolved: Resolved, paths: Mapping[int, Path], resume: Resume, as_json: bool, stream: TextIO
) -> dict[int, Ended]:
    """The runs in this process, with its live view."""
    ended: dict[int, Ended] = {}
    for seed, path in paths.items():
        _say(f"seed {seed}, {len(ended) + 1} of {len(paths)}", stream)
        ended[seed] = _train_one(resolved, seed, path, resume, as_json)
        if ended[seed].ends_group:
            break
    return ended


def _train_one(resolved: Resolved, seed: int, path: Path, resume: Resume, as_json: bool) -> Ended:
    own = _with_seed(resolved, seed)
    try:
        outcome, summary = run.with_learner(own, path, resume, as_json, topology.train)
    except UserError as error:  # the earlier runs are still shown
        about = {"error": str(error), "exit_reason": "user_error", "solved_at_s": None}
        return Ended(2, about)
    return Ended(outcome.exit_code, summary)


def run_commands(
    commands: Mapping[int, Sequence[str]], at_once: int, say: Callable[[str], None]
) -> dict[int, Ended]:
    """Run the command of each seed in a process of its own, ``at_once`` at a time.

    The last line of its output is the summary of a run as JSON. Lines of its standard error are
    passed to ``say``, with the seed. A signal to this process is passed on to all of them, and no
    further one is started.
    """
    waiting, running = dict(commands), dict[int, _Member]()
    ended: dict[int, Ended] = {}
    signals: list[int] = []
    with _added_to(signals):
        while running or waiting:
            if signals or any(found.ends_group for found in ended.values()):
                waiting.clear()
            while waiting and len(running) < at_once:
                seed = next(iter(waiting))
                running[seed] = _Member(seed, waiting.pop(seed), say)
            time.sleep(POLL_S)
            for seed, member in [*running.items()]:
                member.pass_on(signals)
                if member.process.poll() is not None:
                    ended[seed] = running.pop(seed).result()
                    say(f"seed {seed} ended by {ended[seed].summary['exit_reason']}")
    return dict(sorted(ended.items()))


class _Member:
    """The process of one run, in a process group of its own: Ctrl-C in a terminal would otherwise
    reach it twice, and the second one kills a run."""

    def __init__(self, seed: int, command: Sequence[str], say: Callable[[str], None]) -> None:
        self._seed, self._pass_line_on = seed, say
        say(f"seed {seed} starts")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._signals = 0  # that were passed on
        self._output: list[str] = []
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._keep, self._show)
        ]
        for thread in self._threads:
            thread.start()

    def _keep(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self._output = stream.readlines()

    def _show(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self._pass_line_on(f"seed {self._seed} | {line.rstrip()}")

    def pass_on(self, signals: Sequence[int]) -> None:
        """Pass on those of ``signals`` that are new."""
        for signum in signals[self._signals :]:
            self.process.send_signal(signum)
        self._signals = len(signals)

    def result(self) -> Ended:
        """After the end of the process."""
        for thread in self._threads:
            thread.join(DRAIN_S)  # a process that the run has left behind may hold the pipes
        code = self.process.returncode
        by_signal = -code in SIGNALS  # before the run handled it
        code = 128 - code if by_signal else 1 if code < 0 else code
        try:
            return Ended(code, json.loads(self._output[-1]))
        except (ValueError, IndexError):
            pass
        summary: dict[str, Any] = {"error": None, "exit_reason": "fault", "solved_at_s": None}
        if code in SIGNALLED:
            summary["exit_reason"] = INTERRUPTED[code != 128 + signal.SIGINT]
        else:
            summary["exit_reason"] = "user_error" if code == 2 else "fault"
            how = f"exit code {self.process.returncode}"
            summary["error"] = f"its process ended without a summary, with {how}; see above"
        return Ended(code, summary)


@contextmanager
def _added_to(signals: list[int]) -> Iterator[None]:
    """Add the signals that end a run to a list, instead of ending this process."""

    def add(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)

    before = {signum: signal.signal(signum, add) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


def together(summaries: Mapping[int, Summary], goal: float | None) -> dict[str, Any]:
    """Means over the runs that were not interrupted: return and seconds to ``goal``, with half of
    the 95 % confidence interval."""
    ended = [s for s in summaries.values() if s["error"] is None]
    whole = [s for s in ended if s["exit_reason"] not in INTERRUPTED]
    solved = [s["solved_at_s"] for s in whole if s["solved_at_s"] is not None]
    returns = [s["episode_return_mean"] for s in whole if s.get("episode_return_mean") is not None]
    return {
        "return": _interval(returns),
        "goal": goal,
        "solved": len(solved),
        "solved_at_s": _interval(solved),
        "finished": len(whole),
    }


def _interval(values: Sequence[float]) -> dict[str, float | None] | None:
    return interval(values)._asdict() if values else None


def _with_seed(resolved: Resolved, seed: int) -> Resolved:
    config = resolved.config
    section = config.run.model_copy(update={"seed": seed})
    return replace(resolved, config=config.model_copy(update={"run": section}))


def _plot(folder: Path) -> str | None:
    """Plot the group, if matplotlib is installed and there are metrics; returns the file."""
    from penstock.monitor import plot

    if find_spec("matplotlib") is None:
        return None
    try:
        return str(plot.plot([str(folder)]))
    except UserError:
        return None


def _show(
    summaries: Mapping[int, Summary],
    result: Mapping[str, Any],
    folder: Path,
    plot: str | None,
    stream: TextIO,
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("seed", "ended by", "return", "steps", "time", "to stop.return"):
        table.add_column(name, justify="right", no_wrap=True)
    for seed, s in summaries.items():
        solved = "-" if s["solved_at_s"] is None else f"{s['solved_at_s']:.2f} s"
        steps, time = count(s.get("env_steps")), clock(s.get("time_s"))
        shown = number(s.get("episode_return_mean"))
        table.add_row(str(seed), s["exit_reason"], shown, steps, time, solved)
    table.add_section()
    solved = f"{_text(result['solved_at_s'])} s, {result['solved']} of {len(summaries)}"
    table.add_row("mean", "", _text(result["return"]), "", "", solved if result["solved"] else "-")
    width = None if stream.isatty() else 120
    Console(file=stream, width=width, markup=False, highlight=False).print(table)
    for seed, summary in summaries.items():
        if summary["error"] is not None:
            _say(f"seed {seed} failed: {summary['error']}", stream)
    drawn = f", their learning curves in {plot}" if plot else ""
    if folder.is_dir():  # it does not exist if the first run was refused
        _say(f"the runs are in {folder}{drawn}", stream)


def _text(found: Mapping[str, float | None] | None) -> str:
    """470.2 ± 12.3."""
    if found is None:
        return "-"
    mean, half = ConfidenceInterval(**found)  # type: ignore[arg-type]
    return number(mean) + ("" if half is None else f" ± {number(half)}")


def _say(text: str, stream: TextIO) -> None:
    with suppress(OSError):
        print(f"{text}\n", end="", file=stream, flush=True)  # one write, as threads may print


def main() -> int:
    """One run of a group, in a process of its own; returns the exit code. Its arguments are those
    of the command that `train` makes."""
    parent_pid, seed, path, resume, target, *overrides = sys.argv[1:]
    die_with(int(parent_pid), signal.SIGTERM)
    sys.path.append("")  # environments of the user are imported from the current folder
    try:
        resolved = resolve_target(target, overrides)
        ended = _train_one(resolved, int(seed), Path(path), cast(Resume, resume), as_json=True)
    except UserError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the run handles signals
        return 128 + signal.SIGINT
    print(json.dumps(ended.summary))
    return ended.code


if __name__ == "__main__":
    sys.exit(main())

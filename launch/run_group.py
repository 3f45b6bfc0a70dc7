"""Several runs of one command: each in a process of its own, so many at a time.

`penstock train --seeds`, `penstock tune` and `penstock league` start their runs here. Ctrl-C ends
the current runs cleanly, and no further one is started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from penstock.autotune import connectors, envs
from penstock.configs.errors import UserError
from penstock.configs.load import Resolved, resolve_target
from penstock.configs.schema import Config
from penstock.configs.transports import TRANSPORTS
from penstock.core.processes import die_with, python
from penstock.core.run_dir import Resume
from penstock.launch import run, topology
from penstock.launch.signals import SIGNALS, SignalHandler, SignalsAfterRun, handling_signals
from penstock.monitor.summary import INTERRUPTED

Summary = Mapping[str, Any]
Key = TypeVar("Key", int, str)
"""Number or name of a run in its group."""

SIGNALLED = tuple(128 + signum for signum in SIGNALS)
"""Exit codes of runs that a signal has ended."""
POLL_S = 0.05
DRAIN_S = 5.0
"""Most seconds to wait for the last lines of a process that has ended."""


@dataclass(frozen=True)
class RunEnd:
    """The exit code of a run, and its summary."""

    code: int
    summary: Summary

    @property
    def ends_group(self) -> bool:
        """Whether no further run is started: the user has made a mistake, or ended this one."""
        return self.code == 2 or self.code in SIGNALLED


def check_shared(config: Config, at_once: int) -> None:
    """Check options that several runs of one command may not share.

    Args:
        config: that of the runs.
        at_once: how many of them run at a time.

    Raises UserError.
    """
    envs.check_not_auto(config, "the runs of this command")
    connectors.check_not_auto(config, "this command starts several runs")
    if config.run.log == "json":
        raise UserError(
            "run.log=json is the output of one run, and this command starts several; start each by "
            "a command of its own, or set run.log=text"
        )

    port = config.run.metrics_port
    if at_once > 1 and port:
        raise UserError(
            f"run.metrics_port={port} is one port, and {at_once} runs at a time would each need "
            "it; set run.metrics_port=0, or do one run at a time"
        )


def cores_of(config: Config) -> int:
    """Cores that a run keeps busy: those of its learners and, unless they take turns, of its
    actors."""
    learner_cores = config.learner.most_count * config.learner.first_threads
    if TRANSPORTS.one_process(config.transport.kind):
        return learner_cores
    actors = config.actors
    return learner_cores + config.first_actors * max(actors.threads, actors.env_threads)


def fixed_cores(config: Config) -> list[str]:
    """Returns overrides with numbers in place of ``auto`` where it is about cores.

    Of runs at the same time none may take the cores of another, so each keeps the numbers of actors
    and threads with which it starts.
    """
    overrides = []
    if config.actors.count == "auto":
        overrides.append(f"actors.count={config.first_actors}")
    if config.learner.threads == "auto":
        overrides.append(f"learner.threads={config.learner.first_threads}")
    return overrides


def runs_at_once(config: Config, cores: float) -> int:
    """How many runs so many cores allow; at least one."""
    return max(1, int(cores // cores_of(config)))


def train_one(
    resolved: Resolved,
    path: Path,
    resume: Resume,
    as_json: bool,
    source: str | None = None,
    handler_after: SignalHandler | None = None,
) -> RunEnd:
    """Do one run in this process.

    Args:
        resolved: its config.
        path: its folder.
        resume: "no", "auto" or "must".
        as_json: whether it is shown on standard error.
        source: the value of ``--resume-from``.
        handler_after: as of `Supervisor.run`.
    """
    try:
        outcome, summary = run.run_and_show(
            resolved,
            path,
            resume,
            as_json,
            topology.train_roles,
            source=source,
            handler_after=handler_after,
        )
    except UserError as error:  # it is in the summary, so that the earlier runs are still shown
        return RunEnd(2, _summary_without_run("user_error", str(error)))
    return RunEnd(outcome.exit_code, summary)


def _summary_without_run(reason: str, error: str | None) -> Summary:
    """The summary of a run that was refused before its start, or has left none."""
    return {"error": error, "exit_reason": reason, "solved_at_s": None}


def run_command(
    target: str, overrides: Sequence[str], path: Path, resume: Resume, source: str = ""
) -> list[str]:
    """The command of a process that trains one run of a group, and ends with this process.

    Args:
        target: as of `penstock train`.
        overrides: ``key=value``.
        path: the folder of the run.
        resume: "no", "auto" or "must".
        source: the value of ``--resume-from``; empty for none.
    """
    return python(__name__, os.getpid(), path, resume, source, target, *overrides)


def run_commands(
    commands: Mapping[Key, Sequence[str]],
    at_once: int,
    print_line: Callable[[str], None],
    name: str = "seed",
    *,
    independent: bool = False,
    together: bool = False,
    handler_after: SignalHandler | None = None,
) -> dict[Key, RunEnd]:
    """Run each command in a process of its own.

    The last line of its output is the summary of a run as JSON. A signal to this process is passed
    on to all running ones. No further command is started after a signal, nor, unless the commands
    are ``independent``, after one whose `RunEnd.ends_group` is true.

    Args:
        commands: by their numbers, such as seeds, or names.
        at_once: how many run at a time.
        print_line: prints a line: the start and the end of each command, and its standard error.
        name: what the number of a command is called in these lines.
        independent: whether a mistake of the user in one command says nothing about the others.
        together: whether the failure of one ends all. The others are asked to save and to end.
        handler_after: handles signals after the last command, as of `handling_signals`.

    Returns:
        The results of the commands that were started, in the order of ``commands``.
    """
    waiting = dict(commands)
    running: dict[Key, _Member] = {}
    ended: dict[Key, RunEnd] = {}
    signals: list[int] = []
    with handling_signals(lambda signum, _: signals.append(signum), handler_after):
        while running or waiting:
            group_ends = not independent and any(result.ends_group for result in ended.values())
            if signals or group_ends:
                waiting.clear()
            while waiting and len(running) < at_once:
                key = next(iter(waiting))
                running[key] = _Member(f"{name} {key}", waiting.pop(key), print_line)

            time.sleep(POLL_S)
            for key, member in list(running.items()):
                member.pass_on(signals)
                if member.process.poll() is None:
                    continue
                del running[key]
                ended[key] = member.result()
                print_line(f"{name} {key} ended by {ended[key].summary['exit_reason']}")

                if together and ended[key].code and running and not signals:
                    print_line(f"the other runs save and end, as {name} {key} has failed")
                    signals.append(signal.SIGTERM)
    return {key: ended[key] for key in commands if key in ended}


class _Member:
    """The process of one run of a group.

    It is in a process group of its own: Ctrl-C in a terminal would otherwise reach it twice, and
    the second one kills a run.
    """

    def __init__(
        self, name: str, command: Sequence[str], print_line: Callable[[str], None]
    ) -> None:
        """Start the process; ``say`` prints its standard error, after the ``name``."""
        self._name = name
        self._print_line = print_line
        print_line(f"{name} starts")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._passed_signals = 0  # how many of the group's signals were passed on
        self._output: list[str] = []  # its standard output, once it has ended
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._show_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self._output = stream.readlines()

    def _show_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self._print_line(f"{self._name} | {line.rstrip()}")

    def pass_on(self, signals: Sequence[int]) -> None:
        """Pass on those of ``signals``, all that the group has received, that are new."""
        for signum in signals[self._passed_signals :]:
            self.process.send_signal(signum)
        self._passed_signals = len(signals)

    def result(self) -> RunEnd:
        """How the run has ended. Call it after the end of the process."""
        for reader in self._readers:
            reader.join(DRAIN_S)  # a process that the run has left behind may hold the pipes

        code = self.process.returncode
        if -code in SIGNALS:  # a signal that came before the run handled it
            code = 128 - code
        elif code < 0:
            code = 1

        with suppress(ValueError, IndexError):
            summary = json.loads(self._output[-1])
            # The environment may have printed the last line.
            if isinstance(summary, dict) and "exit_reason" in summary:
                return RunEnd(code, summary)

        if code in SIGNALLED:
            interrupted_by_user = code == 128 + signal.SIGINT
            reason = INTERRUPTED[0] if interrupted_by_user else INTERRUPTED[1]
            return RunEnd(code, _summary_without_run(reason, None))
        reason = "user_error" if code == 2 else "fault"
        error = (
            "its process ended without a summary, with exit code "
            f"{self.process.returncode}; see above"
        )
        return RunEnd(code, _summary_without_run(reason, error))


def group_exit_code(ends: Mapping[Key, RunEnd], requested: int) -> int:
    """The exit code of a group of runs.

    It is that of an interrupted run, otherwise 2 after a mistake of the user, otherwise 1 if a run
    failed, otherwise 0. If a signal came between two runs, so that it interrupted none and kept the
    others from starting, it is 130.

    Args:
        ends: the runs that have ended.
        requested: the number of runs that were to be done.
    """
    code = max((result.code for result in ends.values()), default=0)
    all_were_started = len(ends) == requested
    return code if all_were_started or code > 1 else SIGNALLED[0]


def say_line(text: str, stream: TextIO) -> None:
    """Print a line with one write, since threads may print at the same time."""
    with suppress(OSError):
        print(f"{text}\n", end="", file=stream, flush=True)


def main() -> int:
    """Do one run of a group, in a process of its own; returns the exit code.

    The arguments of the process are those of `run_command`.
    """
    parent_pid, path, resume, source, target, *overrides = sys.argv[1:]
    die_with(int(parent_pid), signal.SIGTERM)
    try:
        result = train_one(
            resolve_target(target, overrides),
            path=Path(path),
            resume=cast(Resume, resume),
            as_json=True,
            source=source or None,
            handler_after=SignalsAfterRun(),
        )
    except UserError as error:
        print(f"penstock: {error}", file=sys.stderr)
        print(json.dumps(_summary_without_run("user_error", str(error))))
        return 2
    except KeyboardInterrupt:  # before the run handles signals
        return 128 + signal.SIGINT

    print(json.dumps(result.summary), flush=True)
    return result.code


if __name__ == "__main__":
    sys.exit(main())

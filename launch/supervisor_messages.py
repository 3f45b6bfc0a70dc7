"""Messages between the supervisor's event loop and its pure decision functions."""

from __future__ import annotations

import errno
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMITS = frozenset({"env_steps", "learner_steps", "minutes"})
"""Reasons of a stop at a limit of the run."""
CALLBACK = "callback"
"""The reason where a callback ended the run."""
OVER = LIMITS | {"return", CALLBACK}
"""Reasons after which a run is over: actors that were started by hand need not wait for another
learner."""
NAMED = 4  # roles in one sentence
ADVICE = {
    errno.EMFILE: "raise the limit of `ulimit -n`, or lower actors.count",
    errno.ENFILE: "raise the machine's limit, sysctl fs.file-max",
    errno.EAGAIN: "raise the limit of `ulimit -u`, or the container's limit on processes",
    errno.ENOMEM: "free memory, or lower actors.count",
}


@dataclass(frozen=True)
class RestartLimits:
    """Time limits in seconds, and the numbers of consecutive restarts without progress: of a role,
    and of the whole run from its checkpoint."""

    grace_s: float = 10.0
    hang_timeout_s: float = 60.0
    start_timeout_s: float = 60.0
    max_restarts: int = 5
    restarts: int = 3


@dataclass(frozen=True)
class Failure:
    """A failure of the role ``name``; ``user`` if the user can correct its cause, not ``fault`` if
    the run cannot continue in this role for no fault of the program (`RunEndedError`)."""

    name: str
    message: str
    traceback: str = ""
    user: bool = False
    place: str = ""
    """Place in the user's code that raised the error: `game.py:8, in step`."""
    log: str = ""
    fault: bool = True
    asked: bool = False
    """Whether the user has asked for it, by a second signal."""
    cause: str = field(default="", compare=False)
    """What ended the role, without advice; empty where the message has no advice."""

    @classmethod
    def killed_as_asked(
        cls, name: str, *, has_checkpoint: bool, reason: str = "", traceback: str = ""
    ) -> Failure:
        """The failure of a role that a second signal has killed, with a further ``reason``."""
        left = "its last checkpoint is valid" if has_checkpoint else "it had written no checkpoint"
        text = f"was killed by a second signal before it had finished; {left}{reason}"
        return cls(name, text, traceback, asked=True)

    @property
    def told(self) -> str:
        """The message, with the place and the log."""
        return f"{self.located}; traceback in {self.log}" if self.place else self.message

    @property
    def located(self) -> str:
        """The message, with the place."""
        return f"{self.message} ({self.place})" if self.place else self.message


@dataclass(frozen=True)
class End:
    """End of a process; a negative exit code is the signal that killed it.

    The other values are from an actor's status page: ``produced`` steps and ``sequence`` of the
    stream with that ``incarnation``. ``out_of_memory``: the kernel has killed a process of this
    group for lack of memory since the previous end of a process.
    """

    exit_code: int
    produced: int = 0
    sequence: int = 0
    incarnation: int = 0
    log: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    exit_code: int
    reason: str
    failure: Failure | None = None

    @property
    def error(self) -> str | None:
        """The failure as a sentence, with the role's name unless it is a mistake of the user."""
        if self.failure is None:
            return None
        return (
            self.failure.message
            if self.failure.user
            else f"{self.failure.name}: {self.failure.located}"
        )


@dataclass(frozen=True)
class Start:
    """Start the process of ``name``."""

    name: str
    incarnation: int


@dataclass(frozen=True)
class Kill:
    """Send ``signum`` to the process of ``name``; with an ``incarnation``, to the one that was
    presumed dead under it."""

    name: str
    signum: int
    why: str = field(default="", compare=False)
    incarnation: int | None = None


@dataclass(frozen=True)
class Send:
    """Send a control message to ``name``."""

    name: str
    message: dict[str, Any]


@dataclass(frozen=True)
class Note:
    """A sentence for the user, as an event of ``kind`` about the process ``name``."""

    text: str
    kind: str = field(default="note", compare=False)
    name: str | None = field(default=None, compare=False)
    data: dict[str, Any] = field(default_factory=dict, compare=False)
    incarnation: int | None = field(default=None, compare=False)


Effect = Start | Kill | Send | Note


def cause_of_end(exit_code: int) -> str:
    """What an exit code as `subprocess` gives it says, without advice."""
    if exit_code == 0:
        return "ended unexpectedly with exit code 0"
    if exit_code > 0:
        return f"ended with exit code {exit_code} and without an error report"
    return f"was killed by {signal_name(-exit_code)}"


def how_it_ended(exit_code: int, out_of_memory: bool = False) -> str:
    """A sentence for an exit code as `subprocess` gives it."""
    cause = cause_of_end(exit_code)
    if -exit_code != signal.SIGKILL:
        return cause
    if out_of_memory:
        return f"{cause}: its control group is out of memory; lower actors.count"
    return f"{cause}, possibly for lack of memory; check the kernel's log with dmesg"


def why_not_started(error: OSError) -> str:
    """A sentence with the reason why a role could not be started, and a remedy."""
    advice = f"; {ADVICE[error.errno]}" if error.errno in ADVICE else ""
    return f"could not be started: {error.strerror or error}{advice}"


def notes_of_hosts(
    reasons: Mapping[str, str], lost: Collection[str], found: Collection[str]
) -> list[Effect]:
    """Sentences for roles that have lost their hosts, for ``reasons``, and for those that have one
    now."""
    notes: list[Effect] = []
    for why in sorted({reasons[name] for name in lost}):
        names = _in_order(name for name in lost if reasons[name] == why)
        notes.append(Note(f"{_several(names)}: {why}", "hosts", data={"lost": names}))
    if found:
        names = _in_order(found)
        notes.append(Note(f"{_several(names)}: a host was found", "hosts", data={"found": names}))
    return notes


def _in_order(names: Iterable[str]) -> list[str]:
    """Names of roles, actor-2 before actor-10."""
    return sorted(names, key=lambda name: (name.rpartition("-")[0], len(name), name))


def _several(names: Sequence[str]) -> str:
    """Names as text, the first of them where they are many."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[: NAMED - 1])} and {len(names) - NAMED + 1} more"


def signal_name(signum: int) -> str:
    """The name of a signal, such as "SIGKILL"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def too_late(name: str, grace_s: float) -> Failure:
    """The failure of a role that was killed at the end of `run.grace_s`."""
    return Failure(
        name,
        f"did not finish within run.grace_s = {grace_s:g} s and was killed; training since its "
        "last checkpoint is lost; set run.grace_s higher",
    )

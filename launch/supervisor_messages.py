"""Values that pass between the supervisor's event loop and its decisions.

Events carry a `Failure` or an `End`. Decisions return effects (`Start`, `Kill`, `Send`, `Note`),
which the loop carries out, and at last the `Outcome`. The functions make their sentences.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMITS = frozenset({"env_steps", "learner_steps", "minutes"})
"""Reasons of a stop at a limit of the run."""
CALLBACK = "callback"
"""Reason of a stop by a callback."""
OVER = LIMITS | {"return", CALLBACK}
"""Reasons after which a run is over: actors that were started by hand need not wait for another
learner."""
MAX_NAMES = 4
"""Most names of roles in one sentence."""
ADVICE = {  # what the user can do where a process cannot be started, by errno
    errno.EMFILE: "raise the limit of `ulimit -n`, or lower actors.count",
    errno.ENFILE: "raise the machine's limit, sysctl fs.file-max",
    errno.EAGAIN: "raise the limit of `ulimit -u`, or the container's limit on processes",
    errno.ENOMEM: "free memory, or lower actors.count",
}


@dataclass(frozen=True)
class RestartLimits:
    """The limits of a run: the options of the same names below `run`."""

    grace_s: float = 10.0
    """Seconds from the beginning of a stop until learners are killed."""
    hang_timeout_s: float = 60.0
    """Seconds without a sign of life after which a process counts as hung."""
    start_timeout_s: float = 60.0
    """The same for a process that is starting."""
    max_restarts: int = 5
    """Consecutive restarts of a role without progress."""
    restarts: int = 3
    """Consecutive restarts of the run from its checkpoint, without a newer one."""


@dataclass(frozen=True)
class Failure:
    """A failure of one role."""

    name: str
    """The role, such as "actor-3", or "supervisor"."""
    message: str
    traceback: str = ""
    user: bool = False
    """Whether the user can correct its cause."""
    place: str = ""
    """Place in the user's code that raised the error: `game.py:8, in step`."""
    log: str = ""
    """Path of the role's log."""
    fault: bool = True
    """False if the role cannot continue for no fault of the program (`RunEndedError`)."""
    ordered_by_user: bool = False
    """Whether the user has asked for it, by a second signal."""
    cause: str = field(default="", compare=False)
    """What ended the role, without advice; empty where the message has no advice."""

    @classmethod
    def killed_by_user(
        cls, name: str, *, has_checkpoint: bool, reason: str = "", traceback: str = ""
    ) -> Failure:
        """The failure of a role that a second signal has killed.

        Args:
            name: the role.
            has_checkpoint: whether the run has a checkpoint.
            reason: text that is added to the message, such as "; its loop was blocked".
            traceback: where the role was.
        """
        checkpoint = "it had written no checkpoint"
        if has_checkpoint:
            checkpoint = "its last checkpoint is valid"
        text = f"was killed by a second signal before it had finished; {checkpoint}{reason}"
        return cls(name, text, traceback, ordered_by_user=True)

    def describe(self) -> str:
        """The message with the place in the user's code and the path of the log, if known."""
        if not self.place:
            return self.message
        return f"{self.message_with_place}; traceback in {self.log}"

    @property
    def message_with_place(self) -> str:
        """The message, with the place in the user's code if it is known."""
        return f"{self.message} ({self.place})" if self.place else self.message


@dataclass(frozen=True)
class End:
    """The end of a process, with the last counters of its status page."""

    exit_code: int
    """Negative for the signal that killed the process."""
    produced: int = 0
    """Agent steps of an actor's present stream."""
    sequence: int = 0
    """Slots of that stream."""
    incarnation: int = 0
    """Incarnation of that stream; of other roles, that of the process."""
    log: str = ""
    """The last output of the process."""
    out_of_memory: bool = False
    """Whether the kernel has killed a process of this control group for lack of memory since the
    previous end of a process."""


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    exit_code: int
    reason: str
    """Why the run has ended: `exit_reason` in its summary."""
    failure: Failure | None = None

    @property
    def error(self) -> str | None:
        """The failure as a sentence, with the role's name unless it is a mistake of the user."""
        if self.failure is None:
            return None
        if self.failure.user:
            return self.failure.message
        return f"{self.failure.name}: {self.failure.message_with_place}"


@dataclass(frozen=True)
class Start:
    """Start the process of ``name``."""

    name: str
    incarnation: int


@dataclass(frozen=True)
class Kill:
    """Send the signal ``signum`` to the process of ``name``."""

    name: str
    signum: int
    why: str = field(default="", compare=False)
    """The reason, for the run's log."""
    incarnation: int | None = None
    """The signal is sent to the process that was presumed dead under this incarnation; None: to
    the present one."""


@dataclass(frozen=True)
class Send:
    """Send a control message to ``name``."""

    name: str
    message: dict[str, Any]


@dataclass(frozen=True)
class Note:
    """Record a sentence for the user, as an event of ``kind`` about the process ``name``."""

    text: str
    kind: str = field(default="note", compare=False)
    name: str | None = field(default=None, compare=False)
    data: dict[str, Any] = field(default_factory=dict, compare=False)
    incarnation: int | None = field(default=None, compare=False)


Effect = Start | Kill | Send | Note


def describe_end_cause(exit_code: int) -> str:
    """What has ended a process, without advice; ``exit_code`` is as `subprocess` gives it."""
    if exit_code == 0:
        return "ended unexpectedly with exit code 0"
    if exit_code > 0:
        return f"ended with exit code {exit_code} and without an error report"
    return f"was killed by {signal_name(-exit_code)}"


def describe_exit(exit_code: int, out_of_memory: bool = False) -> str:
    """How a process has ended, as a sentence without its subject, with advice.

    Args:
        exit_code: as `subprocess` gives it, negative for a signal.
        out_of_memory: whether the kernel has killed a process for lack of memory.
    """
    cause = describe_end_cause(exit_code)
    if -exit_code != signal.SIGKILL:
        return cause
    if out_of_memory:
        return f"{cause}: its control group is out of memory; lower actors.count"
    return f"{cause}, possibly for lack of memory; check the kernel's log with dmesg"


def why_not_started(error: OSError) -> str:
    """Why a role could not be started, and the remedy if one is known, as a sentence."""
    advice = f"; {ADVICE[error.errno]}" if error.errno in ADVICE else ""
    return f"could not be started: {error.strerror or error}{advice}"


def host_notes(
    reasons: Mapping[str, str], *, lost: Collection[str], found: Collection[str]
) -> list[Effect]:
    """Sentences about the hosts of roles.

    Args:
        reasons: why a role has no host, by its name.
        lost: names of roles that have lost their hosts.
        found: names of roles that have a host again.

    Returns:
        A note for each reason, and one for all roles that have a host again.
    """
    notes: list[Effect] = []
    for reason in sorted({reasons[name] for name in lost}):
        names = _sorted_names(name for name in lost if reasons[name] == reason)
        notes.append(Note(f"{_join_names(names)}: {reason}", "hosts", data={"lost": names}))

    if found:
        names = _sorted_names(found)
        text = f"{_join_names(names)}: a host was found"
        notes.append(Note(text, "hosts", data={"found": names}))
    return notes


def _sorted_names(names: Iterable[str]) -> list[str]:
    """Names of roles in the order of their indices: actor-2 before actor-10."""
    return sorted(names, key=lambda name: (name.rpartition("-")[0], len(name), name))


def _join_names(names: Sequence[str]) -> str:
    """Names as text; of more than `MAX_NAMES` only the first, and how many more there are."""
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    first = names[: MAX_NAMES - 1]
    return f"{', '.join(first)} and {len(names) - len(first)} more"


def signal_name(signum: int) -> str:
    """The name of a signal, such as "SIGKILL"."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def grace_exceeded(name: str, grace_s: float) -> Failure:
    """The failure of a role that had not finished after `run.grace_s` seconds and was killed."""
    return Failure(
        name,
        f"did not finish within run.grace_s = {grace_s:g} s and was killed; training since its "
        "last checkpoint is lost; set run.grace_s higher",
    )

"""Messages between the supervisor's event loop and its pure decision functions."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass, field
from typing import Any

KILLED_AS_ASKED = "was killed, as asked, before it had finished; its last checkpoint stands"
ADVICE = {
    errno.EMFILE: "raise the limit of `ulimit -n`, or have fewer actors",
    errno.ENFILE: "the machine's limit is fs.file-max",
    errno.EAGAIN: "raise the limit of `ulimit -u` or of the container's processes",
    errno.ENOMEM: "free memory, or have fewer actors",
}


@dataclass(frozen=True)
class RestartLimits:
    """Time limits, in seconds, and how many barren restarts in a row are borne."""

    grace_s: float = 10.0
    hang_timeout_s: float = 60.0
    start_timeout_s: float = 60.0
    max_restarts: int = 5


@dataclass(frozen=True)
class Failure:
    """Why something went wrong: ``user`` where it is the user's to mend."""

    name: str
    message: str
    traceback: str = ""
    user: bool = False
    place: str = ""
    """Where the user's code raised it: `game.py:8, in step`."""
    log: str = ""

    @property
    def told(self) -> str:
        """The message, and where to look."""
        if not self.place:
            return self.message
        return f"{self.message} ({self.place}); traceback in {self.log}"


@dataclass(frozen=True)
class End:
    """How a process ended: a negative exit code is the signal that killed it.

    The rest is what an actor's page says: ``produced`` steps and ``sequence`` of the stream that is
    told apart by ``incarnation``. ``out_of_memory``: the kernel has killed a process of ours for
    want of memory since the one before ended.
    """

    exit_code: int
    produced: int = 0
    sequence: int = 0
    incarnation: int = 0
    log: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True)
class Outcome:
    """How the run ended."""

    exit_code: int
    reason: str
    failure: Failure | None = None

    @property
    def error(self) -> str | None:
        """The failure in a sentence: the user's own mistakes need not know which process."""
        if self.failure is None:
            return None
        return (
            self.failure.message
            if self.failure.user
            else f"{self.failure.name}: {self.failure.message}"
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


def how_it_ended(exit_code: int, out_of_memory: bool = False) -> str:
    """A sentence for an exit code as `subprocess` gives it."""
    if exit_code == 0:
        return "ended without being asked to"
    if exit_code > 0:
        return f"ended with exit code {exit_code} and no report"
    name = signal_name(-exit_code)
    if -exit_code != signal.SIGKILL:
        return f"was killed by {name}"
    if out_of_memory:
        return f"was killed by {name}: out of memory, by the limit of its control group"
    return f"was killed by {name} (out of memory? the kernel's log tells: dmesg)"


def why_not_started(error: OSError) -> str:
    """Why a role could not be started, and what to do about it."""
    advice = f"; {ADVICE[error.errno]}" if error.errno in ADVICE else ""
    return f"could not be started: {error.strerror or error}{advice}"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def too_late(name: str, grace_s: float) -> Failure:
    """Of one that had to be killed while the run was stopping."""
    return Failure(
        name,
        f"did not finish within run.grace_s = {grace_s:g} s and was killed; what it had learned "
        "since its last checkpoint is lost, so set run.grace_s higher",
    )

"""What a role is given to work with: its arguments, its way to the supervisor, its status page.

A role is one process with one main function ``run(ctx: RoleContext) -> None``. Its duties:

- call ``ctx.status.beat()`` in every turn of its work loop, also while it waits;
- report "ready" once it works, and stop soon after ``ctx.stopping()`` turns true;
- raise `UserError` for what the user must mend; any other exception is a fault.

The learner is asked to stop twice: the supervisor sends it {"kind": "finish"} with the signal, by
which time every actor and connector has ended and been named in an "actor_ended" message.
Several learners are told before which of them saves the run, {"kind": "saver", "rank": ...}; the
others wait until it has ended, and hear the next one's rank where it has died.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.control import Channel, Message

if TYPE_CHECKING:
    from penstock.configs.schema import Config
    from penstock.profiling.ledger import TimeLedger
    from penstock.profiling.status import StatusPage

EXIT_REJOIN = os.EX_TEMPFAIL  # a role that lost its learner exits so: started again at once
URGENT = frozenset(
    {
        "checkpoint", "entered", "error", "evaluation", "final", "group_failed", "join", "ready",
        "stop",
    }
)  # fmt: skip


class RunEndedError(Exception):
    """The run cannot go on, by no mistake of the program or its user's: told in one sentence, and
    exit code 1."""


def learner_socket(runtime_dir: Path, rank: int) -> Path:
    """The Unix socket of the learner of that rank."""
    return runtime_dir / f"learner-{rank}.sock"


def relay_socket(runtime_dir: Path, rank: int) -> Path:
    """The Unix socket of the relay that follows the learner of that rank."""
    return runtime_dir / f"relay-{rank}.sock"


@dataclass(frozen=True)
class Store:
    """Where learners of several machines meet: a torch TCPStore, served by rank 0 unless it is
    ``served`` already (by torchrun). ``attempt`` counts how often all of them were started again:
    keys of an attempt before mean nothing any more."""

    host: str
    port: int
    served: bool = False
    attempt: int = 0


@dataclass
class RoleContext:
    """Arguments of one role's process, and its line to the supervisor.

    ``config`` is None where it comes in the learner's handshake. ``address`` is where to bind
    (connector) or connect (actor, relay), None where nothing goes over the wire. ``learner`` is the
    rank of the learner that this role is, or belongs to; an actor may be given to another one
    (`leaving`, `follow`), and the rest is fixed for the process' life. ``runtime_dir`` has mode
    0700 and a path short enough for Unix sockets. ``resume`` is "no", "auto" or "must",
    ``transport`` what an actor was told to use, ``curve`` a directory of keys. ``insecure`` and
    ``allow`` say what an actor by hand takes from whoever answers
    (`configs.code_references.check`).
    ``store`` is None where all learners are on this host.
    """

    role: str
    index: int
    incarnation: int
    run_id: int
    run_dir: Path
    runtime_dir: Path
    channel: Channel
    status: StatusPage
    config: Config | None = None
    address: str | None = None
    resume: str = "no"
    transport: str = "auto"
    curve: Path | None = None
    insecure: bool = False
    allow: tuple[str, ...] = ()
    learner: int = 0
    store: Store | None = None
    _stopping: bool = False  # a plain flag: a signal handler must not take a lock
    _given: Message | None = None

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @cached_property
    def ledger(self) -> TimeLedger:
        """The time ledger of the main thread."""
        return self.status.ledger("main")

    def stopping(self) -> bool:
        """Whether to end now: asked to by a signal, or the supervisor is gone. Cheap."""
        return self._stopping

    def stop(self) -> None:
        """Ask this role to end; what the signal handler does."""
        self._stopping = True

    def leaving(self) -> bool:
        """For an actor: whether to let go of its learner, as it stops or was given to another."""
        for message in self.messages():
            if message["kind"] == "learner":
                self._given = message
        return self._stopping or self._given is not None

    def follow(self) -> None:
        """Belong to the learner that the supervisor has named last, under a new incarnation."""
        if self._given is not None:
            self.learner, self.address = self._given["index"], self._given["address"]
            self.incarnation = self._given["incarnation"]
            self._given = None

    def report(self, kind: str, **fields: Any) -> bool:
        """Tell the supervisor. Says whether it got through: only urgent kinds wait for room."""
        return self.channel.send({"kind": kind, **fields}, 5.0 if kind in URGENT else 0.0)

    def event(self, kind: str, text: str, **data: Any) -> bool:
        """Have one event written to the run's `logs/events.jsonl`; never waits.

        Args:
            kind: one word, the same for all events of its kind, such as "refused".
            text: one sentence for a person.
            data: further JSON values.

        Returns:
            Whether the supervisor's socket had room for it.
        """
        return self.report("event", event=kind, text=text, data=data)

    def messages(self) -> list[Message]:
        """What the supervisor has sent since the last call; never waits."""
        messages = self.channel.receive()
        if self.channel.closed:
            self._stopping = True
        return messages

"""The context of a role: its arguments, its channel to the supervisor, its status page.

A role is one process with one main function ``run(ctx: RoleContext) -> None``. It must:

- call ``ctx.status.beat()`` in every turn of its work loop, also while it waits;
- report "ready" once it works, and stop soon after ``ctx.stopping()`` turns true;
- raise `UserError` for a problem that the user must correct; any other exception is a fault.

The learner is asked to stop twice: the supervisor sends {"kind": "finish"} with the signal, when
every actor and connector has ended and was named in an "actor_ended" message. Several learners are
sent {"kind": "saver", "rank": ...} before, which names the one that saves the run. The others wait
until it has ended, and are sent the next rank if it has died. A parameter server is sent
{"kind": "finish"} when all learners have ended.

Where the run is over, as it has reached a limit, connectors and learners are sent {"kind": "over"}
before the signal. They tell the actors that were started by hand.

The evaluator is sent {"kind": "finish"} without a signal, when the last checkpoint is written: it
evaluates that and ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.control import Channel, Message

if TYPE_CHECKING:
    from penstock.configs.schema import Config
    from penstock.profiling.ledger import TimeLedger
    from penstock.profiling.status import StatusPage

# The exit code of a role that lost its learner: it is restarted at once.
EXIT_REJOIN = os.EX_TEMPFAIL
# The lowest bits of the id of an actor that was started by hand are its index.
ACTOR_INDEX_BITS = 16
# The error of a role that ends because its shim was damaged.
LOST_SHIM = "a process of its shim was killed"
# The kinds of messages that wait for room in the supervisor's socket.
URGENT = frozenset(
    {
        "checkpoint", "entered", "error", "evaluation", "final", "group_failed", "join", "ready",
        "save_failed", "stop", "verdict",
    }
)  # fmt: skip
# The longest wait for that room.
URGENT_PATIENCE_S = 5.0


class RunEndedError(Exception):
    """The run cannot continue, through no fault of the program or its user.

    The message is one sentence; the exit code is 1.
    """


def learner_socket(runtime_dir: Path, rank: int) -> Path:
    """Returns the path of the Unix socket of the learner with that rank."""
    return runtime_dir / f"learner-{rank}.sock"


def relay_socket(runtime_dir: Path, rank: int) -> Path:
    """Returns the path of the Unix socket of the relay that serves the learner with that rank."""
    return runtime_dir / f"relay-{rank}.sock"


@dataclass(frozen=True)
class StoreAddress:
    """The meeting point of learners on several machines: a torch TCPStore.

    Rank 0 serves it unless it is ``served`` already (by torchrun). ``attempt`` counts how often all
    learners were restarted: keys of an earlier attempt are void.
    """

    host: str
    port: int
    served: bool = False
    attempt: int = 0


@dataclass
class RoleContext:
    """The arguments of one role's process, and its channel to the supervisor.

    An actor may be moved to another learner (`leaving`, `follow`). Everything else is fixed while
    the process runs.
    """

    role: str
    index: int
    incarnation: int
    """It is higher at each start of the role."""
    run_id: int
    run_dir: Path
    runtime_dir: Path
    """The folder for sockets. It has mode 0700, and a path short enough for Unix sockets."""
    channel: Channel
    status: StatusPage
    config: Config | None = None
    """None if it is received in the learner's handshake."""
    address: str | None = None
    """Where a connector binds, and an actor or relay connects; None for other roles."""
    resume: str = "no"
    """Whether to resume from the last checkpoint: "no", "auto" or "must"."""
    transport: str = "auto"
    """The transport of an actor."""
    curve: Path | None = None
    """A folder of keys."""
    insecure: bool = False
    """A permission of an actor started by hand, as in `configs.code_references.check`."""
    allow: tuple[str, ...] = ()
    """A permission likewise."""
    learner: int = 0
    """The rank of the learner that this role is, or belongs to."""
    store: StoreAddress | None = None
    """None if one supervisor names the groups of learners."""
    meets_at: str | None = None
    """As in `RoleSpec`."""
    servers: tuple[str, ...] = ()
    """As in `RoleSpec`."""
    listen: Mapping[str, Any] | None = None
    """As in `RoleSpec`."""
    group_begun: bool = False
    """Whether a learner was started after others had formed a group, and the trained state is
    theirs."""
    wait_s: float | None = None
    """How long an actor started by hand waits for its learner; None: without limit."""
    holds_state: bool = False
    """A learner sets it while it alone has the trained state. It is then given time to save when a
    process of its shim has died."""
    shim_died: bool = False
    """It turns true when a process of the shim has died."""
    _stopping: bool = False  # a plain flag: a signal handler must not take a lock
    _gives_up_s: float | None = None  # when it has waited for its learner for ``wait_s``
    _next_learner: Message | None = None  # the learner that the supervisor named last

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @cached_property
    def ledger(self) -> TimeLedger:
        """The time ledger of the main thread."""
        return self.status.ledger("main")

    def stopping(self) -> bool:
        """Returns whether to end now, after a signal or when the supervisor is gone. Cheap."""
        return self._stopping

    def stop(self) -> None:
        """Ask this role to end; called by the signal handler."""
        self._stopping = True

    def leaving(self) -> bool:
        """Read the messages; returns whether an actor must leave its learner.

        It must if it stops, if it was moved to another learner, or if it has waited for too long.
        """
        for message in self.messages():
            if message["kind"] == "learner":
                self._next_learner = message
        return self._stopping or self._next_learner is not None or self.gave_up

    def begin_wait(self) -> None:
        """Begin to wait for the learner, at most ``wait_s`` seconds."""
        self._gives_up_s = None if self.wait_s is None else time.monotonic() + self.wait_s

    def end_wait(self) -> None:
        """End the wait, as the learner has answered."""
        self._gives_up_s = None

    @property
    def gave_up(self) -> bool:
        """Whether the role has waited for its learner for ``wait_s`` seconds."""
        return self._gives_up_s is not None and time.monotonic() >= self._gives_up_s

    def follow(self) -> None:
        """Join the learner that the supervisor named last, under a new incarnation."""
        if self._next_learner is not None:
            self.learner = self._next_learner["index"]
            self.address = self._next_learner["address"]
            self.incarnation = self._next_learner["incarnation"]
            self._next_learner = None

    def report(self, kind: str, **fields: Any) -> bool:
        """Send a message to the supervisor; returns whether it was sent.

        If the supervisor's socket is full, `URGENT` kinds wait for room, and others are dropped.
        """
        patience_s = URGENT_PATIENCE_S if kind in URGENT else 0.0
        return self.channel.send({"kind": kind, **fields}, patience_s)

    def event(self, kind: str, text: str, **data: Any) -> bool:
        """Add one event to the run's `logs/events.jsonl`; never waits.

        Args:
            kind: one word, the same for all events of its kind, such as "refused".
            text: one sentence for the user.
            data: further JSON values.

        Returns:
            Whether the supervisor's socket had room for it.
        """
        return self.report("event", event=kind, text=text, data=data)

    def messages(self) -> list[Message]:
        """Returns the messages from the supervisor since the last call; never waits."""
        messages = self.channel.receive()
        if self.channel.closed:
            self._stopping = True
        return messages

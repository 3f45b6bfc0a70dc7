"""How samples and weights travel between actors and a learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy.typing as npt

    from penstock.configs.schema import Config
    from penstock.core.params import Float32, ParamLayout, Stamp
    from penstock.core.role import RoleContext
    from penstock.core.specs import SlotSpec
    from penstock.transport.shm.store import Slot


SlotProcessor = Callable[[dict[str, "npt.NDArray[Any]"]], None]
"""Checks the columns of a filled slot, and prepares them for training in place."""


@dataclass(frozen=True)
class Welcome:
    """Description of a learner, sent to an actor that joins."""

    run_id: int
    generation: int
    spec: SlotSpec
    layout: ParamLayout
    config: Mapping[str, Any]
    spaces: Sequence[Any] | None = None
    """The environment's spaces of observations and of actions (`envs.space_json.brief_spaces`);
    None from a learner of 0.1."""
    chairs: int = 0
    """The number of opponents' policies that the learner publishes, as policy ids 1 to `chairs`.
    All have `layout`."""


class LearnerGoneError(Exception):
    """The learner ended or was replaced by another run; the actor must join again."""


class RunOverError(LearnerGoneError):
    """The learner has said that its run has reached its end: no other learner takes its place."""


class UnknownPolicyError(Exception):
    """The learner publishes no policy of this id."""

    def __init__(self, policy_id: int) -> None:
        super().__init__(f"the learner publishes no policy {policy_id}")
        self.policy_id = policy_id


class Link(Protocol):
    """An actor's connection to its learner: slots one way, weights the other.

    Calls come from one thread, in this order:

        read_weights(out, None)             until there are some
        slot(timeout_s)                     one at a time: the block is left before the next call,
            read_weights(out, stamp)        within it, before the unroll begins,
            beat()                          and then about once a second, until it is full
        close()                             last

    The block may also be left without a slot (None), and `beat` is called while there are no
    weights. Where slots are lent for one batch at a time (`configs.policy_lag`), a slot is not lent
    before `read_weights` returns the weights that were published before the store lent it.

    A call that raises LearnerGoneError raises RunOverError if the learner has said that its run is
    over, which a transport need not pass on: the actor then waits for another learner.
    """

    welcome: Welcome
    fills_store: bool
    """Whether slots are the learner's own memory.

    If so, the actor calls the algorithm's `process`, otherwise the connector does.
    """

    def slot(self, timeout_s: float) -> AbstractContextManager[Slot | None]:
        """Lend a slot to fill; None when none was granted within ``timeout_s`` seconds.

        Leaving the block publishes the slot; an exception inside does not. Raises LearnerGoneError.
        """

    def beat(self) -> None:
        """Send a heartbeat; call it between environment steps, about once a second.

        Grants of an actor that is silent for longer may be given to others. Raises
        LearnerGoneError.
        """

    def read_weights(
        self, out: Float32, newer_than: Stamp | None, policy_id: int = 0
    ) -> Stamp | None:
        """Copy the newest weights of a policy into ``out`` (float32 ``[layout.size]``).

        Returns their stamp, or None, without copying, when there are none newer than
        ``newer_than``. Raises UnknownPolicyError, at once or in a later call.
        """

    def close(self) -> None:
        """Leave; slots that were published are still delivered."""


class LearnerInfo(NamedTuple):
    """Description of a learner, for an actor that has only its address; not validated."""

    config: object
    """The run's config, as JSON."""
    unix_path: str = ""
    """The learner's socket for shared memory, where it is on this host."""
    release: str = ""
    """The learner's release of Penstock; empty from 0.1.0, which does not send it."""


class Transport(Protocol):
    """How actors reach a learner. `TransportSpec.entry_point` names a class without parameters.

    A supervisor gives its actors config and address, and they only `connect`; an actor started by
    hand asks for the config first.
    """

    def ask(self, ctx: RoleContext, address: str) -> LearnerInfo:
        """Fetch the description of the learner at ``address``. Raises what `connect` raises."""

    def connect(
        self, ctx: RoleContext, address: str, config: Config, spec: SlotSpec, actor: int
    ) -> Link:
        """Join as ``actor``, unique among all actors of the run, with slots of ``spec``.

        Raises OSError while there is no learner, and is then called again; UserError when the
        learner refuses; LearnerGoneError when ``ctx.leaving()`` turns true meanwhile.
        """


class Connector(Protocol):
    """The main function of a role that takes in what actors send, for one learner.

    It listens at ``ctx.address``, and is attached to the learner's memory like an actor
    (`transport.shm.link.ShmLink`, at `core.role.learner_socket`): received slots are written into
    lent ones, and weights are read from the board. Where slots are lent for one batch at a time,
    a slot is lent for the newest weights of the board, and one that no present actor wants is
    returned (`SlotWriter.return_unfilled`), because the learner waits for it.
    """

    def __call__(self, ctx: RoleContext, prepare: Callable[[Welcome], SlotProcessor]) -> None:
        """Receive until ``ctx.stopping()``; SystemExit(EXIT_REJOIN) when the learner has gone.

        No received message raises: a bad one is dropped and counted. The processor that
        ``prepare`` returns is called with the columns of every slot before it is published, and
        raises for values that must not be trained on.
        """

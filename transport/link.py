"""The seam between an actor and its transport: slots one way, weights the other.

`Link` is all that an actor knows. Three implementations stand behind it and pass one contract test
(tests/contract): `transport.inproc`, `transport.shm.link` and `transport.zmq.link`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.params import Float32, ParamLayout
from penstock.core.params import Stamp as Stamp
from penstock.core.specs import SlotSpec
from penstock.transport.shm.store import Slot


@dataclass(frozen=True)
class Welcome:
    """What a learner tells whoever joins it."""

    run_id: int
    generation: int
    spec: SlotSpec
    layout: ParamLayout
    config: Mapping[str, Any]


class LearnerGoneError(Exception):
    """The learner ended or was replaced by another run; join again."""


class Link(Protocol):
    """An actor's connection to its learner. One thread at a time."""

    welcome: Welcome
    fills_store: (
        bool  # slots are the learner's own memory, so the algorithm's `process` is due here
    )

    def slot(self, timeout_s: float) -> AbstractContextManager[Slot | None]:
        """A slot to fill, or None when none was granted in time.

        Leaving the block publishes the slot; an exception inside does not. Raises LearnerGoneError.
        """

    def beat(self) -> None:
        """Say that this actor plays on; between environment steps, about once a second. Whatever
        was granted to an actor that is silent for longer may be given to others. Raises
        LearnerGoneError."""

    def read_weights(self, out: Float32, newer_than: Stamp | None) -> Stamp | None:
        """Copy the newest weights into ``out`` (float32 ``[layout.size]``) and return their stamp.

        None, and nothing copied, when there are none newer than ``newer_than``.
        """

    def close(self) -> None:
        """Leave; slots that were published are still delivered."""

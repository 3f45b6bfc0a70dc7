"""The section `transport`: how samples and weights travel between actors and a learner.

A transport is known to the config by a `TransportSpec`, registered in `TRANSPORTS`
(`configs.registry`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from penstock.configs.registry import Registry
from penstock.configs.section import Section
from penstock.configs.value_types import (
    Address,
    Count,
    Natural,
    Small,
    Switch,
    Text,
    ValueDescription,
)

MAX_CONNECTORS = 16  # most connectors of a learner, which keeps lanes for as many
Connectors = Annotated[
    Count, Field(le=MAX_CONNECTORS), ValueDescription(f"a whole number from 1 to {MAX_CONNECTORS}")
]
AUTO = "auto"
"""Value of `kind` that stands for a choice by the host of the actor (`TransportSpec.auto`)."""


@dataclass(frozen=True, eq=False)
class TransportSpec:
    """What the config knows of a transport without importing it."""

    name: str
    means: str
    """Description for the docs: the end of the sentence "`name` is ..."."""
    entry_point: str | None = None
    """``module:Class`` of a `core.interfaces.Transport`, imported in an actor. None: the run is one
    process (`launch.lockstep`), whose actors and learner take turns."""
    connector: str | None = None
    """``module:function``, a `core.interfaces.Connector`: the role that receives slots for a
    learner. None: actors write into the learner's memory, and only actors of its host can join."""
    relay: str | None = None
    """``module:function``, the main function of a role that fetches weights for all actors of a
    host. None: each actor fetches its own."""
    auto: Literal["this host", "other hosts"] | None = None
    """Where actors must run for `auto` to choose this transport; one transport for each place."""

    @property
    def one_process(self) -> bool:
        """Whether actors and learner take turns in one process."""
        return self.entry_point is None

    @property
    def reaches_other_hosts(self) -> bool:
        """Whether actors join at an address, `transport.bind`."""
        return self.connector is not None


class TransportRegistry(Registry[TransportSpec]):
    """The transports."""

    def register(self, spec: TransportSpec) -> None:
        """Add a spec. Raises ValueError also if another spec has the same `auto`."""
        if spec.auto and any(spec.auto == other.auto for other in self._specs.values()):
            raise ValueError(f"transport {spec.name}: auto takes another one for {spec.auto}")
        super().register(spec)

    @property
    def joined_by_hand(self) -> tuple[str, ...]:
        """Values of `penstock actor --transport`."""
        return AUTO, *(name for name, spec in self.specs.items() if not spec.one_process)

    def same_host_spec(self, kind: str) -> TransportSpec:
        """Returns the transport of the run's own actors, which are on the learner's host."""
        return self._auto("this host") if kind == AUTO else self.specs[kind]

    def other_hosts_spec(self, kind: str) -> TransportSpec:
        """Returns the transport of actors that know only a learner's address."""
        spec = self.same_host_spec(kind)
        return spec if spec.reaches_other_hosts else self._auto("other hosts")

    def one_process(self, kind: str) -> bool:
        """Whether actors and learner take turns in one process; false for an unknown ``kind``."""
        return kind in self.specs and self.specs[kind].one_process

    def listed(self) -> str:
        """Returns the transports in words: "`a` is ..., `b` ...;"."""
        text = ", ".join(f"`{spec.name}` {spec.means}" for spec in self.specs.values())
        return f"{text.replace('` ', '` is ', 1)};"

    def _auto(self, place: str) -> TransportSpec:
        """Returns the transport that `auto` chooses for actors on ``place``."""
        return next(spec for spec in self.specs.values() if spec.auto == place)


TRANSPORTS = TransportRegistry("transport", reserved=(AUTO,))


class TransportConfig(Section):
    """How samples travel from the actors to the learner."""

    kind: Annotated[str, TRANSPORTS] = AUTO
    """`auto` uses shared memory on the learner's host and ZeroMQ between hosts."""
    slots: Small = 2
    """Slots lent to each actor at a time. With 1 an actor waits until its slot was taken, so
    samples are fresh; with 2 it fills one while the other waits. More need more memory and add
    policy lag."""
    overflow: Literal["block", "drop_stale"] = "block"
    """What the learner does when slots arrive faster than it trains: `block` makes the actors wait,
    `drop_stale` drops the oldest waiting slots. Dropped steps are counted."""
    max_policy_lag: Natural = 1000
    """Greatest policy lag, in optimizer steps, that a slot may have when its batch is gathered. No
    more slots are lent at a time than keep it, so with a low value actors wait for each other.
    Slots of a slower actor can still be older; they are dropped and counted. Below the optimizer
    steps of a batch (`learner.updates_per_batch` x epochs), slots are lent for one batch at a time:
    when the learner has this many steps of the present batch left, it publishes its weights, and
    actors play the next batch with them. Choose about as many steps as the learner takes while
    actors play a batch. 0 is the synchronous mode: actors play after the last step, while the
    learner waits. Below the steps of a batch `learner.publish_every` and `learner.prefetch` have no
    effect."""
    codec: Literal["auto", "snappy", "none"] = "auto"
    """Compression of samples sent over the network; `auto` decides for each column by the bytes
    saved."""
    frame_stack: Count | None = None
    """Number of frames stacked in each observation along its first axis (4 for Atari). Each frame
    is then written, sent and stored once, and the learner rebuilds the stacks. null: observations
    are sent whole."""
    connectors: Connectors | Literal["auto"] = 1
    """Processes per learner that receive samples over the network, each from a part of the actors.
    Actors join at `bind`, where the first listens and sends some of them on to the others; their
    ports follow that of `bind`: `bind` + `learner.count` x number + rank. `auto` times, before the
    run starts, what receiving takes and what the learner trains, and takes as many as keep up with
    it and have a core. It is for the learners of one host."""
    bind: Address | None = None
    """Address at which the learner listens for actors on other hosts; null: only actors on this
    host."""
    insecure: Switch = False
    """Whether `bind` may be an address that other hosts reach, without keys. Use it on trusted
    networks only."""
    curve: Text | None = None
    """Folder with the CURVE keys of this run (`penstock keys new`); null: no encryption."""

    @property
    def first_connectors(self) -> int:
        """Connectors of each learner. With `auto` this is 1; a run's config has the timed number
        instead of `auto`."""
        return 1 if self.connectors == "auto" else self.connectors

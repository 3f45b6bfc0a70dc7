"""One process of a run, as data: its name, its main function, and when it is stopped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from penstock.core.role import Store


class Stage(IntEnum):
    """The order in which roles are stopped: producers first, consumers last. The evaluator is after
    them, as it plays the learners' last checkpoint."""

    ACTORS = 0
    CARRIERS = 1
    LEARNER = 2
    SERVER = 3
    EVALUATOR = 4


@dataclass(frozen=True)
class RoleSpec:
    """One process of a run. ``main`` is ``module:function``, called with its `RoleContext`.

    When an `essential` role ends, the run ends, unless other learners continue. A ``spare`` role is
    started only when the run needs more of its kind, or has a host for it. ``learner`` is the rank
    of the learner that the role is or belongs to. ``informed`` roles receive messages about that
    learner's actors and connectors; an ``expendable`` one never ends a run. One that ``relays`` is
    on a host of actors, and brings them what its learner publishes. ``address`` is where to bind or
    connect; for a learner, where its actors connect. ``servers`` are the addresses of the
    shards of a learner's parameter server; with a ``store``, of those that the learner's own
    supervisor starts. ``meets_at`` is the ``host:port`` at which a learner
    serves the meeting of a group that it leads; None where all learners are on one host. ``gpus``
    must be on its host.
    """

    role: str
    index: int
    main: str
    stage: Stage
    nice: int = 0
    threads: int = 1
    address: str | None = None
    informed: bool = False
    learner: int = 0
    store: Store | None = None
    expendable: bool = False
    spare: bool = False
    relays: bool = False
    gpus: int = 0
    meets_at: str | None = None
    servers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def essential(self) -> bool:
        """Whether it holds state of the run."""
        return self.stage in (Stage.LEARNER, Stage.SERVER)

    @property
    def joins(self) -> bool:
        """Whether it connects to its learner with the keys of actors, maybe from another host."""
        return self.stage is Stage.ACTORS or self.relays

    @property
    def listens(self) -> bool:
        """Whether `address` is its own, to which others connect."""
        carries = self.stage is Stage.CARRIERS and not self.relays
        return self.address is not None and (carries or self.stage is Stage.SERVER)

    @property
    def yields(self) -> bool:
        """Whether it leaves its core to a learner that has something to do."""
        return self.stage in (Stage.ACTORS, Stage.EVALUATOR)

"""One process of a run, as data: its name, its main function, and when it is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from penstock.core.role import StoreAddress


class Stage(IntEnum):
    """The order in which roles are stopped: producers first, consumers last.

    The evaluator is the last, as it plays the learners' last checkpoint.
    """

    ACTORS = 0
    CARRIERS = 1
    LEARNER = 2
    SERVER = 3
    EVALUATOR = 4


@dataclass(frozen=True)
class RoleSpec:
    """One process of a run.

    When an `essential` role ends, the run ends, unless other learners continue.
    """

    role: str
    """The kind of role, such as "actor"."""
    index: int
    """The number of the role among those of its kind."""
    main: str
    """The main function as ``module:function``; it is called with the role's `RoleContext`."""
    stage: Stage
    nice: int = 0
    """The niceness of the process."""
    threads: int = 1
    """The number of threads for computation."""
    address: str | None = None
    """Where to bind or connect; for a learner, where its actors connect."""
    informed: bool = False
    """Whether it receives messages about the actors and connectors of its learner."""
    learner: int = 0
    """The rank of the learner that the role is or belongs to."""
    store: StoreAddress | None = None
    """The meeting point of learners with several supervisors."""
    expendable: bool = False
    """Whether its failure never ends a run."""
    spare: bool = False
    """Whether it is started only when the run needs more of its kind, or has a host for it."""
    relays: bool = False
    """Whether it is on a host of actors, and brings them what its learner publishes."""
    gpus: int = 0
    """The number of GPUs that must be on its host."""
    meets_at: str | None = None
    """The ``host:port`` at which a learner serves the meeting of a group that it leads.

    None if all learners are on one host.
    """
    servers: tuple[str, ...] = ()
    """The addresses of the shards of a learner's parameter server; with a ``store``, of those that
    the learner's own supervisor starts."""
    listen: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    """Whom a role that games connect to serves, as keywords of `core.web.listen.Listen`.

    They have the token of the games, so no file, log or command line may have them.
    """

    @property
    def name(self) -> str:
        """The name of the role in messages and files, such as "actor-3"."""
        return f"{self.role}-{self.index}"

    @property
    def essential(self) -> bool:
        """Whether the role holds state of the run."""
        return self.stage in (Stage.LEARNER, Stage.SERVER)

    @property
    def joins(self) -> bool:
        """Whether the role connects to its learner with the keys of actors, from any host."""
        return self.stage is Stage.ACTORS or self.relays

    @property
    def listens(self) -> bool:
        """Whether `address` is the role's own, to which others connect."""
        is_connector = self.stage is Stage.CARRIERS and not self.relays
        return self.address is not None and (is_connector or self.stage is Stage.SERVER)

    @property
    def yields(self) -> bool:
        """Whether the role leaves its core to a learner that has something to do."""
        return self.stage in (Stage.ACTORS, Stage.EVALUATOR)

"""The pace of learners with a parameter server: how one learner finds all shards and joins them.

On one host the supervisor names the shards. On several machines each learner has shards beside it,
whose addresses it publishes in the store where the learners meet.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.configs.errors import UserError
from penstock.configs.schedules import over_run
from penstock.core.role import RunEndedError
from penstock.learner.extras.parameter_server.client import ServerClient
from penstock.learner.extras.parameter_server.served import LOST_S, Served
from penstock.learner.extras.parameter_server.server import keys_for
from penstock.learner.group.collective import as_group_lost
from penstock.learner.group.process_group import (
    LearnerGroup,
    foreign_value,
    hello_of,
    meet,
    read_value,
)
from penstock.learner.group.remote_store import AGAIN, REREAD_S, could_not_meet, open_store
from penstock.learner.sync.gradient_sync import ControlMessage, GradientSync, GroupLostError
from penstock.learner.sync.pace import PaceContext

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

ADDRESS = re.compile(r"tcp://[^\s/]{1,255}:[0-9]{1,5}")
SERVER_READY = "server_ready"  # key of the store, set when the server has the state of rank 0
POLL_S = 0.005  # seconds between two looks at the store


class ServedPace:
    """Joins a parameter server: a `core.interfaces.Pace`."""

    def __init__(self, context: PaceContext) -> None:
        self._ctx, self._config, self._trainer = context
        self._store: Store | None = None  # where learners of several machines meet

    def join(self, group: LearnerGroup | None, source: int = 0) -> GradientSync | None:
        """Connect to the server, and take its state or give it this learner's.

        Returns the learner's sync; None if the run ends before there is one.
        """
        ctx = self._ctx
        progress = self._trainer.progress
        servers = ctx.servers if ctx.store is None else self._meet()
        if not servers:
            return None

        cfg = over_run(self._config.learner, self._config.stop.env_steps)
        (optimizer,) = self._trainer.optimizers().values()
        client = ServerClient(
            servers,
            ctx.learner,
            optimizer,
            cfg,
            version=progress.version,
            samples=progress.trained_steps,
            tally=tuple(progress.totals()),
            curve=keys_for(servers[0], self._config.transport.curve),
        )

        def waiting() -> bool:
            """Called during waits; returns whether to continue."""
            if ctx.store is not None and not ctx.stopping():
                self._raise_if_unreached(client, servers)
            return self._continues()

        progress.share_window(cfg.most_count)
        sync = Served(
            client,
            optimizer,
            progress,
            world=cfg.most_count,
            ledger=ctx.ledger,
            waiting=waiting,
        )

        # The first exchange gives the server this learner's state if it needs it.
        nothing = ControlMessage(np.zeros(0), progress.growth())
        answer = sync.sync_control(nothing)
        progress.commit(nothing.growth, answer.growth)
        if self._store is not None and ctx.learner == 0:
            self._store.set(SERVER_READY, "")
        if answer.stop:
            sync.close()
            return None
        return sync

    def _meet(self) -> tuple[str, ...]:
        """Meet the learners of the other machines.

        Rank 0 joins the server first, as it has the checkpoint; the others return when it has.

        Returns:
            The addresses of all shards; an empty tuple where the run ends before.

        Raises:
            UserError: if the learners do not meet in time, or do not fit each other.
        """
        ctx = self._ctx
        cfg = self._config.learner
        assert ctx.store is not None
        timeout_s = self._config.run.start_timeout_s
        store = open_store(ctx.store, ctx.learner, timeout_s, self._continues)
        self._store = store
        if store is None:
            return ()

        failure = ""
        servers: tuple[str, ...] = ()
        try:
            with as_group_lost("the meeting"):
                publish_servers(store, ctx.learner, ctx.servers)
            hello = hello_of(self._config, self._trainer.device)
            members = range(cfg.most_count)
            meet(store, members, ctx.learner, hello, timeout_s, self._continues)
            with as_group_lost("the meeting"):
                servers = all_servers(store, cfg.most_count, cfg.server_shards)
                while ctx.learner != 0 and not store.check([SERVER_READY]):
                    if not self._continues():
                        return ()
                    time.sleep(POLL_S)
        except GroupLostError as error:
            failure = str(error)
        except UserError:
            time.sleep(REREAD_S)
            raise

        # Raised here, as a cause with its traceback would hold the connections open.
        if failure:
            if not ctx.stopping():
                raise could_not_meet(ctx.store, failure)
            return ()
        return servers

    def _raise_if_unreached(self, client: ServerClient, servers: Sequence[str]) -> None:
        """Raise an error for a shard without a connection: no supervisor knows those of the others.

        Raises:
            UserError: if a shard was never reached within `run.start_timeout_s`.
            RunEndedError: if the connection to a shard was lost for `LOST_S` seconds.
        """
        unreached = client.unreached()
        if unreached is None:
            return

        rank = unreached.shard % self._config.learner.most_count
        name = f"shard {unreached.shard} of the parameter server, with rank {rank},"
        limit_s = self._config.run.start_timeout_s
        if unreached.was_reached and unreached.seconds > LOST_S:
            raise RunEndedError(f"{name} has ended or cannot be reached; {AGAIN}")
        if not unreached.was_reached and unreached.seconds > limit_s:
            raise UserError(
                f"{name} does not answer at {servers[unreached.shard]} within "
                f"run.start_timeout_s = {limit_s:g} s; see that no firewall is between, and that "
                "all ranks have the same keys in transport.curve"
            )

    def _continues(self) -> bool:
        """Send a heartbeat; returns whether the run continues."""
        self._ctx.status.beat()
        return not self._ctx.stopping()


def publish_servers(store: Store, rank: int, addresses: Sequence[str]) -> None:
    """Tell the other learners where the shards listen that are with learner ``rank``.

    ``addresses`` are in the order of the shards' numbers.
    """
    store.set(f"servers-{rank}", json.dumps(list(addresses)))


def all_servers(store: Store, learners: int, shards: int) -> tuple[str, ...]:
    """Returns the addresses of all ``shards``, when all ``learners`` have published theirs.

    Shard i is with rank i mod ``learners``.

    Raises:
        UserError: for what no learner has written: the store takes values from any client.
    """
    addresses: list[str] = [""] * shards
    for rank in range(min(learners, shards)):
        published = read_value(store.get(f"servers-{rank}"), rank)
        shards_of_rank = len(range(rank, shards, learners))
        if not isinstance(published, list) or len(published) != shards_of_rank:
            raise foreign_value(rank)

        if not all(isinstance(value, str) and ADDRESS.fullmatch(value) for value in published):
            raise foreign_value(rank)
        addresses[rank::learners] = published
    return tuple(addresses)

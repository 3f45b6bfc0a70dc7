"""How an actor finds its learner: shared memory on the same host, ZeroMQ from elsewhere.

Roles start in any order, so an actor waits for its learner for ever; one that was started by hand
says so once. A learner of the same supervisor is watched by that.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from penstock.configs import code_references
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.role import RoleContext, learner_socket, relay_socket
from penstock.core.specs import SlotSpec
from penstock.transport.link import LearnerGoneError, Link
from penstock.transport.shm.link import ShmLink

T = TypeVar("T")

RETRY_S = 0.02
SAY_SO_AFTER_S = 3.0


@dataclass(frozen=True)
class Found:
    """A learner: the run's config, and its Unix socket where it is to be joined through memory."""

    config: Config
    unix_path: Path | None


def find(ctx: RoleContext) -> Found:
    """Learn the config and the way; asks a learner at ``ctx.address`` when started by hand.

    Raises UserError for a config that cannot be read, or that names code which ``ctx`` does not
    allow, before anything of it is imported; LearnerGoneError when told to leave meanwhile.
    """
    if ctx.address is None:
        assert ctx.config is not None
        return Found(ctx.config, learner_socket(ctx.runtime_dir, ctx.learner))
    if ctx.config is not None:
        return Found(ctx.config, None)
    from penstock.transport.zmq.client import Client
    from penstock.transport.zmq.sockets import boot_id

    source = f"the learner at {ctx.address}"
    trusted = _trusts(ctx, ctx.address, source)
    client = Client(ctx, ctx.address)
    try:
        client.join()
        config = _read_config(client.welcome.config, source)
        code_references.check(
            config, ctx.allow, trusted=trusted and _trusts(ctx, ctx.address, source), source=source
        )
        path = _own_socket(client.unix_path)
        reachable = client.boot_id == boot_id() and path is not None
    finally:
        client.close()
    if ctx.transport == "shm" and not reachable:
        raise UserError(
            f"transport shm needs the learner at {ctx.address} on this host and of this user; "
            "use --transport auto or zmq"
        )
    return Found(config, path if reachable and ctx.transport != "zmq" else None)


def _trusts(ctx: RoleContext, address: str, source: str) -> bool:
    """Whether only the user can answer at ``address``, or the user says that it does not matter.

    Waits until there is a folder for an ``ipc://`` path, so that it is judged before it is used.
    """
    from penstock.transport.zmq.sockets import is_own_ipc

    if ctx.curve is not None or ctx.insecure:
        return True
    found = wait_for(lambda: [is_own_ipc(address)], ctx, source)
    if found is None:
        raise LearnerGoneError("left before a learner was found")
    return found[0]


def _read_config(received: object, source: str) -> Config:
    try:
        return Config.model_validate(received)
    except ValidationError as error:
        first = error.errors()[0]
        option = code_references.shown(".".join(map(str, first["loc"])))
        raise UserError(
            f"the config that {source} sent cannot be read (option {option}: {first['type']}); use "
            "the same release of Penstock on both sides"
        ) from error


def _own_socket(text: object) -> Path | None:
    """The path of a Unix socket of this user; None where it is something else."""
    try:
        path = Path(str(text))
        found = path.stat()
    except (OSError, ValueError):
        return None
    return path if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid() else None


def join(ctx: RoleContext, found: Found, spec: SlotSpec, actor: int) -> Link | None:
    """Join as ``actor`` with slots of ``spec``; None when told to leave before that worked."""
    config, path = found.config, found.unix_path
    if path is not None:
        whom = None if ctx.address is None else f"the learner at {path}"
        return wait_for(lambda: ShmLink(path, spec, config.transport.slots), ctx, whom)
    from penstock.transport.zmq.link import ZmqLink

    assert ctx.address is not None
    return ZmqLink(
        ctx,
        ctx.address,
        spec,
        config.transport.slots,
        actor=actor,
        relay_path=relay_socket(ctx.runtime_dir, ctx.learner),
        codec=config.transport.codec,
        patience_s=config.run.hang_timeout_s,
    )


def wait_for(connect: Callable[[], T], ctx: RoleContext, whom: str | None) -> T | None:
    """Call ``connect`` until it no longer raises OSError; None when told to leave. Tell the user if
    that takes long, where ``whom`` says who it waits for."""
    since_s = time.monotonic()
    said = False
    while not ctx.leaving():
        ctx.status.beat()
        try:
            return connect()
        except (OSError, LearnerGoneError):
            if whom and not said and time.monotonic() - since_s > SAY_SO_AFTER_S:
                said = ctx.report("note", text=f"{ctx.name} waits for {whom}")
            time.sleep(RETRY_S)
    return None

"""How an actor finds its learner, and by which transport it joins.

Roles start in any order, so an actor waits for its learner without limit, unless `penstock actor`
has one (--wait); one that was started by hand prints that once. The supervisor watches its own
learners.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from pydantic import ValidationError

from penstock import __version__
from penstock.configs import code_references
from penstock.configs.errors import UserError
from penstock.configs.for_actors import read_for_actor
from penstock.configs.schema import Config
from penstock.configs.transports import AUTO
from penstock.core.interfaces import LearnerGoneError, LearnerInfo, Link, Transport
from penstock.core.role import RoleContext, learner_socket
from penstock.core.specs import SlotSpec
from penstock.transport.addresses import is_own_ipc
from penstock.transport.registry import TRANSPORTS, make_transport

T = TypeVar("T")

# The interval between two tries.
RETRY_S = 0.02
# Errors for which another try does not help: the host lacks memory or descriptors.
EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
# After so long a wait, the user is told what is waited for.
SAY_SO_AFTER_S = 3.0


@dataclass(frozen=True)
class LearnerEndpoint:
    """Where an actor joins a learner."""

    config: Config
    """The config of the learner's run."""
    transport: Transport
    address: str
    """Of the learner, as the transport takes it."""


def find_learner(ctx: RoleContext) -> LearnerEndpoint:
    """Find the learner that an actor joins.

    An actor of a run has the config already, and joins the learner of its supervisor. An actor that
    was started by hand asks the learner at ``ctx.address`` for it.

    Raises:
        UserError: the config cannot be read, or names code which ``ctx`` does not allow; that is
            found before any of it is imported.
        LearnerGoneError: this role is asked to leave meanwhile.
    """
    if ctx.config is not None:
        return _own_learner(ctx, ctx.config)

    # The config is asked for over the transport that reaches other hosts.
    assert ctx.address is not None
    source = f"the learner at {ctx.address}"
    ctx.begin_wait()
    trusted = _trusts(ctx, ctx.address, source)
    remote = make_transport(TRANSPORTS.other_hosts_spec(ctx.transport))
    info = _wait_for_answer(partial(remote.ask, ctx, ctx.address), ctx, source)
    ctx.end_wait()

    # Another listener may have come since the first look at the folder, so that is repeated.
    config = _read_config(info, source)
    trusted = trusted and _trusts(ctx, ctx.address, source)
    code_references.check(config, ctx.allow, trusted=trusted, source=source)

    # A learner of this host and user is joined by its shared memory, if the options allow it.
    on_host = TRANSPORTS.same_host_spec(ctx.transport)
    if on_host.reaches_other_hosts:
        return LearnerEndpoint(config, remote, ctx.address)
    if path := _own_socket(info.unix_path):
        return LearnerEndpoint(config, make_transport(on_host), path)
    if ctx.transport != AUTO:
        raise UserError(
            f"transport {on_host.name} needs the learner at {ctx.address} on this host and of this "
            "user; use --transport auto or zmq"
        )
    return LearnerEndpoint(config, remote, ctx.address)


def _own_learner(ctx: RoleContext, config: Config) -> LearnerEndpoint:
    """Return where to join the learner of the same supervisor."""
    kind = config.transport.kind
    if ctx.address is not None:
        return LearnerEndpoint(
            config, make_transport(TRANSPORTS.other_hosts_spec(kind)), ctx.address
        )
    path = str(learner_socket(ctx.runtime_dir, ctx.learner))
    return LearnerEndpoint(config, make_transport(TRANSPORTS.same_host_spec(kind)), path)


def _wait_for_answer(ask: Callable[[], T], ctx: RoleContext, peer: str) -> T:
    """Return what ``ask`` returns, as `wait_for`; raise LearnerGoneError when asked to leave."""
    answer = wait_for(ask, ctx, peer)
    if answer is None:
        raise LearnerGoneError("left before a learner was found")
    return answer


def _trusts(ctx: RoleContext, address: str, source: str) -> bool:
    """Whether only the user can answer at ``address``, or the user has allowed any answer.

    Waits until the folder of an ``ipc://`` path exists, so that it is checked before it is used.
    """
    if ctx.curve is not None or ctx.insecure:
        return True
    return _wait_for_answer(partial(is_own_ipc, address), ctx, source)


def _read_config(info: LearnerInfo, source: str) -> Config:
    """Read the config that ``source`` has sent. Raises UserError for that of another release."""
    try:
        return read_for_actor(info.config)
    except ValidationError as error:
        first = error.errors()[0]
        option = code_references.quoted(".".join(map(str, first["loc"])))
        reason = f"option {option}: {first['type']}"
        if first["type"] == "extra_forbidden":
            reason = f"this actor has no option {option}"

        release = f"Penstock {info.release}" if info.release else "a release before 0.2.0"
        raise UserError(
            f"the config that {source} sent cannot be read ({reason}); the learner has {release}, "
            f"and this actor {__version__}: use the same release on both sides"
        ) from error


def _own_socket(path: str) -> str:
    """Return ``path`` if it is a Unix socket of this user; an empty text otherwise."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    return path if stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() else ""


def join_learner(
    ctx: RoleContext, learner: LearnerEndpoint, spec: SlotSpec, actor: int
) -> Link | None:
    """Join a learner as ``actor``, with slots of ``spec``.

    Returns:
        The link; None when asked to leave before that worked.

    Raises:
        LearnerGoneError: it did not work within ``ctx.wait_s``.
    """
    connect = partial(learner.transport.connect, ctx, learner.address, learner.config, spec, actor)
    peer = None if ctx.address is None else f"the learner at {learner.address}"

    ctx.begin_wait()
    link = wait_for(connect, ctx, peer)
    if link is None and ctx.gave_up:
        raise LearnerGoneError(f"waited for {peer} for {ctx.wait_s:g} s")

    ctx.end_wait()
    return link


def wait_for(connect: Callable[[], T], ctx: RoleContext, peer: str | None) -> T | None:
    """Call ``connect`` until it no longer raises OSError, and return its result.

    Args:
        connect: called every `RETRY_S`.
        ctx: of this role.
        peer: the name of what is waited for, in a note to the user if it takes long; None for no
            note.

    Returns:
        The result; None when asked to leave before.

    Raises:
        OSError: this host has no memory or descriptor left.
    """
    started_s = time.monotonic()
    noted = False

    while not ctx.leaving():
        ctx.status.beat()
        try:
            return connect()
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            if peer and not noted and time.monotonic() - started_s > SAY_SO_AFTER_S:
                noted = ctx.report("note", text=f"{ctx.name} waits for {peer}")
            time.sleep(RETRY_S)
    return None

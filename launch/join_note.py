"""The command by which actors join a learner that was started by hand."""

from __future__ import annotations

import re
import shlex
import socket
from typing import TYPE_CHECKING

from penstock.configs.value_types import is_local
from penstock.transport.addresses import own_host, reachable

if TYPE_CHECKING:
    from penstock.configs.schema import Config


def join_note(config: Config, bind: str) -> str:
    """A sentence with the command by which actors join a learner.

    Args:
        config: that of the run.
        bind: where the learner's connector listens.

    Returns:
        The sentence; empty if the address is not known before the connector listens.
    """
    if bind.startswith("tcp://") and not _is_known(bind):
        return ""
    address = reachable(bind, own_host())
    command = ["penstock", "actor", "--connect", address, *_permissions(config, address)]
    note = f"start actors with: {shlex.join(command)}"

    curve = config.transport.curve
    if curve is None or is_local(address):
        return note
    return f"{note}; other hosts need learner.key and actor.key_secret of {curve}"


def _permissions(config: Config, address: str) -> list[str]:
    """The options by which an actor trusts the learner at ``address`` and may run its config."""
    transport = config.transport
    if transport.curve is not None:
        return ["--curve", transport.curve]
    if transport.insecure:
        return ["--insecure"]
    if address.startswith("ipc://"):
        return []

    # At a port of this host any of its users could answer, so names of code must be allowed.
    from penstock.configs.code_references import references

    texts = [reference.text for reference in references(config)]
    names = dict.fromkeys([config.env.id, *texts]) if texts else ()
    return [word for name in names for word in ("--allow", name)]


def _is_known(bind: str) -> bool:
    """Whether a ``tcp://`` address names a port, and a host rather than an interface."""
    host, _, port = bind.removeprefix("tcp://").rpartition(":")
    interfaces = {name for _, name in socket.if_nameindex()}
    return re.fullmatch(r"0+|\*", port) is None and host not in interfaces

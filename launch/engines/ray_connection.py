"""Joining a Ray cluster, or starting one."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from penstock.configs.errors import UserError

CONNECT_S = 5.0
"""Timeout of the connection that checks whether a head node is at an address."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2 begins: the preface, and an empty frame of settings."""
HTTP2_SETTINGS = b"\x04"
"""Type of the first frame of a server of HTTP/2, which follows the three bytes of its length."""
INSTALL = "--engine ray needs Ray, which is not installed; run: pip install 'penstock[ray]'"


def import_ray() -> Any:
    """Returns the package ``ray``, with the modules of it that are used here.

    Raises:
        UserError: Ray is not installed.
    """
    try:
        import ray
        import ray.exceptions
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        raise UserError(INSTALL) from error
    return ray


def connect(address: str | None, working_dir: str | None = None, cores: int | None = None) -> None:
    """Join a cluster, or start one on this host, whatever other clusters there are.

    Args:
        address: of the cluster; "auto": that of the environment variable ``RAY_ADDRESS``, or the
            one of this host; None: a new one.
        working_dir: a folder that is copied to the other hosts.
        cores: of a new cluster, which Ray gives away; None: those of this host.

    Raises:
        UserError: there is no cluster at the address, or Ray could not start one.
    """
    ray = import_ray()
    try:
        # Ray would wait for minutes for a head node that is not there.
        if address is not None:
            _check_head_node(_resolve_address(address))

        ray.init(
            "local" if address is None else address,  # Ray itself takes None for "auto"
            num_cpus=cores,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
            include_dashboard=False if address is None else None,
            runtime_env={"working_dir": working_dir} if working_dir else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"--address {address} is not a Ray cluster that can be reached ({error}); start one by "
            "`ray start --head`, or leave out --address to start one on this host"
        ) from error


def _resolve_address(address: str) -> str:
    """Returns the ``host:port`` to which ``ray.init(address)`` would connect.

    Raises:
        ValueError: the address is not one, or ``RAY_ADDRESS`` asks for a new cluster.
        ConnectionError: the address is "auto", and there is no cluster.
    """
    from ray._private.services import canonicalize_bootstrap_address

    host, _, port = address.rpartition(":")
    if address != "auto" and (not host or not port.isdecimal() or "/" in host):
        raise ValueError(f"{address} is not auto, or host:port of the head node")

    try:
        resolved: str | None = canonicalize_bootstrap_address(address)
    except ConnectionError:
        raise ConnectionError("RAY_ADDRESS is not set, and none runs on this host") from None
    if resolved is None:
        raise ValueError("RAY_ADDRESS is local")
    return resolved


def _check_head_node(address: str) -> None:
    """Check that a server of HTTP/2, as a head node is by its gRPC, answers at ``host:port``.

    Ray itself would try for minutes.

    Raises:
        ConnectionError: nothing answers there, or something else does.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as connection:
            # A server with TLS does not answer the preface in plain text.
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(HTTP2_PREFACE)
            answer = connection.makefile("rb").read(4)
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing answers at {address}: {error}") from error

    frame_type = answer[3:]
    if frame_type != HTTP2_SETTINGS:
        raise ConnectionError(f"{address} does not answer as a head node does, by gRPC")

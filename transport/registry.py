"""The registry of transports: what a config needs of each, and how an actor gets one.

Imports neither zmq nor numpy, so that configs can be validated with it. Documentation and messages
list transports in this order.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from penstock.configs.transports import TRANSPORTS as TRANSPORTS
from penstock.configs.transports import TransportSpec

if TYPE_CHECKING:
    from penstock.core.interfaces import Connector, Transport


def make_transport(spec: TransportSpec) -> Transport:
    """Make the object by which an actor joins over the transport ``spec``."""
    assert spec.entry_point is not None, f"{spec.name} is one process"
    transport: Transport = resolve_name(spec.entry_point)()
    return transport


def connector_of(spec: TransportSpec) -> Connector:
    """Return the main function of the connector of the transport ``spec``."""
    assert spec.connector is not None, f"{spec.name} needs no connector"
    connector: Connector = resolve_name(spec.connector)
    return connector


for _spec in (
    TransportSpec("inproc", "one process"),
    TransportSpec(
        "shm", "shared memory", "penstock.transport.shm.link:ShmTransport", auto="this host"
    ),
    TransportSpec(
        "zmq",
        "connectors and ZeroMQ",
        "penstock.transport.zmq.link:ZmqTransport",
        connector="penstock.transport.zmq.connector:run",
        relay="penstock.transport.zmq.relay:run",
        auto="other hosts",
    ),
):
    TRANSPORTS.register(_spec)

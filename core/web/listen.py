"""The address at which a server listens, and the conditions for its peers."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.configs.errors import UserError
from penstock.core.web.guard import LOOPBACK_NAMES, TOKEN_LENGTH, Guard

# If no port is given, the first free one of as many is taken.
PORTS = 20
BACKLOG = 256  # connections that wait to be accepted
TOKEN = re.compile(rf"[A-Za-z0-9_-]{{{TOKEN_LENGTH},}}")
# The value of an Origin header: scheme, name or address, and a port that is not the scheme's own.
ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


@dataclass(frozen=True)
class Listen:
    """The address of a server, and the conditions for its peers."""

    host: str = "127.0.0.1"
    port: int | None = None
    """None for the first free one from `first_port` on, 0 for any."""
    first_port: int = 8700
    token: str | None = None
    """What peers must show."""
    tls_cert: str | None = None
    tls_key: str | None = None
    """PEM files of the certificate and its key; None for a server without TLS."""
    insecure: bool = False
    """Whether a token may be sent in plain text."""
    origins: tuple[str, ...] = ()
    """Origins of other sites whose pages are answered."""
    option: str = "--host"
    """The option by which the user has named the host, for errors."""

    def check(self) -> None:
        """Raise UserError for options that do not go together."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UserError("--tls-cert and --tls-key belong together; give both, or neither")
        if self.token is not None and not TOKEN.fullmatch(self.token):
            raise UserError(
                f"--token has {len(self.token)} characters; it must have {TOKEN_LENGTH} or more "
                "letters, digits, - and _, such as the output of: openssl rand -hex 16"
            )
        for origin in self.origins:
            if not ORIGIN.fullmatch(origin):
                raise UserError(
                    f"--origin {origin[:80]!r} is no origin; give the scheme, the host and the "
                    "port of a page, such as http://localhost:8000"
                )

        # An address that other hosts can reach needs a token, which must not be sent in plain text.
        if self.is_loopback:
            return
        finding = f"{self.option} {self.host} is reachable from other hosts"
        if self.token is None:
            port = self.port or self.first_port
            raise UserError(
                f"{finding}; add --token, or serve on 127.0.0.1 and forward the port: "
                f"ssh -L {port}:127.0.0.1:{port} HOST"
            )
        if self.tls_cert is None and not self.insecure:
            raise UserError(
                f"{finding}, and the token would be sent in plain text; add --tls-cert and "
                "--tls-key, or --insecure"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach the address."""
        return self.host in LOOPBACK_NAMES

    @property
    def _place_options(self) -> str:
        """The options that name the address, for errors."""
        return "--port or --host" if self.option == "--host" else self.option

    def guard(self) -> Guard:
        """Returns the rules for requests."""
        names: tuple[str, ...] = LOOPBACK_NAMES
        if not self.is_loopback:
            host_names = {self.host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
            names = (*names, *sorted(host_names))
        return Guard(
            hosts=names,
            literal_hosts=not self.is_loopback,
            origins=tuple(origin.lower() for origin in self.origins),
            token=self.token,
            secure=self.tls_cert is not None,
        )

    def url(self, port: int) -> str:
        """Returns the address of the server's page, for the port that it listens at."""
        scheme = "http" if self.tls_cert is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}/"

    def check_tls(self) -> None:
        """Raise UserError if the certificate and the key cannot be used."""
        if self.tls_cert is None:
            return
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"--tls-cert {self.tls_cert} and --tls-key {self.tls_key} cannot be used "
                f"({error}); give a certificate and its key as PEM files"
            ) from error

    def bind(self) -> socket.socket:
        """Returns a listening socket. Raises UserError if no port is free."""
        ports = [self.port]
        if self.port is None:
            ports = [*range(self.first_port, self.first_port + PORTS)]
        reason = ""
        for port in ports:
            try:
                return _listening_socket(self.host, port or 0)
            except OSError as error:
                reason = error.strerror or str(error)

        tried = f"{self.host}:{ports[0]}"
        if len(ports) > 1:
            tried += f" to {ports[-1]}"
        raise UserError(
            f"nothing can be served at {tried} ({reason}); give another {self._place_options}"
        )


def _listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at an address. Raises OSError if that is not possible."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def listen_at(address: str, conditions: Mapping[str, Any]) -> Listen:
    """Returns where a role listens, and to whom.

    Args:
        address: ``tcp://HOST:PORT``; a host ``*`` is every interface.
        conditions: further keywords of `Listen`, as JSON values.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    return Listen(
        host="0.0.0.0" if host == "*" else host,
        port=0 if port == "*" else int(port),
        option="--bind",
        **{**conditions, "origins": tuple(conditions.get("origins", ()))},
    )

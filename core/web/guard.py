"""Decides which requests are answered. Everything that arrives is taken for hostile.

- The Host header must name this server, and Origin, if present, too: a page of another site, also
  one whose name was made to resolve to this host (DNS rebinding), gets nothing, unless its origin
  was admitted by name.
- On loopback a peer must be a process of this user, or of root, to connect at all
  (`penstock.core.web.connections`); with a token each request must show that.
- An order needs a token that only this page can read, in a header. A server whose answers change
  nothing can do without (`Guard.open_posts`).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl

from penstock.core.files import is_trusted
from penstock.core.web.peers import user_of

# The bounds of a request.
URL_NBYTES = 8192
BODY_NBYTES = 4096
MOST_FIELDS = 8  # fields of the query that shows a token
# The body of a refused request is read before the reply up to this size and for this time.
REFUSED_BODY_NBYTES = 65536
REFUSED_BODY_S = 1.0
METHODS = ("GET", "HEAD", "POST")
ORDER_HEADER = "x-penstock-token"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
# The value of a Host header: a name or an address, and a port.
HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
TOKEN_LENGTH = 16  # characters at least
NOT_OWN = (
    "only processes of the user that runs this server, on the same host, are served; start it "
    "with --token for others"
)
# The headers of each reply that does not set them itself.
HEADERS = {
    # plotly.js writes style elements, and draws its pictures as data: and blob: URLs.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; media-src 'self'; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
# The headers of the reply to a browser that asks for the page of an admitted site.
PREFLIGHT_HEADERS = (
    ("access-control-allow-methods", "GET, POST"),
    ("access-control-allow-headers", "authorization, content-type"),
    ("access-control-max-age", "600"),
)

Scope = Mapping[str, Any]
"""A connection or a request, as ASGI describes it."""


def is_own_peer(scope: Scope) -> bool:
    """Whether a connection comes from a process of this user, or of root, on this host."""
    client = scope.get("client")
    server = scope.get("server")
    if not client or not server or server[1] is None:
        return False
    uid = user_of((client[0], client[1]), (server[0], server[1]))
    return uid is not None and is_trusted(uid)


class Refusal(Exception):
    """A request that is not answered: the status of HTTP and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass
class Guard:
    """The rules for one server."""

    hosts: tuple[str, ...] = LOOPBACK_NAMES
    """Names of this server; without a port, as a forwarded port may have another number."""
    literal_hosts: bool = False
    """Whether every IP address is accepted as Host: rebinding needs a name."""
    origins: tuple[str, ...] = ()
    """Origins of other sites whose pages are answered, in lower case."""
    open_posts: Mapping[str, int] = field(default_factory=dict)
    """The most bytes of a POST to each path that needs no token of the page."""
    token: str | None = None
    """What each request must show; None if none is needed."""
    cookie_name: str = "penstock_watch"
    """Of the cookie with the token: servers at several ports of a host share the cookies."""
    secure: bool = False
    """Whether the server speaks TLS."""
    is_own: Callable[[Scope], bool] = is_own_peer
    """Whether a connection comes from a process that may connect without a token."""
    order_token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """What an order must show; only the page can read it."""

    def check(self, scope: Scope) -> None:
        """Raise `Refusal` for a request that must not be answered."""
        url_nbytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        if url_nbytes > URL_NBYTES:
            raise Refusal(414, f"the address has {url_nbytes} bytes; at most {URL_NBYTES} are read")
        if scope["method"] not in METHODS:
            raise Refusal(405, f"{scope['method'][:20]} is not served; use GET or POST")

        self.check_site(scope)
        headers = _headers(scope)
        self._check_token(headers)
        if scope["method"] == "POST":
            self._check_order(scope["path"], headers)

    def check_site(self, scope: Scope) -> None:
        """Raise `Refusal` unless the page that sends a request is of this server, or admitted."""
        headers = _headers(scope)
        host = _one(headers, "host")
        if host is None or not self._is_ours(host):
            raise Refusal(403, "the Host header names another server; open the printed address")

        if self.admitted_origin(scope) is not None:
            return
        origin = _one(headers, "origin")
        if origin is not None and not self._is_same(origin, host):
            raise Refusal(403, "the request comes from a page of another site")
        site = _one(headers, "sec-fetch-site")
        if site in ("cross-site", "same-site") and scope["path"] != "/":
            raise Refusal(403, "the request comes from a page of another site")

    def admitted_origin(self, scope: Scope) -> str | None:
        """Returns the Origin header if it is that of an admitted site, otherwise None."""
        origin = _one(_headers(scope), "origin")
        return origin if origin is not None and origin.lower() in self.origins else None

    def admits(self, scope: Scope) -> bool:
        """Whether a peer may connect, by the addresses of both ends."""
        return self.token is not None or self.is_own(scope)

    def _check_token(self, headers: Mapping[str, list[str]]) -> None:
        """Raise `Refusal` if a token is needed and the request does not show it.

        It is in a cookie, or in the header "authorization".
        """
        if self.token is None:
            return
        tokens = [text.removeprefix("Bearer ") for text in headers.get("authorization", [])]
        tokens += [value for name, value in _cookies(headers) if name == self.cookie_name]
        if not any(_equal(token, self.token) for token in tokens):
            raise Refusal(
                401,
                "the token is missing or wrong; open the address with ?token=TOKEN, or send "
                "the header authorization: Bearer TOKEN",
            )

    def _check_order(self, path: str, headers: Mapping[str, list[str]]) -> None:
        """Raise `Refusal` for an order without the page's token, or of another form or size."""
        most_nbytes = self.open_posts.get(path)
        if most_nbytes is None:
            most_nbytes = BODY_NBYTES
            if not _equal(_one(headers, ORDER_HEADER) or "", self.order_token):
                raise Refusal(403, f"an order needs the page's token in the header {ORDER_HEADER}")
        media_type = (_one(headers, "content-type") or "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            raise Refusal(415, "send JSON, with the header content-type: application/json")
        if "transfer-encoding" in headers:  # it would come before the length
            raise Refusal(411, "send the body with its length, not in chunks")
        nbytes = _one(headers, "content-length") or ""
        if not nbytes.isdigit() or len(nbytes) > 18 or int(nbytes) > most_nbytes:
            raise Refusal(413, f"a request has at most {most_nbytes} bytes, and says its length")

    def shows_token(self, scope: Scope) -> bool:
        """Whether the address has ``?token=`` with the right token.

        Raises Refusal for an address of too many fields.
        """
        if self.token is None or scope["path"] != "/" or scope["method"] != "GET":
            return False

        query = (scope.get("query_string") or b"").decode("latin-1")
        if len(query) > URL_NBYTES:
            query = ""
        host = _one(_headers(scope), "host")
        if host is None or not self._is_ours(host):
            return False

        count = query.count("&") + 1
        if count > MOST_FIELDS:
            raise Refusal(400, f"the address has {count} fields; at most {MOST_FIELDS} are read")
        fields = dict(parse_qsl(query))
        return _equal(fields.get("token", ""), self.token)

    def cookie(self) -> str:
        """Returns the header that keeps the token in a browser, until it is closed."""
        secure = "; Secure" if self.secure else ""
        return f"{self.cookie_name}={self.token}; HttpOnly; SameSite=Strict; Path=/{secure}"

    def _is_ours(self, host: str) -> bool:
        """Whether a Host header names this server."""
        match = HOST.fullmatch(host)
        if match is None:
            return False
        name = match["name"].strip("[]").lower()
        return name in self.hosts or (self.literal_hosts and _is_address(name))

    def _is_same(self, origin: str, host: str) -> bool:
        """Whether an Origin header is that of the pages of ``host``."""
        scheme = "https" if self.secure else "http"
        return origin.lower() == f"{scheme}://{host.lower()}"


class GuardedApp:
    """An ASGI application behind a `Guard`. Adds those of `HEADERS` that a reply has not."""

    def __init__(self, app: Any, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        from starlette.datastructures import MutableHeaders  # an extra, as the CLI reads this file

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a web socket
            await send({"type": "websocket.close", "code": 1008})
            return

        origin = self._guard.admitted_origin(scope)

        async def send_with_headers(message: Any) -> None:
            """Send a part of the reply, with the headers if it is the first part."""
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if origin is not None:
                    headers["access-control-allow-origin"] = origin
                    headers["vary"] = "origin"
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        # A browser asks whether the page of an admitted site may send a request.
        if scope["method"] == "OPTIONS" and origin is not None:
            await _reply(send_with_headers, 204, "", PREFLIGHT_HEADERS)
            return

        try:
            # A browser that shows the token in the address gets it as a cookie, and the address
            # without it.
            if self._guard.shows_token(scope):
                further_headers = [("location", "/"), ("set-cookie", self._guard.cookie())]
                await _reply(send_with_headers, 303, "", further_headers)
                return
            self._guard.check(scope)
        except Refusal as refusal:
            await _read_away(scope, receive)
            await _reply(send_with_headers, refusal.status, f"penstock: {refusal.reason}\n")
            return
        await self._app(scope, receive, send_with_headers)


async def _read_away(scope: Scope, receive: Any) -> None:
    """Read the body of a refused request, within bounds of size and time, and forget it.

    A connection that is closed with unread bytes is reset, and the client may lose the reply.
    """
    nbytes = _one(_headers(scope), "content-length") or ""
    if not nbytes.isdigit() or len(nbytes) > 18 or int(nbytes) > REFUSED_BODY_NBYTES:
        return
    try:
        async with asyncio.timeout(REFUSED_BODY_S):
            while (await receive()).get("more_body", False):
                pass
    except TimeoutError:
        return


async def _reply(
    send: Any, status: int, text: str, further_headers: Iterable[tuple[str, str]] = ()
) -> None:
    """Send a reply of plain text, and close the connection."""
    headers = [
        ("content-type", "text/plain; charset=utf-8"),
        ("connection", "close"),
        *further_headers,
    ]
    encoded_headers = [(name.encode(), value.encode()) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": encoded_headers})
    await send({"type": "http.response.body", "body": text.encode()})


def _headers(scope: Scope) -> dict[str, list[str]]:
    """Returns the values of each header of a request, by its name in lower case."""
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return headers


def _one(headers: Mapping[str, list[str]], name: str) -> str | None:
    """Returns the value of a header, or None; "" if it is repeated, which matches nothing."""
    values = headers.get(name, [])
    if not values:
        return None
    return values[0] if len(values) == 1 else ""


def _cookies(headers: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Returns the names and values of all cookies that can be parsed."""
    cookies: list[tuple[str, str]] = []
    for text in headers.get("cookie", []):
        try:
            cookies += [(name, morsel.value) for name, morsel in SimpleCookie(text).items()]
        except CookieError:
            continue
    return cookies


def _equal(text: str, other: str) -> bool:
    """Whether two texts are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(
        text.encode("latin-1", "replace"), other.encode("latin-1", "replace")
    )


def _is_address(name: str) -> bool:
    """Whether the name of a host is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

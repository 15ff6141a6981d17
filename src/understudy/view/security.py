"""Access control of the viewer: exact checks of host and origin, a token for any address but loopback, and
headers.

A page of any site can send requests to a server on this machine and, by DNS rebinding, read the answers. So a
request must name this server in `host`, must not come from another origin, and, if other machines can reach the
server, must have the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Final

from understudy.util.addresses import is_loopback
from understudy.view.faults import ViewRefused

COOKIE: Final = "understudy-view"
ANY_ADDRESS: Final = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1", "127.0.0.1"),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
"""Hosts that mean every address of this machine: with the family, an unused remote address, and the loopback
address.
"""

POLICY: Final = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)
"""The headers of every response."""


def address_for_others(host: str) -> str:
    """Return an address at which others can reach a server that listens on `host`.

    If `host` means every address of this machine, it is the address with which the machine connects to other
    networks.
    """
    if host not in ANY_ADDRESS:
        return host
    family, elsewhere, default = ANY_ADDRESS[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # sends nothing: the kernel only chooses a local address
            return str(probe.getsockname()[0])
    except OSError:
        return default


class AccessRules:
    """What a request must have. `token` is None if only this machine can reach the server."""

    def __init__(self, host: str, port: int) -> None:
        self.token = None if is_loopback(host) else secrets.token_urlsafe(24)
        names = {"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host}
        self._hosts = {f"{name}:{port}".lower().encode() for name in names}
        self._port = port
        self._any_address = host in ANY_ADDRESS

    def check(self, method: str, headers: Mapping[bytes, bytes], token: str | None) -> None:
        """Raise ViewRefused unless a request may be answered. `token` is the one in its query, if any."""
        host = headers.get(b"host", b"").lower()
        if host not in self._hosts and not (self._any_address and self._is_address(host)):
            raise ViewRefused(
                421,
                "host",
                f"host: expected one of {', '.join(sorted(host.decode() for host in self._hosts))}, got "
                f"{host[:100].decode('latin-1')!r}",
                "open the address that `understudy view` printed",
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.lower() != b"http://" + host:
            raise ViewRefused(
                403,
                "origin",
                f"origin: {origin[:100].decode('latin-1')!r} is another site; expected the viewer's own",
                "open the viewer's own address in the browser",
            )
        from_elsewhere = headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        # A link on another site may open the page, but such a site may not load anything else.
        if from_elsewhere and not (method == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"):
            raise ViewRefused(
                403,
                "origin",
                "sec-fetch-site: the request comes from another site; expected the viewer's own",
                "open the viewer's own address in the browser",
            )
        if self.token is not None and not self._has_token(headers, token):
            raise ViewRefused(
                401,
                "token",
                "token: missing or invalid; expected the one that `understudy view` printed",
                "open the whole address with `?token=…`, or send the header `authorization: Bearer TOKEN`",
            )

    def _is_address(self, host: bytes) -> bool:
        """Return whether a `host` is an IP address with the port. A name could be one that an attacker rebinds."""
        name, _, port = host.decode("latin-1").rpartition(":")
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return port == str(self._port)

    def _has_token(self, headers: Mapping[bytes, bytes], token: str | None) -> bool:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        sent = [token or "", bearer.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""]
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            cookies = SimpleCookie()
        if COOKIE in cookies:
            sent.append(cookies[COOKIE].value)
        expected = (self.token or "").encode()
        return any(hmac.compare_digest(key.encode("latin-1", "replace"), expected) for key in sent)

    def cookie(self) -> bytes:
        """Return the header that makes a browser keep the token that it had in its address."""
        return f"{COOKIE}={self.token}; Path=/; HttpOnly; SameSite=Strict".encode()

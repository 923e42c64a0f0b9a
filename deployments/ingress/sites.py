"""Which web pages may call this server, and by which names it may be called.

A browser runs the code of every page that somebody opens, and reaches servers that strangers do not
reach: on the same machine, and behind the firewall. Without API keys, two checks keep strangers'
pages away:

- A page of another origin is refused with 403, unless the configuration allows it. The browser
  sends the origin by itself, and no page can change it.
- A name that a stranger could own is refused with 421. Otherwise its owner could make it lead to
  this server once a page is loaded (DNS rebinding), and the page would be of the same origin.

With API keys, a page can do nothing without a key. So there, other origins only lack the headers
that let a browser read an answer, and names are free unless `allowed_hosts` is set.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from cfg_core.errors import ForeignOriginError, RequestError, UnknownHostError
from deployments.config.http import ANY, LOOPBACK, HttpArgs

PRIVATE_DOMAINS = (".local", ".internal", ".svc", ".localhost", ".home.arpa", ".test")
"""Endings of names that nobody can register: reserved by RFC 6761, RFC 6762, RFC 8375, ICANN.

`.svc` and `.svc.cluster.local` are Kubernetes'.
"""

_LOOPBACK_PAGES = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127(\.\d+){3}|\[::1\])(:\d+)?"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_PORTS = {"http": 80, "https": 443}


class Sites:
    """Checks the headers Host and Origin of requests.

    has_keys: whether API keys are configured.
    cors: makes the headers that let a browser read an answer, and the answers to preflights.
    """

    def __init__(self, args: HttpArgs, has_keys: bool) -> None:
        self._refuses_origins = not has_keys
        self._any_host = ANY in args.allowed_hosts or (has_keys and not args.allowed_hosts)
        self._hosts = frozenset({*args.allowed_hosts, socket.gethostname().lower()})
        self._domains = tuple(host[1:] for host in args.allowed_hosts if host.startswith("*."))
        self.cors = CORSMiddleware(
            _nothing,
            allow_origins=[origin for origin in args.cors_origins if origin != LOOPBACK],
            allow_origin_regex=_LOOPBACK_PAGES if LOOPBACK in args.cors_origins else None,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("x-request-id", "retry-after"),
        )

    def check_host(self, headers: Headers) -> None:
        """Raise RequestError if the header Host is ill-formed, UnknownHostError if it is foreign.

        A client without a browser may leave it out.
        """
        for given in headers.getlist("host"):
            found = _HOST.fullmatch(given)
            if found is None:
                raise RequestError("The header Host is not a host name: send one.", "Host")
            host = found[1].lower().rstrip(".")
            if not self._any_host and not self._is_known(host):
                raise UnknownHostError(
                    f"This server is not known as {host[:100]}: call it by its address, or add"
                    " the name to `http.allowed_hosts` in its configuration."
                )

    def _is_known(self, host: str) -> bool:
        return (
            "." not in host
            or host in self._hosts
            or host.endswith((*PRIVATE_DOMAINS, *self._domains))
            or _is_address(host)
        )

    def allows(self, headers: Headers) -> bool:
        """Whether a page of another origin sent the request, and may read the answer.

        Raises ForeignOriginError if it may not even ask.
        """
        origin = headers.get("origin")
        if origin is None or _is_own(origin, headers):
            return False
        if self.cors.is_allowed_origin(origin.lower()):
            return True
        if self._refuses_origins or is_preflight(headers):
            raise ForeignOriginError(
                f"Web pages of {origin[:100]} may not call this server: add the origin to"
                " `http.cors_origins` in its configuration."
            )
        return False


def is_preflight(headers: Headers) -> bool:
    """Whether a browser asks what a page may send, if the method is OPTIONS."""
    return "origin" in headers and "access-control-request-method" in headers


def _is_own(origin: str, headers: Headers) -> bool:
    """Whether the page is of this server.

    A proxy that speaks TLS may replace the header Host. Then only the browser knows. It says so on
    pages with TLS, and no page can make it say so.
    """
    if headers.get("sec-fetch-site") == "same-origin":
        return True
    try:
        page = urlsplit(origin)
        server = urlsplit(f"{page.scheme}://{headers.get('host', '')}")
        usual = _PORTS.get(page.scheme)
        return bool(page.hostname) and (page.hostname, page.port or usual) == (
            server.hostname,
            server.port or usual,
        )
    except ValueError:
        return False


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


async def _nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """The application behind `cors`, which is only asked for headers."""

"""Which hosts a replica connects to when it fetches images, audio and video.

Names are looked up in threads of their own: a name server that never answers holds a thread for
half a minute, and the replica's other threads must not wait for it. The check of an address is made
twice: on what a name server says, and on the address of the socket that connects. So a name that
changes its address between the two gets nowhere.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult
from typing_extensions import override

from deployments.generator.media.memory import Client
from deployments.requests.media_checks import is_public

LOOKUPS = 32
"""Names that a replica looks up at the same time."""

CLIENT_LOOKUPS = 8
"""Those of one client, given up ones included: their threads still wait for the name server."""

_threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="media-names")


class PrivateAddressError(OSError):
    """A connection to an address that is not one of the public internet."""


class HostResolver(AbstractResolver):
    """Looks up names for one download.

    client: whose download it is.
    all_hosts: private addresses are allowed, too.
    """

    def __init__(self, client: Client, all_hosts: bool) -> None:
        self._client, self._all_hosts = client, all_hosts

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Look up a name. Private addresses among several are left out.

        Raises OSError if there is none, and PrivateAddressError if all are private.
        """
        if self._client.lookups >= CLIENT_LOOKUPS:
            raise OSError("too many names of this client are being looked up")
        self._client.lookups += 1
        found = asyncio.get_running_loop().run_in_executor(_threads, addresses_of, host, port)
        found.add_done_callback(self._is_over)
        addresses = await asyncio.shield(found)
        allowed = [one for one in addresses if self._all_hosts or is_public(one["host"])]
        if not allowed:
            raise PrivateAddressError(f"{host} has no public address")
        return allowed

    def _is_over(self, found: asyncio.Future[Any]) -> None:
        self._client.lookups -= 1
        if not found.cancelled():
            found.exception()  # nobody may be waiting for it any more

    @override
    async def close(self) -> None:
        """Hold nothing."""


def addresses_of(host: str, port: int) -> list[ResolveResult]:
    """The addresses of a name. Raises OSError."""
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    return [
        ResolveResult(
            hostname=host, host=target[0], port=port, family=family, proto=protocol, flags=flags
        )
        for family, _, protocol, _, target in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
        )
        if isinstance(target[0], str)  # without IPv6 in Python, it is a number
    ]


def public_socket(address: Any) -> socket.socket:
    """A socket for an address that is about to be connected to.

    address: an entry of `getaddrinfo`. Raises PrivateAddressError, also for a public address that
    this machine has: what listens there may trust connections from the machine itself.
    """
    family, kind, protocol, _, target = address
    if not is_public(target[0]) or is_own(family, target):
        raise PrivateAddressError(f"{target[0]} is not a public address of another machine")
    return socket.socket(family, kind, protocol)


def is_own(family: int, target: Any) -> bool:
    """Whether this machine has an address. No packet is sent: the kernel chooses a route."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return bool(probe.getsockname()[0] == target[0])
    except OSError:
        return False  # there is no route, so connecting will fail

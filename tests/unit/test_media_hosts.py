"""Hosts that are connected to: names with several addresses, and name servers that do not answer.

A fake takes the place of the system's lookup.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from deployments.generator.media import hosts as media_hosts
from deployments.generator.media.hosts import (
    CLIENT_LOOKUPS,
    HostResolver,
    PrivateAddressError,
    is_own,
    public_socket,
)
from deployments.generator.media.memory import Client

Lookup = Callable[..., list[Any]]
PUBLIC, PRIVATE, METADATA = "203.0.114.7", "10.0.0.7", "169.254.169.254"


def named(*hosts: str) -> Lookup:
    """A lookup that finds these addresses."""

    def lookup(name: str, port: int, **options: Any) -> list[Any]:
        kind = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        return [(kind, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]

    return lookup


def resolved(lookup: Lookup, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[str]:
    monkeypatch.setattr(media_hosts.socket, "getaddrinfo", lookup)
    names = HostResolver(Client(), options.get("all_hosts", False))
    return [one["host"] for one in asyncio.run(names.resolve("images.example", 80))]


def test_of_two_answers_the_public_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(named(PRIVATE, PUBLIC, METADATA), monkeypatch) == [PUBLIC]


@pytest.mark.parametrize("host", [PRIVATE, METADATA, "127.0.0.1", "::ffff:10.0.0.1", "fe80::1%2"])
def test_names_of_private_addresses(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrivateAddressError, match="no public address"):
        resolved(named(host), monkeypatch)
    assert resolved(named(host), monkeypatch, all_hosts=True) == [host]


@pytest.mark.parametrize("host", ["2130706433", "0177.0.0.1", "0x7f.1", "127.1", "localhost"])
def test_other_ways_to_write_an_address(host: str) -> None:
    """The system's lookup understands them, and its answer is checked."""
    with pytest.raises(PrivateAddressError):
        asyncio.run(HostResolver(Client(), False).resolve(host, 80))


@pytest.mark.parametrize("host", [PRIVATE, METADATA, "127.0.0.1"])
def test_the_socket_is_checked_again(host: str) -> None:
    """A name that changes its address between the lookup and the connection."""
    with pytest.raises(PrivateAddressError):
        public_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 80)))
    public_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, 80))).close()


def test_addresses_of_this_machine_are_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a public address reaches its own ports by it, past every firewall."""
    assert is_own(socket.AF_INET, ("127.0.0.1", 80))
    assert not is_own(socket.AF_INET, (PUBLIC, 80))
    monkeypatch.setattr(media_hosts, "is_public", lambda host: True)
    with pytest.raises(PrivateAddressError, match="another machine"):
        public_socket((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 80)))


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups that were given up count for their client until their threads return."""
    answer = threading.Event()

    def silent(*args: Any, **options: Any) -> list[Any]:
        answer.wait(10)
        raise socket.gaierror("no answer")

    async def attack() -> None:
        attacker, other = Client(), Client()
        names = HostResolver(attacker, False)
        for _ in range(CLIENT_LOOKUPS):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await names.resolve("slow.example", 80)
        with pytest.raises(OSError, match="too many names"):
            await names.resolve("slow.example", 80)
        monkeypatch.setattr(media_hosts.socket, "getaddrinfo", named(PUBLIC))
        assert len(await HostResolver(other, False).resolve("images.example", 80)) == 1
        answer.set()
        for _ in range(500):
            if not attacker.lookups:
                break
            await asyncio.sleep(0.01)
        assert len(await names.resolve("images.example", 80)) == 1

    monkeypatch.setattr(media_hosts.socket, "getaddrinfo", silent)
    asyncio.run(attack())


def test_aiohttp_asks_this_lookup_and_this_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its errors reach the caller as they are, so that the client gets the reason."""

    async def fetch() -> None:
        connector = aiohttp.TCPConnector(
            resolver=HostResolver(Client(), False), use_dns_cache=False
        )
        async with aiohttp.ClientSession(connector=connector) as http:
            await http.get("http://images.example/a.png")

    monkeypatch.setattr(media_hosts.socket, "getaddrinfo", named(PRIVATE))
    with pytest.raises(aiohttp.ClientConnectorDNSError) as error:
        asyncio.run(fetch())
    assert isinstance(error.value.os_error, PrivateAddressError)

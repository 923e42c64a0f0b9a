"""The section `http:` of `args:`: web pages that may call, names of the server, trusted proxies.

The first two protect people's browsers, which reach servers that other machines cannot reach.
"""

from __future__ import annotations

import ipaddress
import re

from pydantic import field_validator

from cfg_core.errors import ConfigError
from deployments.config.base import YamlArgs

LOOPBACK = "loopback"
"""The entry of `cors_origins` for pages of this machine."""

ANY = "*"

_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]+")


class HttpArgs(YamlArgs):
    """The section `http:` of `args:`."""

    section = "http"

    cors_origins: tuple[str, ...] = (LOOPBACK,)
    """Origins of the web pages on other addresses that may call this server, such as
    `https://chat.example.com`. `loopback` means pages of `localhost`, `127.0.0.1` and `[::1]`, on
    any port. `*` means all pages, as in `vllm serve`: without API keys, every page that somebody
    opens may then use the server. The server's own pages may always.
    """

    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients call this server: `gpu7.example.com`, `*.example.com`, or `*` for all.
    A request by another name gets 421. These names are always allowed: addresses, `localhost`,
    names without a dot, the name of the machine, and names under `.local`, `.internal`, `.svc`,
    `.localhost`, `.home.arpa` and `.test`, which nobody can register. Default: these only; with API
    keys, all names.
    """

    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of the proxies in front of Serve, such as `10.0.0.0/8`. From them, and
    from nobody else, `X-Forwarded-For` tells a client's address. The proxy must add the address
    that it sees to the header. For the bounds that Serve's own proxy has for each address, set
    `FORWARDED_ALLOW_IPS` in the environment to the same addresses.
    """

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin not in (ANY, LOOPBACK, "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin[:100]!r} in `http.cors_origins` is no origin: write it as"
                    " `https://chat.example.com`, with the port if there is one and without a path."
                )
        return tuple(origin.lower() for origin in origins)

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if host != ANY and not _HOST.fullmatch(host):
                raise ConfigError(
                    f"{host[:100]!r} in `http.allowed_hosts` is no host name: write it as"
                    " `gpu7.example.com` or `*.example.com`, without a scheme and a port."
                )
        return tuple(host.lower() for host in hosts)

    @field_validator("trusted_proxies")
    @classmethod
    def _proxies(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ConfigError(
                    f"{proxy[:100]!r} in `http.trusted_proxies` is no address or network: {error}."
                ) from None
        return proxies

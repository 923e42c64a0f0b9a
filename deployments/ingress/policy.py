"""What the guard enforces in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from deployments.admission.tenants import Gate
from deployments.config.access import AccessArgs
from deployments.config.http import HttpArgs
from deployments.config.limits import LimitsArgs
from deployments.http.open_requests import OpenRequests
from deployments.ingress.metrics import Metrics
from deployments.ingress.sites import Sites


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What Guard enforces: one object, so that it is always replaced as a whole.

    forwarded: replaces the client in a request's scope by what a trusted proxy says; None if no
    proxy is trusted.
    """

    gate: Gate
    open_requests: OpenRequests
    sites: Sites
    forwarded: ASGIApp | None
    max_body_bytes: int
    log_prompts: bool = False
    metrics: Metrics | None = None

    @classmethod
    def of(
        cls,
        access: AccessArgs,
        metrics: Metrics | None = None,
        limits: LimitsArgs | None = None,
        http: HttpArgs | None = None,
    ) -> Policy:
        """Build a policy with full buckets for the rates and no open requests.

        access: must be resolved.
        """
        http = http or HttpArgs()
        proxies = [*http.trusted_proxies]
        return cls(
            gate=Gate(access, charged=metrics.charged) if metrics else Gate(access),
            open_requests=OpenRequests(limits or LimitsArgs()),
            sites=Sites(http, has_keys=bool(access.keys)),
            forwarded=_forwarded(proxies) if proxies else None,
            max_body_bytes=access.max_body_bytes,
            log_prompts=access.log_prompts,
            metrics=metrics,
        )


def _forwarded(proxies: list[str]) -> ASGIApp:
    """An application that replaces the client in a scope by what one of `proxies` says.

    It is uvicorn's own middleware, in front of an application that does nothing.
    """

    async def nothing(scope: Any, receive: Any, send: Any) -> None: ...

    return cast(ASGIApp, ProxyHeadersMiddleware(nothing, proxies))


_policy = Policy.of(AccessArgs())


def enforce(policy: Policy) -> None:
    """Let Guard follow this policy from now on, in this process."""
    global _policy
    _policy = policy


def current_policy() -> Policy:
    """The policy that this process enforces. Until `enforce` is called, no API key is needed."""
    return _policy

"""What the guard enforces in this process."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.config.access import AccessArgs
from deployments.config.limits import LimitsArgs
from deployments.http.open_requests import OpenRequests
from deployments.ingress.metrics import Metrics
from deployments.ingress.tenants import Gate
from deployments.routing import shared


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What Guard enforces.

    It is one object so that it is always replaced as a whole.
    """

    gate: Gate
    open_requests: OpenRequests
    max_body_bytes: int
    log_prompts: bool = False
    metrics: Metrics | None = None

    @classmethod
    def of(
        cls, access: AccessArgs, metrics: Metrics | None = None, limits: LimitsArgs | None = None
    ) -> Policy:
        """Build a policy with full buckets for the rates and no open requests.

        access: must be resolved.
        """
        return cls(
            gate=Gate(access, charged=metrics.charged) if metrics else Gate(access),
            open_requests=OpenRequests(limits or LimitsArgs()),
            max_body_bytes=access.max_body_bytes,
            log_prompts=access.log_prompts,
            metrics=metrics,
        )


_OPEN = Policy.of(AccessArgs())


def current_policy() -> Policy:
    """The policy that this process enforces.

    Until `shared.enforce` is called, no API key is needed.
    """
    policy: Policy = shared.enforced() or _OPEN
    return policy

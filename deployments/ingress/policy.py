"""What the guard enforces in this process."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.config.access import AccessArgs
from deployments.config.limits import LimitsArgs
from deployments.http.crowd import Crowd
from deployments.ingress.metrics import Metrics
from deployments.ingress.tenants import Gate
from deployments.routing import shared


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What Guard enforces. One object, so that it is replaced whole or not at all."""

    gate: Gate
    crowd: Crowd
    max_body_bytes: int
    log_prompts: bool = False
    metrics: Metrics | None = None

    @classmethod
    def of(
        cls, access: AccessArgs, metrics: Metrics | None = None, limits: LimitsArgs | None = None
    ) -> Policy:
        """`access` is resolved. Makes new, full buckets for the rates, and an empty crowd."""
        return cls(
            gate=Gate(access, charged=metrics.charged) if metrics else Gate(access),
            crowd=Crowd(limits or LimitsArgs()),
            max_body_bytes=access.max_body_bytes,
            log_prompts=access.log_prompts,
            metrics=metrics,
        )


_OPEN = Policy.of(AccessArgs())


def current_policy() -> Policy:
    """What this process enforces. Until `shared.enforce` is called, everybody may call."""
    policy: Policy = shared.enforced() or _OPEN
    return policy

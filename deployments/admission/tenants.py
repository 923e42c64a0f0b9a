"""Tenants: who calls, which models they may use, and what they are charged.

A tenant is the holder of an API key. Neither Ray, vLLM nor torch is imported here.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from cfg_core.errors import AuthenticationError, PermissionDeniedError
from deployments.admission.rates import Rates
from deployments.config.access import ANONYMOUS_NAME, AccessArgs, KeyArgs, digest_of


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """The party that a request is counted for. The fields are those of KeyArgs; None: no limit.

    Gate enforces the models and the two rates, the admission queue `max_streams` and `weight`, and
    requests/terms.py checks `min_priority`.
    """

    name: str
    models: tuple[str, ...] | None = None
    may_load_adapters: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_streams: int | None = None
    weight: float = 1.0
    min_priority: int | None = None

    @classmethod
    def of(cls, key: KeyArgs) -> Tenant:
        return cls(**{field.name: getattr(key, field.name) for field in fields(cls)})


ANONYMOUS = Tenant(name=ANONYMOUS_NAME)
"""Every caller where no API keys are configured, and every caller of an open path.

It has no limits.
"""


class Charge:
    """What a request was charged before it was served.

    It is settled later with what the engine did. As a context manager: a request that fails inside,
    before it is settled, costs nothing.
    """

    def __init__(self, gate: Gate, tenant: str, estimated: int) -> None:
        self._gate, self._tenant, self._estimated = gate, tenant, estimated
        self._is_settled = False

    def settle(self, num_tokens: int) -> None:
        """Correct the charge to `num_tokens`; only the first call counts."""
        if not self._is_settled:
            self._is_settled = True
            self._gate.settle(self._tenant, self._estimated, num_tokens)

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle(0)


class Gate:
    """Identifies tenants by their API keys, and enforces their models and rates.

    Used from one event loop.

    access: must be resolved, so that every key has its digest.
    now: a clock in seconds that never goes back.
    charged: called for each settled charge, with the tenant's name and the tokens.
    """

    def __init__(
        self,
        access: AccessArgs,
        now: Callable[[], float] = time.monotonic,
        charged: Callable[[str, int], None] = lambda tenant, num_tokens: None,
    ) -> None:
        self._now, self._charged = now, charged
        self._keys = [(_digest(key), Tenant.of(key)) for key in access.keys]
        tenants = [ANONYMOUS, *(tenant for _, tenant in self._keys)]
        self._rates = {t.name: Rates(t.requests_per_minute, t.tokens_per_minute) for t in tenants}

    def authenticate(self, authorization: str | None, x_api_key: str | None = None) -> Tenant:
        """The tenant of these two request headers.

        `authorization` counts if both are there. Where no keys are configured, every caller is
        ANONYMOUS, whatever the headers say, because OpenAI's clients always send some key. Raises
        AuthenticationError.
        """
        if not self._keys:
            return ANONYMOUS
        digest = digest_of(_key_in(authorization, x_api_key))
        found = None
        for expected, tenant in self._keys:  # no early exit: the time taken must reveal nothing
            if hmac.compare_digest(expected, digest):
                found = tenant
        if found is None:
            raise AuthenticationError(
                "This API key is not known here: check it, or ask the operator for one."
            )
        return found

    def allow_model(self, tenant: Tenant, served_name: str) -> None:
        """Raise PermissionDeniedError, which names other models, if `tenant` may not use this."""
        if tenant.models is not None and served_name not in tenant.models:
            instead = f"use {', '.join(tenant.models)}"
            raise PermissionDeniedError(
                f"This API key may not use {served_name[:100]!r}: {instead}.", "model"
            )

    def allow_adapters(self, tenant: Tenant) -> None:
        """Raise PermissionDeniedError if `tenant` may not load and unload adapters."""
        if not tenant.may_load_adapters:
            raise PermissionDeniedError(
                "Adapters may be loaded and unloaded with an API key that has `may_load_adapters:"
                " true` in the server's configuration: ask the operator for one."
            )

    def charge(self, tenant: Tenant, num_tokens: int) -> Charge:
        """Count one request against the tenant's rates, and charge it so many tokens for now.

        If it raises, nothing is counted. Raises OverloadedError or RequestError, as Rates.charge.
        """
        self._rates[tenant.name].charge(num_tokens, self._now())
        return Charge(self, tenant.name, num_tokens)

    def settle(self, tenant: str, estimated: int, num_tokens: int) -> None:
        """Correct an estimated charge to `num_tokens`. Called by Charge."""
        self._rates[tenant].correct(num_tokens - estimated, self._now())
        self._charged(tenant, num_tokens)

    def check_integrity(self) -> None:
        """For tests: assert what must hold after each call."""
        digests = {digest for digest, _ in self._keys}
        assert len(digests) == len(self._keys)
        assert all(len(digest) == hashlib.sha256().digest_size for digest in digests)
        assert list(self._rates) == [ANONYMOUS.name, *(tenant.name for _, tenant in self._keys)]
        for rates in self._rates.values():
            rates.check_integrity(self._now())


def _digest(key: KeyArgs) -> bytes:
    assert key.sha256 is not None, "Gate wants AccessArgs.resolved()"
    return bytes.fromhex(key.sha256)


def _key_in(authorization: str | None, x_api_key: str | None) -> str:
    """The API key that a client presents. Raises AuthenticationError if there is none."""
    if authorization is None:
        if not x_api_key:
            raise AuthenticationError(
                "An API key is needed: send the header `Authorization: Bearer KEY`."
            )
        return x_api_key
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationError(
            "The Authorization header is not understood: send `Authorization: Bearer KEY`."
        )
    return key.strip()

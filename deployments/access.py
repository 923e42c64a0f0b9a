"""Who may call, and how much: API keys, their tenants, and the limits of each. Imports neither ray, vllm nor torch.

A key itself is never stored, sent to a replica or logged: configurations hold its SHA-256 digest, or name the
environment variable that holds it. `python -m deployments.access` makes a key.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from pydantic import Field, field_validator, model_validator

from cfg_core.errors import ConfigError
from deployments.http_errors import AuthenticationError, PermissionDeniedError
from deployments.rates import Rates
from deployments.yaml_args import YamlArgs

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SENDABLE = re.compile(r"[!-~]+")

_MAKE_DIGEST = "`python -m deployments.access --hash` prints the digest of a key"
_COUNTED = "Each replica of CfgRouter counts for itself."


# --- what the YAML says -----------------------------------------------------------------------------


class KeyArgs(YamlArgs):
    """One entry of `access.keys`: an API key, and what it may do. The holder of a key is called a tenant."""

    section = "access.keys"

    name: str = Field(description="The tenant, as logs and metrics show it: up to 64 letters, digits, `.`, `_`, `-`.")
    sha256: str | None = Field(
        default=None, description="SHA-256 digest of the key, 64 hexadecimal digits. Either this or `env`."
    )
    env: str | None = Field(
        default=None, description="Name of the environment variable that holds the key, where the application is built."
    )
    models: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="Served names that the key may use. Default: all."
    )
    requests_per_minute: int | None = Field(
        default=None, ge=1, description=f"Requests, of which a minute's worth may come at once. {_COUNTED}"
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of prompts and outputs, of all streams, of which a minute's worth may come at once. A "
        f"request is let in by an estimate, and charged what the engine did. {_COUNTED}",
    )
    max_streams: int | None = Field(
        default=None, ge=1, description=f"Streams that run or wait at once; a guided request has two. {_COUNTED}"
    )
    weight: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="Share of the engine when tenants compete for it."
    )
    min_priority: int = Field(
        default=0, description="The most urgent `priority` that a request may ask for; a lower number is sooner."
    )

    @field_validator("sha256")
    @classmethod
    def _lower_case(cls, sha256: str | None) -> str | None:
        return None if sha256 is None else sha256.lower()

    @model_validator(mode="after")
    def _well_formed(self) -> KeyArgs:
        check_name(self.name)
        if (self.sha256 is None) == (self.env is None):
            found = "neither is there" if self.env is None else "both are there"
            raise ConfigError(f"key `{self.name}` needs either `sha256` or `env`, and {found}: {_MAKE_DIGEST}.")
        if self.sha256 is not None and not _DIGEST.fullmatch(self.sha256):
            raise ConfigError(f"`sha256` of key `{self.name}` must be 64 hexadecimal digits: {_MAKE_DIGEST}.")
        if self.env is not None and not _VARIABLE.fullmatch(self.env):
            hint = "give the name of the environment variable that holds the key, not the key"
            raise ConfigError(f"`env` of key `{self.name}` is no name of an environment variable: {hint}.")
        return self

    def resolved(self) -> KeyArgs:
        """The same entry with `sha256`, read from the environment now if it has `env`. Raises ConfigError."""
        if self.env is None:
            return self
        key = os.environ.get(self.env, "")
        if not key:
            hint = "set it where the application is built (`runtime_env` in the YAML, or the shell), or give `sha256`"
            raise ConfigError(f"the environment variable in `env` of key `{self.name}` is not set, or empty: {hint}.")
        if not _SENDABLE.fullmatch(key):
            found = "holds spaces, line ends, or characters other than ASCII"
            raise ConfigError(f"key `{self.name}` {found}: no client can send it in a header. Remove them.")
        return self.model_copy(update={"sha256": digest_of(key).hex(), "env": None})


class AccessArgs(YamlArgs):
    """The `access:` of a deployment's `args:`. Without keys everybody may call."""

    section = "access"

    keys: tuple[KeyArgs, ...] = Field(
        default=(), description="API keys. Default: none, everybody may call, and is the tenant `anonymous`."
    )
    max_body_bytes: int = Field(
        default=8 * 2**20, ge=1, description="The largest request body that is read; above it clients get 413."
    )
    log_prompts: bool = Field(
        default=False, description="Log the first 500 characters of each request's body, prompts included."
    )

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[KeyArgs, ...]) -> tuple[KeyArgs, ...]:
        check_distinct(keys)
        return keys

    def resolved(self) -> AccessArgs:
        """The same arguments with every key as its digest: what may travel to another process. Raises ConfigError."""
        keys = tuple(key.resolved() for key in self.keys)
        check_distinct(keys)
        return self.model_copy(update={"keys": keys})


def check_name(name: str) -> None:
    """Raise ConfigError if a tenant cannot be called `name`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name[:100]!r} is no name for a key: use 1 to 64 letters, digits, `.`, `_` and `-`.")
    if name == ANONYMOUS.name:
        raise ConfigError(f"`{name}` in `access.keys` is the name of callers without a key: choose another.")


def check_distinct(keys: Sequence[KeyArgs]) -> None:
    """Raise ConfigError if two entries have the same name, or are the same key."""
    owners: dict[str, str] = {}
    for at, key in enumerate(keys):
        if key.name in {other.name for other in keys[:at]}:
            raise ConfigError(f"two keys have the name `{key.name}`: give each a `name` of its own.")
        secret = key.sha256 or f"env {key.env}"
        if secret in owners:
            raise ConfigError(f"`{owners[secret]}` and `{key.name}` are the same key: make another for one of them.")
        owners[secret] = key.name


def digest_of(key: str) -> bytes:
    """SHA-256 of a key, given as ASGI servers decode headers: one character for each byte."""
    return hashlib.sha256(key.encode("latin-1", "backslashreplace")).digest()


# --- what a request meets ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a tenant may use; the fields of KeyArgs. None: no limit.

    Gate keeps the two rates. `max_streams`, `weight` and `min_priority` are for whoever queues the streams.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_streams: int | None = None
    weight: float = 1.0
    min_priority: int | None = None


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Whom a request is counted for. `models`: the served names that it may use, None for all."""

    name: str
    models: tuple[str, ...] | None = None
    limits: Limits = Limits()


ANONYMOUS = Tenant(name="anonymous")
"""Every caller where no keys are configured, and whoever asks for a path that is open to all. Has no limits."""


class Charge:
    """What a request was charged before it was served, to be settled with what the engine did.

    As a context manager: a request that fails inside, before it is settled, costs nothing.
    """

    def __init__(self, gate: Gate, tenant: str, estimated: int) -> None:
        self._gate, self._tenant, self._estimated = gate, tenant, estimated
        self._is_settled = False

    def settle(self, num_tokens: int) -> None:
        """It took so many tokens. Only the first call counts."""
        if not self._is_settled:
            self._is_settled = True
            self._gate.settle(self._tenant, self._estimated, num_tokens)

    def __enter__(self) -> Charge:
        return self

    def __exit__(self, *_: object) -> None:
        self.settle(0)


class Gate:
    """Tells tenants by their keys, and holds them to their models and rates. Used from one event loop.

    `access` is resolved: every key has its digest. `now`: a clock in seconds that never goes back. `charged`: told of
    each settled charge, with the tenant's name and the tokens.
    """

    def __init__(
        self,
        access: AccessArgs,
        now: Callable[[], float] = time.monotonic,
        charged: Callable[[str, int], None] = lambda tenant, num_tokens: None,
    ) -> None:
        self._now, self._charged = now, charged
        self._keys = [(_digest(key), _tenant(key)) for key in access.keys]
        tenants = [ANONYMOUS, *(tenant for _, tenant in self._keys)]
        self._rates = {t.name: Rates(t.limits.requests_per_minute, t.limits.tokens_per_minute) for t in tenants}

    @property
    def has_keys(self) -> bool:
        """Whether callers need one."""
        return bool(self._keys)

    def authenticate(self, authorization: str | None, x_api_key: str | None = None) -> Tenant:
        """The tenant of these two request headers; `authorization` counts if both are there.

        Where no keys are configured everybody is ANONYMOUS, whatever the headers say: OpenAI's clients always send
        some key. Raises AuthenticationError.
        """
        if not self._keys:
            return ANONYMOUS
        digest = digest_of(_key_in(authorization, x_api_key))
        found = None
        for expected, tenant in self._keys:  # to the end, so that the time taken tells nothing
            if hmac.compare_digest(expected, digest):
                found = tenant
        if found is None:
            raise AuthenticationError("This API key is not known here: check it, or ask the operator for one.")
        return found

    def allow_model(self, tenant: Tenant, served_name: str) -> None:
        """Raise PermissionDeniedError, which names the models to use, if `tenant` may not use this one."""
        if tenant.models is not None and served_name not in tenant.models:
            instead = f"use {', '.join(tenant.models)}"
            raise PermissionDeniedError(f"This API key may not use {served_name[:100]!r}: {instead}.", "model")

    def charge(self, tenant: Tenant, num_tokens: int) -> Charge:
        """Count one request against the tenant's rates, of `num_tokens` tokens until its charge is settled; all of it,
        or nothing if it raises.

        Raises OverloadedError or RequestError, as Rates.charge.
        """
        self._rates[tenant.name].charge(num_tokens, self._now())
        return Charge(self, tenant.name, num_tokens)

    def settle(self, tenant: str, estimated: int, num_tokens: int) -> None:
        """Called by Charge."""
        self._rates[tenant].correct(num_tokens - estimated, self._now())
        self._charged(tenant, num_tokens)

    def check_integrity(self) -> None:
        """Assert what must always hold. For tests; after each call."""
        digests = {digest for digest, _ in self._keys}
        assert len(digests) == len(self._keys)
        assert all(len(digest) == hashlib.sha256().digest_size for digest in digests)
        assert list(self._rates) == [ANONYMOUS.name, *(tenant.name for _, tenant in self._keys)]
        for rates in self._rates.values():
            rates.check_integrity(self._now())


def _digest(key: KeyArgs) -> bytes:
    assert key.sha256 is not None, "Gate wants AccessArgs.resolved()"
    return bytes.fromhex(key.sha256)


def _tenant(key: KeyArgs) -> Tenant:
    limits = Limits(**{field.name: getattr(key, field.name) for field in fields(Limits)})
    return Tenant(name=key.name, models=key.models, limits=limits)


def _key_in(authorization: str | None, x_api_key: str | None) -> str:
    """The key that a client presents. Raises AuthenticationError if there is none."""
    if authorization is None:
        if not x_api_key:
            raise AuthenticationError("An API key is needed: send the header `Authorization: Bearer KEY`.")
        return x_api_key
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationError("The Authorization header is not understood: send `Authorization: Bearer KEY`.")
    return key.strip()


# --- making keys ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Print a new key on stderr, and its entry for the YAML on stdout; so a redirected stdout never holds a key."""
    parser = argparse.ArgumentParser(prog="python -m deployments.access", description="Make an API key.")
    parser.add_argument("--hash", action="store_true", help="read a key from stdin, print its SHA-256 digest instead")
    if parser.parse_args(argv).hash:
        key = sys.stdin.readline().rstrip("\r\n")
        if not _SENDABLE.fullmatch(key):
            sys.exit("Put the key alone on one line: ASCII characters, no spaces.")
        print(digest_of(key).hex())
        return
    key = secrets.token_urlsafe(32)
    print(f"The key, for its holder; it is stored nowhere: {key}\nThe entry for `access.keys`:", file=sys.stderr)
    print(f'- name: CHANGE-ME\n  sha256: "{digest_of(key).hex()}"')


if __name__ == "__main__":
    main()

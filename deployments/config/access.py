"""The `access:` of `args:`: API keys, and limits on what requests may bring.

A key itself is never stored, sent to a replica or logged. A YAML file holds its SHA-256 digest, or
names the environment variable that holds it. `python -m deployments.access` makes a key.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence

from pydantic import Field, field_validator, model_validator

from cfg_core.errors import ConfigError
from deployments.config.base import YamlArgs

ANONYMOUS_NAME = "anonymous"
"""The tenant of callers without a key."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SENDABLE = re.compile(r"[!-~]+")

_MAKE_DIGEST = "`python -m deployments.access --hash` prints the digest of a key"
_COUNTED = "Each replica of CfgRouter counts for itself."


# --- what the YAML says ---------------------------------------------------------------------------


class KeyArgs(YamlArgs):
    """One entry of `access.keys`: an API key, and what it may do. The holder of a key is called a
    tenant."""

    section = "access.keys"

    name: str = Field(
        description=(
            "The tenant, as logs and metrics show it: up to 64 letters, digits, `.`, `_`, `-`."
        )
    )
    sha256: str | None = Field(
        default=None,
        description="SHA-256 digest of the key, 64 hexadecimal digits. Either this or `env`.",
    )
    env: str | None = Field(
        default=None,
        description=(
            "Name of the environment variable that holds the key, where the application is built."
        ),
    )
    models: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="Served names that the key may use. Default: all."
    )
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description=f"Requests, of which a minute's worth may come at once. {_COUNTED}",
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Tokens of prompts and outputs, of all streams, of which a minute's worth may come at"
            " once. A request is let in by an estimate, and charged what the engine did."
            f" {_COUNTED}"
        ),
    )
    max_streams: int | None = Field(
        default=None,
        ge=1,
        description=f"Streams that run or wait at once; a guided request has two. {_COUNTED}",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="Share of the engine when tenants compete for it.",
    )
    min_priority: int = Field(
        default=0,
        description=(
            "The most urgent `priority` that a request may ask for; a lower number is sooner."
        ),
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
            raise ConfigError(
                f"key `{self.name}` needs either `sha256` or `env`, and {found}: {_MAKE_DIGEST}."
            )
        if self.sha256 is not None and not _DIGEST.fullmatch(self.sha256):
            raise ConfigError(
                f"`sha256` of key `{self.name}` must be 64 hexadecimal digits: {_MAKE_DIGEST}."
            )
        if self.env is not None and not _VARIABLE.fullmatch(self.env):
            hint = "give the name of the environment variable that holds the key, not the key"
            raise ConfigError(
                f"`env` of key `{self.name}` is no name of an environment variable: {hint}."
            )
        return self

    def resolved(self) -> KeyArgs:
        """The same entry with `sha256`, read from the environment now if it has `env`. Raises
        ConfigError."""
        if self.env is None:
            return self
        key = os.environ.get(self.env, "")
        if not key:
            hint = (
                "set it where the application is built (`runtime_env` in the YAML, or the shell),"
                " or give `sha256`"
            )
            raise ConfigError(
                f"the environment variable in `env` of key `{self.name}` is not set, or empty:"
                f" {hint}."
            )
        if not _SENDABLE.fullmatch(key):
            found = "holds spaces, line ends, or characters other than ASCII"
            raise ConfigError(
                f"key `{self.name}` {found}: no client can send it in a header. Remove them."
            )
        return self.model_copy(update={"sha256": digest_of(key).hex(), "env": None})


class AccessArgs(YamlArgs):
    """The `access:` of a deployment's `args:`. Without keys everybody may call."""

    section = "access"

    keys: tuple[KeyArgs, ...] = Field(
        default=(),
        description="API keys. Default: none, everybody may call, and is the tenant `anonymous`.",
    )
    max_body_bytes: int = Field(
        default=8 * 2**20,
        ge=1,
        description="The largest request body that is read; above it clients get 413.",
    )
    log_prompts: bool = Field(
        default=False,
        description="Log the first 500 characters of each request's body, prompts included.",
    )

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[KeyArgs, ...]) -> tuple[KeyArgs, ...]:
        check_distinct(keys)
        return keys

    def resolved(self) -> AccessArgs:
        """The same arguments with every key as its digest: what may travel to another process.
        Raises ConfigError."""
        keys = tuple(key.resolved() for key in self.keys)
        check_distinct(keys)
        return self.model_copy(update={"keys": keys})


def check_name(name: str) -> None:
    """Raise ConfigError if a tenant cannot be called `name`."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:100]!r} is no name for a key: use 1 to 64 letters, digits, `.`, `_` and `-`."
        )
    if name == ANONYMOUS_NAME:
        raise ConfigError(
            f"`{name}` in `access.keys` is the name of callers without a key: choose another."
        )


def check_distinct(keys: Sequence[KeyArgs]) -> None:
    """Raise ConfigError if two entries have the same name, or are the same key."""
    owners: dict[str, str] = {}
    for at, key in enumerate(keys):
        if key.name in {other.name for other in keys[:at]}:
            raise ConfigError(
                f"two keys have the name `{key.name}`: give each a `name` of its own."
            )
        secret = key.sha256 or f"env {key.env}"
        if secret in owners:
            raise ConfigError(
                f"`{owners[secret]}` and `{key.name}` are the same key: make another for one of"
                " them."
            )
        owners[secret] = key.name


def digest_of(key: str) -> bytes:
    """SHA-256 of a key, given as ASGI servers decode headers: one character for each byte."""
    return hashlib.sha256(key.encode("latin-1", "backslashreplace")).digest()

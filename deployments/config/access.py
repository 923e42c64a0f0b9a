"""The section `access:` of `args:`: API keys, the size of bodies, and the logging of prompts.

A key itself is never stored, sent to a replica or logged. A YAML file holds its SHA-256 digest, or
names the environment variable that holds the key. `python -m deployments.access` makes a key.
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


class KeyArgs(YamlArgs):
    """One entry of `access.keys`: an API key, and what it may do.

    The holder of a key is called a tenant.
    """

    section = "access.keys"

    name: str
    """Name of the tenant, who is the holder of the key. Logs and metrics show it. 1 to 64 letters,
    digits, `.`, `_` and `-`.
    """

    sha256: str | None = None
    """SHA-256 digest of the key, as 64 hexadecimal digits. Each entry needs either `sha256` or
    `env`.
    """

    env: str | None = None
    """Name of an environment variable that holds the key itself. It is read when the application is
    built: set it in `runtime_env` of the YAML file, or on every node before `ray start`.
    """

    models: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Names of the models that the key may use, as clients send them. Default: all models."""

    may_load_adapters: bool = False
    """Whether the key may load and unload LoRA adapters while the server runs. The adapter's
    directory is read on the server, so give this right only to operators.
    """

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Maximum number of requests per minute. All requests of a minute may come at once. Default: no
    limit. Each replica of CfgRouter counts for itself.
    """

    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Maximum number of tokens per minute: prompts and outputs, of all streams. All tokens of a
    minute may be used at once. A request is admitted by an estimate, and then charged for the
    tokens that the engine processed. A request whose estimate is more than a minute's tokens gets
    400. Default: no limit. Each replica of CfgRouter counts for itself.
    """

    max_streams: int | None = Field(default=None, ge=1)
    """Maximum number of streams of the tenant that run or wait at the same time. A guided request
    has two or more. Default: no limit. Each replica of CfgRouter counts for itself.
    """

    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight of the tenant when tenants compete for the generator. A tenant with weight 2 gets
    twice as many tokens as one with weight 1.
    """

    min_priority: int = 0
    """Lowest number that a request may send as `priority`. Requests with lower numbers are served
    sooner. A request that sends no `priority` gets 0, or this number if it is higher.
    """

    @field_validator("sha256")
    @classmethod
    def _lower_case(cls, sha256: str | None) -> str | None:
        return None if sha256 is None else sha256.lower()

    @model_validator(mode="after")
    def _well_formed(self) -> KeyArgs:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"{self.name[:100]!r} is not a valid key name: use 1 to 64 letters, digits, `.`,"
                " `_` and `-`."
            )
        if self.name == ANONYMOUS_NAME:
            raise ConfigError(
                f"`{self.name}` in `access.keys` is the name of callers without a key: choose"
                " another name."
            )
        if (self.sha256 is None) == (self.env is None):
            found = "neither is set" if self.env is None else "both are set"
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
                f"`env` of key `{self.name}` is not the name of an environment variable: {hint}."
            )
        return self

    def resolved(self) -> KeyArgs:
        """The same entry with `sha256`; an entry with `env` is read from the environment now.

        Raises ConfigError if the environment variable is not set, or no client can send its value.
        """
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
    """The section `access:` of `args:`.

    Without keys everybody may call.
    """

    section = "access"

    keys: tuple[KeyArgs, ...] = ()
    """API keys, one entry each. Default: none. Then everybody may call, and all callers are the
    tenant `anonymous`.
    """

    max_body_bytes: int = Field(default=8 * 2**20, ge=1)
    """Maximum size of a request body, in bytes. A larger one is refused with 413."""

    log_prompts: bool = False
    """Log the first 500 characters of each request's body, including prompts."""

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[KeyArgs, ...]) -> tuple[KeyArgs, ...]:
        check_distinct(keys)
        return keys

    def resolved(self) -> AccessArgs:
        """The same arguments with a digest in place of each key, to be sent to other processes.

        Raises ConfigError.
        """
        keys = tuple(key.resolved() for key in self.keys)
        check_distinct(keys)
        return self.model_copy(update={"keys": keys})


def check_distinct(keys: Sequence[KeyArgs]) -> None:
    """Raise ConfigError if two entries have the same name or the same key."""
    owners: dict[str, str] = {}
    for at, key in enumerate(keys):
        if key.name in {other.name for other in keys[:at]}:
            raise ConfigError(
                f"two keys have the name `{key.name}`: give each a `name` of its own."
            )
        secret = key.sha256 or f"env {key.env}"
        if secret in owners:
            raise ConfigError(
                f"`{owners[secret]}` and `{key.name}` are the same key: make a new key for one of"
                " them."
            )
        owners[secret] = key.name


def digest_of(key: str) -> bytes:
    """SHA-256 digest of a key.

    key: decoded as ASGI servers decode headers, one character for each byte.
    """
    return hashlib.sha256(key.encode("latin-1", "backslashreplace")).digest()

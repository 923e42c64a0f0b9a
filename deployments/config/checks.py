"""Checks on `args:` that involve several keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cfg_core.errors import ConfigError
from deployments.config.limits import LimitsArgs

RESERVED_DEPLOYMENTS = ("CfgRouter", "ModelReplica")

OF_THE_GENERATOR = (
    "engine",
    "frontend",
    "served_model_name",
    "fallback",
    "logits_processors",
    "draft_cost",
    "max_followers",
)
"""Keys of `args` that say nothing without `model`."""


def check_generator(args: Mapping[str, Any]) -> None:
    """Raise ConfigError if nothing is served, or if options of the generator lack their `model`.

    args: the fields of AppArgs.
    """
    if args["model"] is None and not args["encoders"]:
        raise ConfigError("`args` names nothing to serve: give `model`, `encoders`, or both.")
    for key in OF_THE_GENERATOR:
        if args["model"] is None and args[key]:
            hint = "name the model, or move it to an encoder"
            raise ConfigError(f"`{key}` in `args` belongs to `model`, which is missing: {hint}.")


def check_body_limits(max_body_bytes: int, limits: LimitsArgs) -> None:
    """Raise ConfigError if a body that `access` allows can never be served under `limits`."""
    for name in ("max_body_bytes_at_once", "max_body_bytes_per_client"):
        limit = getattr(limits, name)
        if limit < max_body_bytes:
            raise ConfigError(
                f"`limits.{name}` is {limit}, below `access.max_body_bytes` ({max_body_bytes}), so"
                " a large body would always get 429: raise the limit, or lower"
                " `access.max_body_bytes`."
            )


def check_unique(deployments: Sequence[str], served_names: Sequence[str]) -> None:
    """Raise ConfigError if two models have the same served name or the same deployment name."""
    for name in deployments:
        if name in RESERVED_DEPLOYMENTS:
            raise ConfigError(
                f"`deployment: {name}` in `encoders` is the name of another part: choose its own"
                " name."
            )
        if deployments.count(name) > 1:
            raise ConfigError(
                f"{deployments.count(name)} encoders have the deployment name `{name}`: give each a"
                " `deployment` of its own, and use these names under `deployments:`."
            )
    for name in served_names:
        if served_names.count(name) > 1:
            raise ConfigError(
                f"two models are served as `{name}`: give each a `served_model_name` of its own."
            )

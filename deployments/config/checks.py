"""Checks that involve several keys of `args:`, or a key and the environment."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cfg_core.errors import ConfigError
from deployments.config.limits import LimitsArgs

USES_GRPC, MAX_LENGTH = "RAY_SERVE_USE_GRPC_BY_DEFAULT", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"
DEFAULT_MAX_LENGTH = 4 * 2**20
"""Serve's own limit, in bytes, if the variable MAX_LENGTH is not set."""

BODY_GROWTH = 3
"""A decoded and pickled body has at most this many times the bytes of its JSON text.

For example, `1e1,` has 4 bytes, and a pickled float has 9.
"""

ENVELOPE_BYTES = 2**16
"""Bytes of a message that are left for guidance, headers, and what Serve adds."""

RESERVED_DEPLOYMENTS = ("CfgRouter", "ModelReplica")

OF_THE_GENERATOR = (
    "engine",
    "frontend",
    "served_model_name",
    "scales_to_zero",
    "fallback",
    "logits_processors",
    "draft_cost",
    "max_followers",
)
"""Keys of `args` that say nothing without `model`."""


def check_generator(args: Mapping[str, Any], given: Collection[str]) -> None:
    """Raise ConfigError if nothing is served, or if options of the generator lack their `model`.

    args: the fields of AppArgs. given: those of them that the YAML has and that belong to a model.
    """
    if args["models"]:
        for key in given:
            raise ConfigError(
                f"`{key}` in `args` belongs to one model: move it into an entry of `models`."
            )
        return
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


def check_unique(
    generators: Sequence[str], encoders: Sequence[str], served_names: Sequence[str]
) -> None:
    """Raise ConfigError if two models have the same served name or the same deployment name.

    generators, encoders: the names of their deployments.
    """
    _check_deployments("models", generators, RESERVED_DEPLOYMENTS[:1])
    _check_deployments("encoders", encoders, (*RESERVED_DEPLOYMENTS, *generators))
    for name in served_names:
        if served_names.count(name) > 1:
            raise ConfigError(
                f"two models are served as `{name}`: give each a `served_model_name` of its own."
            )


def _check_deployments(section: str, names: Sequence[str], others: Collection[str]) -> None:
    for name in names:
        if name in others:
            raise ConfigError(
                f"`deployment: {name}` in `{section}` is the name of another part: choose its own"
                " name."
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} {section} have the deployment name `{name}`: give each a"
                " `deployment` of its own, and use these names under `deployments:`."
            )


def check_message_sizes(
    max_body_bytes: int, max_answer_bytes: int, environment: Mapping[str, str]
) -> None:
    """Raise ConfigError if a message cannot hold the largest body, or an encoder's largest answer.

    With gRPC between replicas the size of a message is limited, by the environment of each process.
    A call with a larger message fails, in the case of an answer only after all the work is done.

    environment: the environment variables of this process.
    """
    if environment.get(USES_GRPC) != "1":
        return
    limit = int(environment.get(MAX_LENGTH, DEFAULT_MAX_LENGTH)) - ENVELOPE_BYTES
    needs = {
        "access.max_body_bytes": BODY_GROWTH * max_body_bytes,
        "max_answer_bytes": max_answer_bytes,
    }
    for name, needed in needs.items():
        if needed > limit:
            raise ConfigError(
                f"`{name}` needs messages of {needed} bytes between replicas, and {MAX_LENGTH}"
                f" allows {limit}: set it to {needed + ENVELOPE_BYTES} or more before `ray start`"
                f" (configs/serve.env), or lower `{name}`."
            )

"""Checks on `args:` that involve several keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cfg_core.errors import ConfigError

if TYPE_CHECKING:
    from deployments.config.args import AppArgs

RESERVED_DEPLOYMENTS = ("CfgRouter", "ModelReplica")


def check_generator(args: AppArgs) -> None:
    """Raise ConfigError if nothing is served, or if options of the generator lack their `model`."""
    if args.model is None and not args.encoders:
        raise ConfigError("`args` names nothing to serve: give `model`, `encoders`, or both.")
    for key in ("engine", "frontend", "served_model_name", "logits_processors", "draft_cost"):
        if args.model is None and getattr(args, key):
            hint = "name the model, or move it to an encoder"
            raise ConfigError(f"`{key}` in `args` belongs to `model`, which is missing: {hint}.")


def check_unique(args: AppArgs) -> None:
    """Raise ConfigError if two models have the same served name or the same deployment name."""
    names = [encoder.deployment for encoder in args.encoders]
    for name in names:
        if name in RESERVED_DEPLOYMENTS:
            raise ConfigError(
                f"`deployment: {name}` in `encoders` is the name of another part: choose its own"
                " name."
            )
        if names.count(name) > 1:
            raise ConfigError(
                f"{names.count(name)} encoders have the deployment name `{name}`: give each a"
                " `deployment` of its own, and use these names under `deployments:`."
            )
    for name in args.served_names:
        if args.served_names.count(name) > 1:
            raise ConfigError(
                f"two models are served as `{name}`: give each a `served_model_name` of its own."
            )

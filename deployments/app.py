"""The Serve application: `import_path: deployments.app:build` in a YAML file."""

# No `from __future__ import annotations` here: Serve reads the annotation of `build`.

import logging
import os
from typing import Any

from ray.serve import Application

from deployments.config.args import AppArgs
from deployments.config.checks import check_message_sizes
from deployments.encoder.replica import Embedder
from deployments.generator.replica import ModelReplica
from deployments.ingress.router import CfgRouter

logger = logging.getLogger("ray.serve")


def build(args: AppArgs) -> Application:
    """Put CfgRouter in front of the deployments of generators and encoders.

    Raises ConfigError for a mistake in `args`, before anything starts.
    """
    for sentence in args.missing_models():
        logger.warning(sentence)
    args = args.resolved()
    largest_answer = max((encoder.options.max_answer_bytes for encoder in args.encoders), default=0)
    check_message_sizes(args.access.max_body_bytes, largest_answer, os.environ)
    if os.environ.get("RAY_AUTH_MODE") != "token":
        logger.warning(
            "Ray's token authentication is off: whoever reaches a port of a replica can run code"
            " there. Set RAY_AUTH_MODE=token, see docs/operations.md."
        )
    deployments: tuple[Any, ...] = (CfgRouter, ModelReplica, Embedder)
    router, generator, encoder = deployments  # Serve's decorator is not typed
    generators = {
        g.model_name: generator.options(name=g.deployment).bind(g) for g in args.generators
    }
    encoders = {e.model_name: encoder.options(name=e.deployment).bind(e) for e in args.encoders}
    application: Application = router.bind(generators, encoders, args)
    return application

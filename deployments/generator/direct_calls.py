"""Whether a generator replica takes direct calls, and its listener for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ray import serve

from deployments.autoscaling import GuidedLoad
from deployments.direct.listener import AnswerCall, CallListener

logger = logging.getLogger("ray.serve")

PRIVATE = {"ray.serve.context:ReplicaContext": ("_deployment_config",)}
"""Names of Ray that are used here and are not public."""


async def start_listener(host: str, answer: AnswerCall, wanted: bool) -> CallListener | None:
    """Listen for direct calls on `host`. None if this replica takes none, with a line in the log.

    wanted: `direct_calls` of the YAML.
    """
    deployment = serve.get_replica_context()._deployment_config
    if not wanted:
        return None
    if reason := reason_against(deployment.autoscaling_config, os.environ):
        logger.info("No direct calls: %s", reason)
        return None
    listener = CallListener(host, answer, deployment.max_ongoing_requests)
    try:
        await listener.start()
    except OSError as error:  # the node's address may be one that only others can use
        logger.warning("No direct calls: %s", error)
        return None
    return listener


def reason_against(autoscaling: Any, env: Mapping[str, str]) -> str | None:
    """Why there can be no direct calls; None if there can be.

    autoscaling: Serve's AutoscalingConfig of the deployment; None without autoscaling.
    """
    if env.get("RAY_USE_TLS", "0") not in ("", "0"):
        return "Ray's connections are encrypted (RAY_USE_TLS), and direct ones would not be."
    if autoscaling is not None and GuidedLoad.__name__ not in str(
        autoscaling.policy.policy_function
    ):
        return "The autoscaling policy counts requests, and Serve does not see direct ones."
    return None

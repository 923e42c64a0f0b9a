"""Calls from the ingress to a replica: what comes back, what a failure means, and what cancels a call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi.responses import StreamingResponse
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentResponse, DeploymentResponseGenerator
from starlette.types import Receive

from cfg_core.errors import CfgServeError, EngineDeadError, EngineError, OverloadedError
from deployments import sse

logger = logging.getLogger("ray.serve")


class EventStream(StreamingResponse):
    """Server-sent events. A client that leaves is no failure, whichever of two ways Serve tells it in."""

    media_type = "text/event-stream"

    async def listen_for_disconnect(self, receive: Receive) -> None:
        with suppress(TaskCancelledError):
            await super().listen_for_disconnect(receive)


async def events(items: DeploymentResponseGenerator, first: str) -> AsyncIterator[str]:
    """The chunks of a stream. A failure ends it with an error event; a client that leaves cancels the call."""
    done = False
    try:
        yield first
        while True:
            yield await next_item(items)
    except StopAsyncIteration:
        done = True
    except CfgServeError as error:
        done = True
        yield sse.error_event(error)
    finally:
        if not done:
            items.cancel()


async def next_item(items: DeploymentResponseGenerator) -> str:
    """The next item of a replica's answer. Errors arrive as values, or from Serve as exceptions."""
    try:
        item = await anext(items)
    except StopAsyncIteration:
        raise
    except Exception as error:
        raise _own_error(error) from error
    if isinstance(item, CfgServeError):
        raise item
    return item


async def value_of(response: DeploymentResponse) -> Any:
    """The value of a unary call, which is cancelled with its caller."""
    try:
        value = await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:
        raise _own_error(error) from error
    if isinstance(value, CfgServeError):
        raise value
    return value


def _own_error(error: Exception) -> CfgServeError:
    """What Serve and Ray raise, as one of our own."""
    if isinstance(error, BackPressureError):
        return OverloadedError("Too many requests are waiting: try again later.", error.retry_after_s or 1.0)
    if isinstance(error, RayActorError | DeploymentUnavailableError | ReplicaUnavailableError):
        return EngineDeadError("The engine was lost: send the request again.")
    if isinstance(error, RequestCancelledError):
        return EngineDeadError("The request was cancelled by the server: send it again.")
    logger.error("Unexpected error from a replica.", exc_info=error)
    return EngineError("Internal error: see the server's log.")

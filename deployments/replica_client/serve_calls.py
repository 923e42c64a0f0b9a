"""Calls through Serve's handle: what comes back, with errors of Serve and Ray made our own."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentResponseGenerator

from cfg_core.errors import CfgServeError, EngineDeadError, EngineError, OverloadedError
from deployments.messages import INTERNAL, LOST, Failed, Item

logger = logging.getLogger("ray.serve")


class ServeItems:
    """The items of an answer that comes through Serve's handle."""

    def __init__(self, items: DeploymentResponseGenerator[Any]) -> None:
        self._items = items

    async def next(self) -> Item:
        """The next item; a `Failed` is returned.

        Raises StopAsyncIteration at the end, and CfgServeError for what Serve raised.
        """
        try:
            item: Item = await anext(self._items)
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise _own_error(error) from error
        return item

    def cancel(self) -> None:
        self._items.cancel()  # type: ignore[no-untyped-call]


async def value_of(response: Any) -> Any:
    """The value of a DeploymentResponse.

    Cancelling the caller cancels the call. Raises CfgServeError, also for a value that is `Failed`.
    """
    try:
        value = await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:
        raise _own_error(error) from error
    if isinstance(value, Failed):
        raise value.error
    return value


def _own_error(error: Exception) -> CfgServeError:
    if isinstance(error, BackPressureError):
        return OverloadedError(
            "Too many requests are waiting: try again later.",
            error.retry_after_s or 1.0,
            "serve_queue",
        )
    if isinstance(error, RayActorError | DeploymentUnavailableError | ReplicaUnavailableError):
        return EngineDeadError(LOST)
    if isinstance(error, RequestCancelledError):
        return EngineDeadError("The request was cancelled by the server: send it again.")
    logger.error("Unexpected error from a replica.", exc_info=error)
    return EngineError(INTERNAL)

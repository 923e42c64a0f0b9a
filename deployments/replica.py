"""ModelReplica: a Serve replica that owns one guided vLLM engine.

Importing this module is cheap: vllm is imported when a replica starts.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from cfg_core.errors import CfgServeError, EngineDeadError, RequestError
from deployments.autoscaling import report
from deployments.config import AppArgs
from deployments.liveness import Beacon
from deployments.log_handlers import log_handlers_kept
from deployments.progress import with_progress
from deployments.protocol import Endpoint, Guidance
from deployments.routing import GroupRouter
from deployments.sse import parts
from deployments.usage import Meter, Usage
from deployments.watchdog import PULSE_S, Pulse, exit_with_engine

logger = logging.getLogger("ray.serve")

T = TypeVar("T")


def _workers_placement() -> PlacementGroup | None:
    """Where the engine puts its workers: the bundles of this replica, in this cluster.

    The engine runs in a process of its own, which would start another Ray if no address told it better.
    """
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    return get_current_placement_group()


@serve.deployment(
    max_ongoing_requests=64,
    max_queued_requests=256,
    request_router_config=RequestRouterConfig(request_router_class=GroupRouter, request_routing_stats_period_s=PULSE_S),
)
class ModelReplica:
    """Called by CfgRouter. One call of `generate` carries a whole group: the leader and its negative.

    Errors are yielded or returned, as values of `cfg_core.errors`, not raised: Serve logs a traceback
    for what is raised, and a refused request is no event.
    """

    async def __init__(self, args: AppArgs) -> None:
        group = _workers_placement() if args.num_workers > 1 else None
        with log_handlers_kept():
            from deployments.vllm_serving import VllmServer

            self._server = await VllmServer.start(
                args.engine_kwargs(),
                args.plugin_kwargs,
                args.frontend,
                group,
                streams_at_once=args.admission.streams_at_once_per_request,
                max_text_chars=args.max_text_chars,
            )
        self._pulse = Pulse(self._server.stats, args.hang_timeout_s)
        self._beacon = Beacon(ray.util.get_node_ip_address(), args.hang_timeout_s)
        self._watchdogs = [
            asyncio.create_task(exit_with_engine(self._engine_is_dead)),
            asyncio.create_task(self._pulse.run()),
        ]

    def _engine_is_dead(self) -> bool:
        """Called several times a second by the event loop, so it also tells the beacon that the loop runs."""
        self._beacon.tick()
        return self._server.errored or self._pulse.has_stopped

    async def generate(
        self, endpoint: Endpoint, body: dict[str, Any], guidance: Guidance | None, headers: dict[str, str], call: str
    ) -> AsyncIterator[str | Usage | CfgServeError]:
        """Yield the SSE chunks of a stream, or one JSON text in parts, and reports of usage between them (progress.py);
        a CfgServeError is the last item if it failed. `call` is for the router (dispatches.py).

        Cancelling the call, or closing the iterator, aborts the group in the engine.
        """
        meter = Meter()
        try:
            texts = self._server.generate(endpoint, body, guidance, headers, meter)
            async with aclosing(with_progress(texts, lambda: meter.usage)) as items:
                async for item in items:
                    for part in parts(item) if isinstance(item, str) else (item,):
                        yield part
        except CfgServeError as error:
            yield meter.usage
            yield self._noted(error)

    async def models(self) -> str | CfgServeError:
        """The answer of /v1/models, as JSON text."""
        return await self._value(self._server.models())

    async def tokenize(self, body: dict[str, Any], headers: dict[str, str]) -> str | CfgServeError:
        """The answer of /tokenize, as JSON text."""
        return await self._value(self._server.tokenize(body, headers))

    async def detokenize(self, body: dict[str, Any], headers: dict[str, str]) -> str | CfgServeError:
        """The answer of /detokenize, as JSON text."""
        return await self._value(self._server.detokenize(body, headers))

    async def _value(self, answer: Awaitable[T]) -> T | CfgServeError:
        try:
            return await answer
        except CfgServeError as error:
            return self._noted(error)

    def _noted(self, error: CfgServeError) -> CfgServeError:
        """`error`, with a log line if it is the server's fault. Whatever fails on a dead engine, fails for that."""
        if self._server.errored:
            return EngineDeadError("The engine was lost: send the request again.")
        if not isinstance(error, RequestError):
            logger.error("%s: %s", type(error).__name__, error)
        return error

    async def engine_state(self) -> dict[str, int] | CfgServeError:
        """Requests, groups and KV blocks, as the engine process holds them at this moment."""
        return await self._value(self._server.stats())

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every PULSE_S; GroupRouter reads it."""
        return self._pulse.stats | self._beacon.address

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for autoscaling.GuidedLoad."""
        return report(self._pulse.stats)

    async def check_health(self) -> None:
        """Called by Serve at each health check period: raises if the engine is dead."""
        await self._server.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_watchdogs"):
            for watchdog in self._watchdogs:
                watchdog.cancel()
            self._server.shutdown()

"""ModelReplica: a Serve replica that owns one guided vLLM engine.

Importing this module is cheap: vllm is imported when a replica starts.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from cfg_core.errors import CfgServeError, EngineDeadError, RequestError
from cfg_core.memory import quick_start
from deployments import serve_patches
from deployments.autoscaling import GuidedLoad, report
from deployments.config.args import AppArgs
from deployments.direct.listener import AnswerCall, CallListener
from deployments.generator import environment
from deployments.generator.heartbeats import with_heartbeats
from deployments.generator.moving.drain import Drain, follow
from deployments.generator.ray_cluster import name_cluster
from deployments.health.beacon import Beacon
from deployments.health.engine_watch import PULSE_S, Pulse, exit_with_engine
from deployments.messages import LOST, Failed, GenerateCall, Item
from deployments.observability import json_lines, spans
from deployments.observability.log_handlers import log_handlers_kept
from deployments.observability.spans import Span
from deployments.requests.usage import Meter
from deployments.routing.call_placer import MODEL
from deployments.routing.serve_routers import GroupRouter

logger = logging.getLogger("ray.serve")

T = TypeVar("T")

PRIVATE = {"ray.serve.context:ReplicaContext": ("_deployment_config",)}
"""Names of Ray that are used here and are not public."""

ROUTER = RequestRouterConfig(
    request_router_class=GroupRouter,  # type: ignore[arg-type] # its validators are not typed
    request_routing_stats_period_s=PULSE_S,  # type: ignore[arg-type]
)


FLUSH_S = 1.0
"""Seconds at most that a replica which stops, after its engine, sends its last spans."""


def _workers_placement() -> PlacementGroup | None:
    """Where the engine puts its workers: the bundles of this replica, in this cluster."""
    name_cluster()
    return get_current_placement_group()


@serve.deployment(
    max_ongoing_requests=64,
    max_queued_requests=256,
    request_router_config=ROUTER,
)
class ModelReplica:
    """A guided vLLM engine, called by CfgRouter.

    One call of `generate` carries a whole group: the leader and its negative. Errors are yielded or
    returned, as values of `cfg_core.errors`, not raised: Serve logs a traceback for what is raised,
    and a refused request needs none.
    """

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc] # Serve awaits it
        self._name = serve.get_replica_context().replica_id.unique_id
        spans.start(args.tracing, process="replica", replica=self._name)
        group = _workers_placement() if args.num_workers > 1 else None
        environment.set_defaults(os.environ, args.engine)
        if json_lines.is_wanted(logger) and args.num_workers == 1:
            json_lines.use_in_vllm(os.environ)  # the file may be elsewhere on other nodes
        with log_handlers_kept(), quick_start():
            from cfg_core.vllm_plugin.versions import tested

            # before our modules import what another vLLM may have moved
            tested.check_version(args.allow_untested_vllm)
            tested.check_names("deployments.generator", serve_patches.ROWS)
            from vllm.utils.gc_utils import freeze_gc_heap

            from deployments.generator.vllm_server import VllmServer

            self._server = await VllmServer.start(args, group)
        freeze_gc_heap()  # as vLLM's own server does: a collection then looks at requests alone
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._pulse = Pulse(self._server.stats, args.hang_timeout_s)
        self._beacon = Beacon(address, args.hang_timeout_s)
        self._calls = 0
        self._drain = Drain(args.drain_after_s)
        follow(self._drain)
        self._listener = await start_listener(address, self.generate, args.direct_calls)
        self._watchdogs = [
            asyncio.create_task(exit_with_engine(self._engine_is_dead)),
            asyncio.create_task(self._pulse.run()),
        ]

    def _engine_is_dead(self) -> bool:
        """Whether the engine is dead or hangs.

        The event loop calls this several times a second, so this also tells the beacon that the
        loop runs.
        """
        self._beacon.tick()
        return self._server.errored or self._pulse.look()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[Item]:
        """Yield the answer of one call, with reports of its usage (messages.py).

        Cancelling the call, or closing the iterator, aborts the group in the engine.
        """
        self._calls += 1
        meter = Meter()
        span = self._span(call)
        entry = self._drain.enter()
        try:
            recorder = self._server.recorder(call, meter)
            answer = self._server.generate(call, meter, span, recorder)
            items = with_heartbeats(answer, lambda: meter.usage, progress=recorder.take_whole)
            async with aclosing(items):
                async for item in items:
                    yield self._drain.marked(entry, item)
        except CfgServeError as error:
            if span is not None:
                span.fail(error)
            request_id = call.headers.get("x-request-id")
            yield replace(self._failed(error, request_id), usage=meter.usage)
        finally:
            self._drain.leave(entry)
            if span is not None:
                span.end()

    def _span(self, call: GenerateCall) -> Span | None:
        """The call's span in this process; None if the call is not traced."""
        tracing = spans.current()
        if tracing is None:
            return None
        streams = 1 if call.guidance is None else call.guidance.streams
        about: dict[str, str | int] = {
            "replica": self._name,
            "endpoint": call.endpoint,
            "streams": streams,
        }
        span = tracing.under(call.headers, "replica", about)
        return span if span.is_recording else None

    async def ask(self, method: str, *args: Any) -> str | Failed:
        """The text that a method of SmallAnswers returns."""
        return await self._value(getattr(self._server.small, method)(*args))

    async def _value(self, answer: Awaitable[T]) -> T | Failed:
        try:
            return await answer
        except CfgServeError as error:
            return self._failed(error)

    def _failed(self, error: CfgServeError, request_id: str | None = None) -> Failed:
        """`error` for the ingress, with a log line if it is the server's fault.

        On a dead engine, every failure counts as caused by its death.
        """
        if self._server.errored:
            return Failed(EngineDeadError(LOST))
        if not isinstance(error, RequestError):
            kind = type(error).__name__
            about = {"error": kind, **({"request_id": request_id} if request_id else {})}
            logger.error("%s: %s", kind, error, extra=about)
        return Failed(error)

    async def engine_state(self) -> dict[str, int] | Failed:
        """Requests, groups and KV blocks, as the engine process holds them at this moment."""
        return await self._value(self._server.stats())

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve every PULSE_S, for GroupRouter."""
        direct = self._listener.address.report() if self._listener else {}
        own = {"calls": self._calls, MODEL: self._server.model}
        return self._pulse.stats | own | self._beacon.address | direct

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for autoscaling.GuidedLoad."""
        return report(self._pulse.stats)

    async def check_health(self) -> None:
        """Called by Serve at each health check: raises if the engine is dead."""
        await self._server.check_health()

    async def __del__(self) -> None:
        """Called by Serve when the replica stops and has no call of Serve's any more."""
        if hasattr(self, "_watchdogs"):
            if self._listener is not None:
                await self._listener.stop()
            for watchdog in self._watchdogs:
                watchdog.cancel()
            self._server.shutdown()
            if (tracing := spans.current()) is not None:
                tracing.flush(FLUSH_S)  # last: the engine must not wait for a collector


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

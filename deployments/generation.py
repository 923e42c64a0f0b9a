"""The generator as CfgRouter sees it: a queue, then a call that survives the loss of a replica once."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import Response
from ray.serve.handle import DeploymentHandle

from cfg_core.errors import EngineDeadError
from deployments import dispatches
from deployments.admission import AdmissionQueue, Share
from deployments.calls import Answer, EventStream, events, in_time
from deployments.config import AppArgs
from deployments.demand import Demand
from deployments.fleet import fleet
from deployments.http_app import json_text
from deployments.protocol import Endpoint, Guidance
from deployments.terms import Terms

DEFAULT_MAX_NUM_SEQS = 256
"""Of an engine that has not reported, and whose configuration does not say."""

SPARE = 1.25
"""Streams that are sent to a replica, for each that it can run: the engine has the next ones at hand."""

ADMIT_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Job:
    """One request for generated text, checked."""

    endpoint: Endpoint
    body: dict[str, Any]
    guidance: Guidance | None
    headers: dict[str, str]
    share: Share
    terms: Terms
    demand: Demand


class Generator:
    """Handle of the ModelReplica deployment, and the queue in front of it. Used from one event loop."""

    def __init__(self, handle: DeploymentHandle, args: AppArgs) -> None:
        self.handle = handle
        self._stream = handle.options(method_name="generate", stream=True)
        self._args = args
        self._deployment = handle.deployment_name
        limits = args.admission
        self.queue = AdmissionQueue(self.capacity, limits.max_queued_streams, limits.max_queued_tokens)
        self._admitting: asyncio.Task[None] | None = None
        self.num_retried = 0

    def capacity(self) -> int:
        """Streams that may be with the engines now. Before a replica has reported, as if there were one."""
        view = fleet(self._deployment)
        per_replica = self._args.admission.streams_per_replica
        if per_replica is None:
            reported = view.max_num_seqs / view.reporting if view.reporting else None
            seqs = reported or self._args.engine.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS
            per_replica = math.ceil(SPARE * seqs)
        return per_replica * max(1, view.replicas)

    def gauges(self) -> dict[str, float]:
        """For /metrics: the queue, and the sums over the replicas as this ingress sees them."""
        view = fleet(self._deployment)
        return {
            **{f"admission_{name}": value for name, value in self.queue.stats.items()},
            "admission_capacity_streams": self.capacity(),
            "retried_requests": self.num_retried,
            "replicas": view.replicas,
            "replica_report_age_seconds": view.report_age_s,
            "streams_running": view.running,
            "streams_waiting": view.waiting,
            "queued_prefill_tokens": view.queued_prefill_tokens,
            "kv_blocks_free": view.free_blocks,
            "kv_blocks": view.total_blocks,
        }

    async def answer(self, job: Job) -> Response:
        """Wait for a place, send the job to one replica, and answer when the first item is there.

        So an error before the first byte has its own HTTP status, in streams too. Raises CfgServeError.
        """
        deadline = None
        if job.terms.timeout_s is not None:
            deadline = asyncio.get_running_loop().time() + job.terms.timeout_s
        leave = await self._enter(job)
        try:
            answer, first = await self._open(job, deadline)
        except BaseException:
            leave()
            raise
        if first.startswith("data:"):
            return EventStream(events(answer, first), on_end=leave)
        leave()
        return json_text(first)

    async def _enter(self, job: Job) -> Callable[[], None]:
        """Wait for a place; returns what gives it back."""
        if self._admitting is None:
            self._admitting = asyncio.ensure_future(self._admit_as_capacity_grows())
        async with in_time(job.terms.timeout_s):
            await self.queue.enter(job.share, job.demand, job.terms.priority)
        return lambda: self.queue.leave(job.share, job.demand)

    async def _admit_as_capacity_grows(self) -> None:
        while True:
            await asyncio.sleep(ADMIT_EVERY_S)
            self.queue.admit()

    async def _open(self, job: Job, deadline: float | None) -> tuple[Answer, str]:
        """A replica's answer, and the first item of it. A lost engine is tried again elsewhere: the client has seen
        nothing of it. Any other error is raised."""
        for retries_left in reversed(range(self._args.num_retries + 1)):
            try:
                return await self._call(job, deadline)
            except EngineDeadError:
                if not retries_left:
                    raise
                self.num_retried += 1  # at once: the replica that failed gets nothing now (dispatches.py)
        raise AssertionError("unreachable: the last try returns or raises")

    async def _call(self, job: Job, deadline: float | None) -> tuple[Answer, str]:
        call = uuid.uuid4().hex
        with dispatches.expected(call) as dispatch:
            items = self._stream.remote(job.endpoint, job.body, job.guidance, job.headers, call)
            answer = Answer(items, self._args.silence_timeout_s, deadline, dispatch)
            try:
                return answer, await answer.next()
            except asyncio.CancelledError:
                answer.cancel()
                raise

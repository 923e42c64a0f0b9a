"""The generator as CfgRouter sees it: a queue, then a call that survives the loss of a replica
once, then the bill."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fastapi.responses import Response
from ray.serve.handle import DeploymentHandle

from cfg_core.errors import EngineDeadError, EngineError
from deployments.calls.answers import Answer, in_time
from deployments.calls.events import EventStream, events
from deployments.calls.queue import AdmissionQueue, Place, Share
from deployments.config.args import AppArgs
from deployments.http.json_answer import json_answer
from deployments.messages import Chunk, GenerateCall, Whole
from deployments.requests.demand import Demand
from deployments.requests.terms import Terms
from deployments.requests.usage import Usage
from deployments.routing import shared

DEFAULT_MAX_NUM_SEQS = 256
"""Of an engine that has not reported, and whose configuration does not say."""

SPARE = 1.25
"""Streams that are sent to a replica, for each that it can run: the engine has the next ones at
hand."""

STARTING_AT_ONCE = 8
"""Requests of one client that a replica begins with at once, while other clients are here."""

LOOK_EVERY_S = 0.5
"""How often the ingress looks whether the capacity has grown, and whether replicas have fallen
silent."""


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """One request for generated text, checked, on its way through the ingress.

    settle: called once, with the tokens that the request is charged for.
    """

    call: GenerateCall
    share: Share
    terms: Terms
    demand: Demand
    settle: Callable[[int], None]


class GeneratorClient:
    """Handle of the ModelReplica deployment, and the queue in front of it. Used from one event
    loop."""

    def __init__(self, handle: DeploymentHandle[Any], args: AppArgs) -> None:
        self.handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._args = args
        self._deployment = handle.deployment_name
        limits = args.admission
        self.queue = AdmissionQueue(
            self.capacity,
            limits.max_queued_streams,
            limits.max_queued_tokens,
            most_of_one=lambda: int(limits.max_share * self._slots() * self._replicas()),
            most_starting=lambda: STARTING_AT_ONCE * self._replicas(),
        )
        self._visits: set[_Visit] = set()
        self._looking: asyncio.Task[None] | None = None
        self.num_retried = 0

    def capacity(self) -> int:
        """Streams that may be with the engines now. Before a replica has reported, as if there were
        one."""
        per_replica = self._args.admission.streams_per_replica or math.ceil(SPARE * self._slots())
        return max(1, per_replica * self._replicas())

    def _replicas(self) -> int:
        return max(1, shared.fleet(self._deployment).replicas)

    def _slots(self) -> int:
        """Streams that one engine runs at once."""
        view = shared.fleet(self._deployment)
        reported = view.max_num_seqs // view.reporting if view.reporting else None
        return int(reported or self._args.engine.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)

    def context_tokens(self) -> int:
        """The model's maximum context length; 0 before a replica has reported it, unless it is
        configured."""
        configured = self._args.engine.get("max_model_len")
        return (
            configured
            if type(configured) is int and configured > 0
            else shared.fleet(self._deployment).max_model_len
        )

    def gauges(self) -> dict[str, float]:
        """For /metrics: the queue, and the sums over the replicas as this ingress sees them."""
        view = shared.fleet(self._deployment)
        return {
            **{f"admission_{name}": value for name, value in self.queue.stats.items()},
            "admission_capacity_streams": self.capacity(),
            "retried_requests": self.num_retried,
            "replicas": view.replicas,
            "replica_report_age_seconds": view.report_age_s,
            "streams_running": view.running,
            "streams_waiting": view.waiting,
            "engines_held_seconds": view.held_ms / 1000,
            "queued_prefill_tokens": view.queued_prefill_tokens,
            "kv_blocks_free": view.free_blocks,
            "kv_blocks": view.total_blocks,
        }

    async def answer(self, job: GenerateJob) -> Response:
        """Wait for a place, send the job to one replica, and answer when the first item is there.

        So an error before the first byte has its own HTTP status, in streams too. Raises
        CfgServeError.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_around())
        deadline = None
        if job.terms.timeout_s is not None:
            deadline = asyncio.get_running_loop().time() + job.terms.timeout_s
        visit = await self._enter(job)
        try:
            answer, first = await self._open(visit, deadline)
        except BaseException as error:
            visit.abort(failed=isinstance(error, EngineError))
            raise
        if isinstance(first, Chunk):
            return EventStream(events(answer, first), on_end=visit.end)
        visit.end()
        return json_answer(first)

    async def _enter(self, job: GenerateJob) -> _Visit:
        """Wait for a place. A request holds at most so many streams at once; its other choices wait
        in the replica."""
        at_once = self._args.admission.streams_at_once_per_request or max(2, self._slots() // 2)
        demand = replace(job.demand, streams=min(job.demand.streams, at_once))
        try:
            async with in_time(job.terms.timeout_s):
                place = await self.queue.enter(job.share, demand, job.terms.priority)
        except BaseException:
            job.settle(0)
            raise
        visit = _Visit(self, job, place)
        self._visits.add(visit)
        return visit

    def forget(self, visit: _Visit) -> None:
        """Called by a visit at its end."""
        self._visits.discard(visit)

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.queue.admit()
            for visit in list(self._visits):
                visit.give_up_if_silent(self._args.silence_timeout_s)

    async def _open(self, visit: _Visit, deadline: float | None) -> tuple[Answer, Chunk | str]:
        """A replica's answer, and the first event of it or all of its text. A lost engine is tried
        again elsewhere: the client has seen nothing of it. Any other error is raised."""
        for retries_left in reversed(range(self._args.num_retries + 1)):
            try:
                return await self._call(visit, deadline)
            except EngineDeadError:
                if not retries_left:
                    raise
                self.num_retried += (
                    1  # at once: the replica that failed gets nothing now (dispatches.py)
                )
        raise AssertionError("unreachable: the last try returns or raises")

    async def _call(self, visit: _Visit, deadline: float | None) -> tuple[Answer, Chunk | str]:
        call = replace(visit.job.call, call_id=uuid.uuid4().hex)
        with shared.expected(call.call_id) as dispatch:
            items: Any = self._generate.remote(call)
            visit.answer = answer = Answer(items, deadline, dispatch, visit.place.begun)
            try:
                first = await answer.next()
                return answer, await answer.rest(first) if isinstance(first, Whole) else first
            except StopAsyncIteration:
                raise EngineDeadError(
                    "The engine ended without an answer: send the request again."
                ) from None


class _Visit:
    """One request's stay with the engines: its place in the queue, its answer, its charge. Ended
    once."""

    def __init__(self, generator: GeneratorClient, job: GenerateJob, place: Place) -> None:
        self.job, self.place = job, place
        self.answer: Answer | None = None
        self._generator = generator
        self._ended = False

    def give_up_if_silent(self, for_s: float) -> None:
        if self.answer is not None:
            self.answer.give_up_if_silent(for_s)

    def abort(self, failed: bool) -> None:
        """End before the answer did. What the server failed at costs nothing."""
        if self.answer is not None:
            self.answer.cancel()
        self.end(free=failed)

    def end(self, free: bool = False) -> None:
        """Give the place back, and settle the charge with what the engine did. Again, it does
        nothing."""
        if not self._ended:
            self._ended = True
            self._generator.forget(self)
            self.place.leave()
            usage = Usage() if free or self.answer is None else self.answer.usage
            self.job.settle(usage.tokens)

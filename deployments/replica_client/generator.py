"""The generator as CfgRouter sees it: a queue, a call to a replica, and the charge for it.

A call whose replica is lost before the first byte is sent again to another one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

from fastapi.responses import Response
from ray.serve.handle import DeploymentHandle

from cfg_core.errors import EngineError, OverloadedError
from deployments.admission.queue import AdmissionQueue
from deployments.config.admission import SPARE
from deployments.config.args import AppArgs
from deployments.http.text_answers import json_answer
from deployments.messages import Chunk
from deployments.replica_client.admitted import AdmittedRequest, GenerateJob
from deployments.replica_client.answers import deadline_in, in_time
from deployments.replica_client.calls import GeneratorCalls
from deployments.replica_client.events import EventStream, events
from deployments.replica_client.moves import MovingStream
from deployments.replica_client.other_replicas import DRAINED, LOST_ONE, REASONS, OtherReplicas
from deployments.replica_client.serve_calls import value_of
from deployments.routing.counts import generator_metrics
from deployments.routing.fleets import generator_fleet

DEFAULT_MAX_NUM_SEQS = 256
"""max_num_seqs of an engine that has not reported and whose configuration does not say."""

STARTING_AT_ONCE = 8
"""Requests of one client that each replica may be starting while other clients are active."""

LOOK_EVERY_S = 0.5
"""Seconds between two checks for grown capacity and for replicas that have fallen silent."""

Reading: TypeAlias = dict[str, float | Mapping[str, float]]
"""Values for /metrics, by name; by the values of its label if a metric has one."""


class GeneratorClient:
    """Handle of one generator's ModelReplica deployment, and the queue in front of it.

    Used from one event loop.

    args: those of this generator, as if it were the only one.
    waited: called with the seconds that each request waited, unless it was refused at once.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        args: AppArgs,
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._handle = handle
        self.args = args
        self._fleet = generator_fleet(handle.deployment_name)
        self._calls = GeneratorCalls(handle, args.num_retries)
        limits = args.admission
        self.queue = AdmissionQueue(
            self.capacity,
            limits.max_queued_streams,
            limits.max_queued_tokens,
            most_of_one=lambda: int(limits.max_share * self._slots() * self.replicas()),
            most_starting=lambda: STARTING_AT_ONCE * self.replicas(),
        )
        self._admitted: set[AdmittedRequest] = set()
        self._looking: asyncio.Task[None] | None = None
        self._waited = waited
        self._moved = Counter(dict.fromkeys(REASONS, 0))
        self._has_asked = False

    async def ask(self, method: str, *args: Any) -> str:
        """The text that a method of one replica's VllmServer answers at once.

        Raises CfgServeError.
        """
        self._has_asked = True
        text: str = await value_of(self._handle.ask.remote(method, *args))
        return text

    async def state(self) -> dict[str, int]:
        """Requests, groups and KV blocks of one replica's engine. Raises CfgServeError."""
        self._has_asked = True
        state: dict[str, int] = await value_of(self._handle.engine_state.remote())
        return state

    @property
    def model_name(self) -> str:
        """The name that clients send as `model`."""
        return str(self.args.model_name)

    @property
    def asleep(self) -> bool:
        """Whether it is scaled to zero replicas, as far as this ingress knows."""
        return self.args.scales_to_zero and not self._fleet.view.replicas

    def capacity(self) -> int:
        """Streams that may be with the engines now."""
        per_replica = self.args.admission.streams_per_replica or math.ceil(SPARE * self._slots())
        return max(1, per_replica * self.replicas())

    def replicas(self) -> int:
        """Replicas of the generator, as this ingress sees them; at least one."""
        return max(1, self._fleet.view.replicas)

    def _slots(self) -> int:
        """Streams that one engine runs at once."""
        view = self._fleet.view
        reported = view.max_num_seqs // view.reporting if view.reporting else None
        return int(reported or self.args.engine.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)

    def context_tokens(self) -> int:
        """The model's maximum context length in tokens, as configured or as a replica reported it.

        0 if it is not known yet.
        """
        configured = self.args.engine.get("max_model_len")
        if type(configured) is int and configured > 0:
            return configured
        return self._fleet.view.max_model_len

    def reading(self) -> Reading:
        """The queue, and the replicas as this ingress sees them.

        Serve tells of replicas when the first request is sent. Until then, and while the generator
        is asleep, there are no numbers of them, because 0 would be taken for a failure.
        """
        counts = self._fleet.counts
        replicas: Reading = {}
        is_told = self._has_asked or self._calls.num_by_serve or self._fleet.is_known
        if is_told and not self.asleep:
            replicas = {
                "replicas": self._fleet.view.replicas,
                "replica_report_age_seconds": self._fleet.view.report_age_s,
            }
        return {
            **{f"admission_{name}": value for name, value in self.queue.stats.items()},
            "admission_capacity_streams": self.capacity(),
            "calls": {"direct": self._calls.num_direct, "serve": self._calls.num_by_serve},
            "retried_requests": self._calls.num_retried,
            "moved_streams": {
                **self._moved,
                LOST_ONE: self._moved[LOST_ONE] + self._calls.num_gone_on,
                DRAINED: self._moved[DRAINED] + self._calls.num_left,
            },
            **replicas,
            **generator_metrics(counts.now(), counts.totals()),
        }

    async def answer(self, job: GenerateJob) -> Response:
        """Wait for a place, send the job to one replica, and answer when the first item is there.

        An error before the first byte therefore has its own HTTP status, in streams too. Raises
        CfgServeError.
        """
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(self._look_around())
        deadline = deadline_in(job.terms.timeout_s)
        request = await self._enter(job, deadline)
        try:
            first = await self._calls.open(request, deadline)
        except BaseException as error:
            request.end(free=isinstance(error, EngineError))
            raise
        if isinstance(first, Chunk):
            stream = self._stream(request, first, deadline)
            return EventStream(events(stream, first), on_end=request.end)
        request.end()
        return json_answer(first)

    def _stream(
        self, request: AdmittedRequest, first: Chunk, deadline: float | None
    ) -> MovingStream:
        """The stream of a request, which goes on elsewhere if its replica is lost or leaves."""
        others = OtherReplicas(
            self._handle.deployment_name, self._calls, request, deadline, self._moved
        )
        body = request.call.body
        return MovingStream(request, first, others, checks_texts=not body.get("logprobs"))

    async def _enter(self, job: GenerateJob, deadline: float | None) -> AdmittedRequest:
        """Wait for a place with the engines.

        The place has a maximum number of streams. Further choices of the request wait in the
        replica.
        """
        at_once = self.args.admission.streams_at_once(self._slots())
        demand = replace(job.demand, streams=min(job.demand.streams, at_once))
        began = time.monotonic()
        about = {
            "streams": demand.streams,
            "tokens": demand.tokens,
            "waiting_before": self.queue.stats["queued_requests"],
        }
        try:
            with job.span.child("queue", about) if job.span is not None else nullcontext():
                async with in_time(deadline):
                    place = await self.queue.enter(job.share, demand, job.terms.priority)
        except BaseException as error:
            job.settle(0)
            if not isinstance(error, OverloadedError):
                self._waited(time.monotonic() - began)
            raise
        self._waited(time.monotonic() - began)
        request = AdmittedRequest(job, place, self._admitted.discard)
        self._admitted.add(request)
        return request

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.queue.admit()
            for request in list(self._admitted):
                if request.answer is not None:
                    request.answer.give_up_if_silent(self.args.silence_timeout_s)

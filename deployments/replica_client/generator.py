"""The generator as CfgRouter sees it: a queue, a call to a replica, and the charge for it.

A call whose replica is lost before the first byte is sent again to another one.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fastapi.responses import Response
from ray.serve.handle import DeploymentHandle

from cfg_core.errors import EngineDeadError, EngineError, OverloadedError
from deployments.admission.entries import Share
from deployments.admission.queue import AdmissionQueue, Place
from deployments.config.admission import SPARE
from deployments.config.args import AppArgs
from deployments.direct.connections import NotTakenError
from deployments.http.text_answers import json_answer
from deployments.messages import Chunk, GenerateCall, Whole
from deployments.observability.spans import CLIENT, Span
from deployments.replica_client.answers import Answer, Items, deadline_in, in_time
from deployments.replica_client.direct_calls import DirectCalls
from deployments.replica_client.events import EventStream, events
from deployments.replica_client.moves import MovingStream
from deployments.replica_client.serve_calls import ServeItems, value_of
from deployments.requests.demand import Demand
from deployments.requests.progress import Begun
from deployments.requests.terms import Terms
from deployments.requests.usage import Usage
from deployments.routing.call_placer import placer_of
from deployments.routing.counts import generator_metrics, name_of
from deployments.routing.dispatches import Dispatch, expected
from deployments.routing.fleets import generator_fleet

DEFAULT_MAX_NUM_SEQS = 256
"""max_num_seqs of an engine that has not reported and whose configuration does not say."""

STARTING_AT_ONCE = 8
"""Requests of one client that each replica may be starting while other clients are active."""

LOOK_EVERY_S = 0.5
"""Seconds between two checks for grown capacity and for replicas that have fallen silent."""

Reading: TypeAlias = dict[str, float | Mapping[str, float]]
"""Values for /metrics, by name; by the values of its label if a metric has one."""


@dataclass(frozen=True, kw_only=True)
class GenerateJob:
    """One request for generated text, checked, on its way through the ingress.

    settle: called once, with the tokens that the request is charged for.
    span: of the HTTP request, if it is traced.
    """

    call: GenerateCall
    share: Share
    terms: Terms
    demand: Demand
    settle: Callable[[int], None]
    span: Span | None = None


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
        self._generate = handle.options(method_name="generate", stream=True)
        self.args = args
        self._fleet = generator_fleet(handle.deployment_name)
        self._direct = DirectCalls(handle.deployment_name)
        limits = args.admission
        self.queue = AdmissionQueue(
            self.capacity,
            limits.max_queued_streams,
            limits.max_queued_tokens,
            most_of_one=lambda: int(limits.max_share * self._slots() * self.replicas()),
            most_starting=lambda: STARTING_AT_ONCE * self.replicas(),
        )
        self._admitted: set[_AdmittedRequest] = set()
        self._looking: asyncio.Task[None] | None = None
        self._waited = waited
        self._num_retried = self._num_by_serve = self._num_moved = 0
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
        is_told = self._has_asked or self._num_by_serve or self._fleet.is_known
        if is_told and not self.asleep:
            replicas = {
                "replicas": self._fleet.view.replicas,
                "replica_report_age_seconds": self._fleet.view.report_age_s,
            }
        return {
            **{f"admission_{name}": value for name, value in self.queue.stats.items()},
            "admission_capacity_streams": self.capacity(),
            "calls": {"direct": self._direct.num_taken, "serve": self._num_by_serve},
            "retried_requests": self._num_retried,
            "moved_streams": self._num_moved,
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
            first = await self._open(request, deadline)
        except BaseException as error:
            request.end(free=isinstance(error, EngineError))
            raise
        if isinstance(first, Chunk):
            stream = self._stream(request, first, deadline)
            return EventStream(events(stream, first), on_end=request.end)
        request.end()
        return json_answer(first)

    def _stream(
        self, request: _AdmittedRequest, first: Chunk, deadline: float | None
    ) -> MovingStream:
        """The stream of a request, which goes on elsewhere if its replica is lost.

        It does not wait for a replica that has yet to start.
        """

        async def move(begun: Begun, lost: EngineDeadError) -> Chunk | str:
            placer = placer_of(self._handle.deployment_name)
            if placer is None or not placer.can_place():
                raise lost
            self._num_moved += 1
            request.end_call(lost)
            request.begun = begun
            return await self._open(request, deadline)

        body = request.call.body
        return MovingStream(request, first, move, checks_texts=not body.get("logprobs"))

    async def _enter(self, job: GenerateJob, deadline: float | None) -> _AdmittedRequest:
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
        request = _AdmittedRequest(job, place, self._admitted.discard)
        self._admitted.add(request)
        return request

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.queue.admit()
            for request in list(self._admitted):
                if request.answer is not None:
                    request.answer.give_up_if_silent(self.args.silence_timeout_s)

    async def _open(self, request: _AdmittedRequest, deadline: float | None) -> Chunk | str:
        """Return the first event of a replica's answer, or all of its text.

        If the engine is lost, the call is sent again to another replica, because the client has
        seen nothing of this answer yet. Any other error is raised. The request has the answer.
        """
        for retries_left in reversed(range(self.args.num_retries + 1)):
            try:
                return await self._call(request, deadline)
            except EngineDeadError:
                if not retries_left:
                    raise
                # No delay: the failed replica gets nothing now (health/replica_health.py).
                self._num_retried += 1
        raise AssertionError("unreachable: the last try returns or raises")

    async def _call(self, request: _AdmittedRequest, deadline: float | None) -> Chunk | str:
        call = request.begin_call()
        with expected(call.call_id) as dispatch:
            try:
                found = await self._answer_of(request, call, deadline, dispatch)
            except BaseException as error:
                request.dispatched(dispatch)
                request.end_call(error)
                raise
            request.dispatched(dispatch)
            return found

    async def _answer_of(
        self,
        request: _AdmittedRequest,
        call: GenerateCall,
        deadline: float | None,
        dispatch: Dispatch,
    ) -> Chunk | str:
        async with in_time(deadline):
            items = await self._direct.begin(call)
        if items is not None:
            dispatch.is_direct = True
            with suppress(NotTakenError):
                return await self._first(request, items, deadline, dispatch)
            dispatch.is_direct = False
        self._num_by_serve += 1
        by_serve: Any = self._generate.remote(call)
        return await self._first(request, ServeItems(by_serve), deadline, dispatch)

    async def _first(
        self, request: _AdmittedRequest, items: Items, deadline: float | None, dispatch: Dispatch
    ) -> Chunk | str:
        request.answer = answer = Answer(items, deadline, dispatch, request.place.begun)
        try:
            first = await answer.next()
            return await answer.rest(first) if isinstance(first, Whole) else first
        except StopAsyncIteration:
            raise EngineDeadError(
                "The engine ended without an answer: send the request again."
            ) from None


class _AdmittedRequest:
    """One request with the engines: its place in the queue, its answer and its charge.

    on_end: called once with this object, however the request ends.
    """

    def __init__(
        self, job: GenerateJob, place: Place, on_end: Callable[[_AdmittedRequest], None]
    ) -> None:
        self.place = place
        self.answer: Answer | None = None
        self._job, self._on_end = job, on_end
        self._ended = False
        self.begun: Begun | None = None  # what lost replicas have done
        self._num_calls = 0
        self._span: Span | None = None  # of the present call, if the request is traced

    @property
    def call(self) -> GenerateCall:
        """The call as the ingress has read it."""
        return self._job.call

    def begin_call(self) -> GenerateCall:
        """The call for the next try, with an id of its own, and its span if it is traced."""
        call = replace(self._job.call, call_id=uuid.uuid4().hex, begun=self.begun)
        if self._job.span is None:
            return call
        self._num_calls += 1
        self._span = self._job.span.child("call", {"try": self._num_calls}, CLIENT)
        return replace(call, headers={**call.headers, **self._span.headers})

    def dispatched(self, dispatch: Dispatch) -> None:
        """Tell the present call's span where the call went."""
        if self._span is not None:
            way = "direct" if dispatch.is_direct else "serve"
            self._span.set({"reason": dispatch.reason or "unknown", "way": way})
            if dispatch.replica is not None:
                self._span.set({"replica": name_of(dispatch.replica)})

    def end_call(self, error: BaseException | None) -> None:
        span, self._span = self._span, None
        if span is not None:
            if error is not None:
                span.fail(error)
            span.end()

    def end(self, free: bool = False) -> None:
        """Give the place back, and settle the charge with what the engine did.

        The call is cancelled if its answer is not complete. A second call of this does nothing.

        free: charge nothing, because the server failed.
        """
        if self._ended:
            return
        self._ended = True
        if self.answer is not None:
            self.answer.cancel()
        self._on_end(self)
        self.place.leave()
        usage = Usage() if free or self.answer is None else self.answer.usage
        self._job.settle(usage.tokens)
        self._end_spans()

    def _end_spans(self) -> None:
        """End the call's span, and mark it and the request's if a stream ended by an error."""
        failure = self.answer.failure if self.answer is not None else None
        is_complete = self.answer is not None and self.answer.is_complete
        if failure is not None and self._job.span is not None:
            self._job.span.fail(failure)
        if failure is None and self._span is not None and not is_complete:
            self._span.set({"client_left": True})
        self.end_call(failure)

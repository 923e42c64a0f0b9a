"""Calls to the replicas of one generator; one whose replica is lost is sent again to another."""

from __future__ import annotations

from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from cfg_core.errors import EngineDeadError, EngineError, OverloadedError
from deployments.direct.connections import NotTakenError
from deployments.messages import OTHER_MODEL, Chunk, GenerateCall, Whole
from deployments.replica_client.admitted import AdmittedRequest
from deployments.replica_client.answers import Answer, Items, LeavingError, in_time
from deployments.replica_client.direct_calls import DirectCalls
from deployments.replica_client.serve_calls import ServeItems
from deployments.requests.progress import Told
from deployments.routing.call_placer import can_go_on, placer_of
from deployments.routing.dispatches import Dispatch, expected

MOST_ADVANCES = 5
"""How often an answer that got further, and was lost again, gets all of its tries anew. It is
hardly a request that ends every engine."""


class Tries:
    """How often one call may still be sent again, because a replica was lost."""

    def __init__(self, num_retries: int, told: Told) -> None:
        self._left = self._num_retries = num_retries
        self._advances, self._num_told = 0, told.num_kept_tokens

    def take(self, told: Told) -> bool:
        """Take a try, if there is one left.

        told: what is known of an answer that is not streamed.
        """
        if told.num_kept_tokens > self._num_told and self._advances < MOST_ADVANCES:
            self._advances, self._num_told = self._advances + 1, told.num_kept_tokens
            self._left = self._num_retries
        self._left -= 1
        return self._left >= 0


class GeneratorCalls:
    """Sends the calls of requests to the replicas of one generator. Used from one event loop.

    num_retries: how often a call is sent again if its replica is lost before the first byte, or
        before an answer that is not streamed got further (`Tries`).
    num_retried: calls that were sent again.
    num_gone_on: those of them that went on behind what the lost replica had told.
    num_left: calls that went on elsewhere because their replica is to stop.
    num_by_serve: calls that went through Serve's handle.
    """

    def __init__(self, handle: DeploymentHandle[Any], num_retries: int) -> None:
        self._deployment = handle.deployment_name
        self._generate = handle.options(method_name="generate", stream=True)
        self._direct = DirectCalls(handle.deployment_name)
        self._num_retries = num_retries
        self.num_retried = self.num_gone_on = self.num_left = self.num_by_serve = 0

    @property
    def num_direct(self) -> int:
        """Calls that a replica has taken directly."""
        return self._direct.num_taken

    async def open(
        self, request: AdmittedRequest, deadline: float | None, may_wait: bool = True
    ) -> Chunk | str:
        """Return the first event of a replica's answer, or all of its text.

        If the engine is lost, the call is sent again to another replica, because the client has
        seen nothing of this answer yet. An answer that is not streamed goes on behind the tokens
        that it has, also if its replica is to stop. Any other error is raised. The request has the
        answer.

        may_wait: whether Serve may keep the call while all replicas are full. Else OverloadedError
            is raised, as far as that can be seen.
        """
        tries = Tries(self._num_retries, request.told)
        while True:
            try:
                return await self._call(request, deadline, may_wait)
            except LeavingError:
                request.go_on()
                self.num_left += 1
            except EngineDeadError:
                if not tries.take(request.told):
                    raise
                # No delay: the failed replica gets nothing now (health/replica_health.py).
                self.num_retried += 1
                self.num_gone_on += request.try_again(partial(can_go_on, self._deployment))
            except EngineError as error:
                if error.message != OTHER_MODEL or not request.told:
                    raise
                request.start_over()  # nothing is told then, so this cannot happen again

    async def _call(
        self, request: AdmittedRequest, deadline: float | None, may_wait: bool
    ) -> Chunk | str:
        call = request.begin_call()
        with expected(call.call_id) as dispatch:
            try:
                found = await self._answer_of(request, call, deadline, dispatch, may_wait)
            except BaseException as error:
                request.dispatched(dispatch)
                request.end_call(None if isinstance(error, LeavingError) else error)
                raise
            request.dispatched(dispatch)
            return found

    async def _answer_of(
        self,
        request: AdmittedRequest,
        call: GenerateCall,
        deadline: float | None,
        dispatch: Dispatch,
        may_wait: bool,
    ) -> Chunk | str:
        async with in_time(deadline):
            items = await self._direct.begin(call)
        if items is not None:
            dispatch.is_direct = True
            try:
                return await self._first(request, items, deadline, dispatch)
            except NotTakenError:
                if not may_wait:
                    raise OverloadedError("The replica takes no more calls now.") from None
            dispatch.is_direct = False
        self.num_by_serve += 1
        by_serve: Any = self._generate.remote(call)
        return await self._first(request, ServeItems(by_serve), deadline, dispatch)

    async def _first(
        self, request: AdmittedRequest, items: Items, deadline: float | None, dispatch: Dispatch
    ) -> Chunk | str:
        may_leave = partial(self._may_leave, request)
        request.answer = answer = Answer(
            items, deadline, dispatch, request.place.begun, request.told, may_leave
        )
        try:
            first = await answer.next()
            return await answer.rest(first) if isinstance(first, Whole) else first
        except StopAsyncIteration:
            raise EngineDeadError(
                "The engine ended without an answer: send the request again."
            ) from None

    def _may_leave(self, request: AdmittedRequest) -> bool:
        """Whether another replica has room now to go on with an answer that is not streamed."""
        begun, placer = request.begun_answer(), placer_of(self._deployment)
        if begun is None or placer is None:
            return False
        return placer.has_room(request.call.group, begun.model)

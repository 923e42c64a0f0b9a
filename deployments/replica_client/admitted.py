"""One request that has a place with the engines: its calls, its answer and its charge."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from deployments.admission.entries import Share
from deployments.admission.queue import Place
from deployments.messages import GenerateCall
from deployments.observability.spans import CLIENT, Span
from deployments.replica_client.answers import Answer
from deployments.requests.demand import Demand
from deployments.requests.progress import Begun, Told
from deployments.requests.terms import Terms
from deployments.requests.usage import Usage
from deployments.routing.counts import name_of
from deployments.routing.dispatches import Dispatch


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


@dataclass(frozen=True)
class PresentCall:
    """A call that runs while another replica is asked to go on with its stream.

    begun: what replicas had done before it.
    """

    answer: Answer | None
    begun: Begun | None
    span: Span | None

    def end(self) -> None:
        """Cancel it, because another replica has the stream."""
        if self.answer is not None:
            self.answer.cancel()
        if self.span is not None:
            self.span.set({"drained": True})
            self.span.end()


class AdmittedRequest:
    """One request with the engines: its place in the queue, its answer and its charge.

    on_end: called once with this object, however the request ends.
    """

    def __init__(
        self, job: GenerateJob, place: Place, on_end: Callable[[AdmittedRequest], None]
    ) -> None:
        self.place = place
        self.answer: Answer | None = None
        self._job, self._on_end = job, on_end
        self._ended = False
        self.begun: Begun | None = None  # what replicas have done that were lost or left
        self.told = Told()  # of an answer that is not streamed
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

    def try_again(self, can_go_on: Callable[[str], bool]) -> bool:
        """Prepare the call for another replica, after one was lost before the first byte.

        Returns whether the answer goes on behind what that one has told of it. If nothing was told,
        or no replica can go on with it, it starts over.

        can_go_on: whether there is a replica with the model of this fingerprint.
        """
        begun = self.begun_answer()
        if begun is not None and can_go_on(begun.model):
            self.begun = begun
            return True
        if begun is not None:
            self.start_over()
        return False

    def begun_answer(self) -> Begun | None:
        """What was told of an answer that is not streamed; None if it has no token, or must stay.

        Nobody has seen anything of it, so without tokens there is nothing to go on with.
        """
        begun = self.told.begun()
        return begun if begun is not None and begun.outputs else None

    def go_on(self) -> None:
        """Prepare the call for another replica, behind all that was told of the answer."""
        self.begun = self.begun_answer()

    def start_over(self) -> None:
        """Forget what was told of an answer that is not streamed."""
        self.begun, self.told = None, Told()

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

    def leave_call(self, begun: Begun) -> PresentCall:
        """Make room for a call to another replica, which goes on with what is `begun`.

        The present one runs on until it is ended, or returned to.
        """
        present = PresentCall(self.answer, self.begun, self._span)
        self.begun, self._span = begun, None
        return present

    def return_to(self, present: PresentCall) -> None:
        """Take back a call that was left, and cancel the one that was to replace it."""
        if self.answer is not None and self.answer is not present.answer:
            self.answer.cancel()
        self.end_call(None)
        self.answer, self.begun, self._span = present.answer, present.begun, present.span

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

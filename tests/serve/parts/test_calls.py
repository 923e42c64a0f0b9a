"""How the ingress reads a replica's answer. These tests need no server."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Hashable, MutableMapping
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cfg_core.errors import (
    CfgServeError,
    DeadlineError,
    EngineDeadError,
    OverloadedError,
    RequestError,
)
from deployments.admission.entries import Share
from deployments.admission.queue import AdmissionQueue
from deployments.config.args import AppArgs
from deployments.config.tracing import TracingArgs
from deployments.direct.connections import ConnectionLostError
from deployments.health import replica_health
from deployments.health.replica_health import ReplicaHealth, health
from deployments.http.text_answers import DONE
from deployments.messages import Chunk, Failed, GenerateCall, Heartbeat, Whole
from deployments.observability import spans
from deployments.observability.spans import Span, Tracing
from deployments.replica_client.admitted import AdmittedRequest
from deployments.replica_client.answers import Answer, deadline_in
from deployments.replica_client.events import EventStream, events
from deployments.replica_client.generator import GeneratorClient
from deployments.requests.demand import Demand
from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import Prefix
from deployments.requests.usage import Usage
from deployments.routing import fleets
from deployments.routing.dispatches import Dispatch, dispatched, expected

Message: TypeAlias = Chunk | Whole | Heartbeat | Failed
Scripted: TypeAlias = float | str | Usage | CfgServeError | Message
"""A pause in seconds, or what a replica sends."""


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_health, "_health", ReplicaHealth())
    monkeypatch.setattr(fleets, "_fleets", {})


def message(item: Scripted) -> Message:
    """Return `item` as a replica would send it. Texts become chunks."""
    if isinstance(item, str):
        return Chunk(item)
    if isinstance(item, Usage):
        return Heartbeat(item)
    if isinstance(item, CfgServeError):
        return Failed(item)
    assert not isinstance(item, float)
    return item


class Items:
    """Stands in for the items of a replica. Numbers are pauses in seconds."""

    def __init__(self, *script: Scripted) -> None:
        self.script, self.cancelled = list(script), False

    async def next(self) -> Message:
        pauses = [*itertools.takewhile(lambda item: isinstance(item, float), self.script)]
        del self.script[: len(pauses)]
        for pause in pauses:
            assert isinstance(pause, float)
            await asyncio.sleep(pause)
        if not self.script:
            raise StopAsyncIteration
        return message(self.script.pop(0))

    def cancel(self) -> None:
        self.cancelled = True


def answer_of(
    items: Items, deadline: float | None = None, dispatch: Dispatch | None = None
) -> Answer:
    """Return an Answer that reads `items`."""
    return Answer(items, deadline, dispatch)


async def all_of(answer: Answer) -> list[str]:
    items = []
    try:
        while True:
            items.append((await answer.next()).text)
    except StopAsyncIteration:
        return items


class SilentMonitor:
    """Reports that each replica has been silent for `silent_s` seconds."""

    def __init__(self, silent_s: float = 60.0) -> None:
        self.silent = silent_s

    def silent_s(self, replica: Hashable) -> float:
        return self.silent


def sent_to(replica: Hashable) -> Dispatch:
    dispatch = Dispatch()
    dispatch.replica, dispatch.at = replica, time.monotonic()
    return dispatch


def test_usage_is_kept_and_not_told() -> None:
    answer = answer_of(
        Items(
            Usage(), 0.04, Usage(prompt_tokens=3), "a", Usage(prompt_tokens=3, output_tokens=4), "b"
        )
    )
    assert asyncio.run(all_of(answer)) == ["a", "b"]
    assert answer.usage.tokens == 7


@pytest.mark.parametrize(
    "item", [Chunk("a", Usage(output_tokens=5)), Whole("a", Usage(output_tokens=5))]
)
def test_items_report_the_usage_too(item: Message) -> None:
    answer = answer_of(Items(Usage(prompt_tokens=3), item, Chunk("b")))
    assert asyncio.run(all_of(answer)) == ["a", "b"]
    assert answer.usage.tokens == 5


def test_a_failure_reports_the_usage_too() -> None:
    answer = answer_of(Items("a", Failed(RequestError("no"), Usage(output_tokens=5))))
    with pytest.raises(RequestError):
        asyncio.run(all_of(answer))
    assert answer.usage.tokens == 5


def test_a_whole_answer_comes_in_parts() -> None:
    async def main() -> str:
        answer = answer_of(Items(Whole("a"), Whole("b"), Usage(), Whole("c")))
        first = await answer.next()
        assert isinstance(first, Whole)
        return await answer.rest(first)

    assert asyncio.run(main()) == "abc"


async def watch(answer: Answer, silence_s: float) -> None:
    """Watch `answer` as GeneratorClient does."""
    while True:
        await asyncio.sleep(0.02)
        answer.give_up_if_silent(silence_s)


async def watched(answer: Answer, silence_s: float = 0.1) -> list[str]:
    watching = asyncio.ensure_future(watch(answer, silence_s))
    try:
        return await all_of(answer)
    finally:
        watching.cancel()


@pytest.mark.parametrize("script", [(5.0, "b"), ("a", 5.0, "b")])
def test_a_replica_that_falls_silent_is_given_up_and_suspected(
    monkeypatch: pytest.MonkeyPatch, script: tuple[Scripted, ...]
) -> None:
    monkeypatch.setattr(health(), "_monitor", SilentMonitor())
    items = Items(*script)
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        asyncio.run(watched(answer_of(items, dispatch=sent_to("replica 1"))))
    assert 0.1 <= time.monotonic() - began < 2
    assert items.cancelled
    assert health().usable(["replica 1", "replica 2"]) == ["replica 2"]


def test_a_call_that_is_slow_to_end_may_be_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`give_up_if_silent` may be called again while the call is still ending.

    The ingress calls it for all open calls, at regular intervals.
    """
    monkeypatch.setattr(health(), "_monitor", SilentMonitor())

    class Slow(Items):
        async def next(self) -> Message:
            try:
                await asyncio.sleep(5)
                raise StopAsyncIteration
            finally:
                await asyncio.sleep(0.2)

    async def main() -> None:
        answer = answer_of(Slow(), dispatch=sent_to("r"))
        waiting = asyncio.ensure_future(answer.next())
        for _ in range(20):
            await asyncio.sleep(0.02)
            answer.give_up_if_silent(0.05)
        with pytest.raises(EngineDeadError):
            await waiting

    asyncio.run(main())


def test_a_replica_that_is_only_slow_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose beacon answers is slow, not dead."""
    monkeypatch.setattr(health(), "_monitor", SilentMonitor(silent_s=0.05))
    answer = answer_of(Items(0.5, "a", 0.5, "b"), dispatch=sent_to("r"))
    assert asyncio.run(watched(answer)) == ["a", "b"]


def test_a_call_that_still_hears_of_its_replica_is_not_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Signs in the call count, even if the monitor reports silence.

    A firewall may have closed the beacon's port in the meantime.
    """
    monkeypatch.setattr(health(), "_monitor", SilentMonitor())
    script: tuple[Scripted, ...] = (0.05, Usage()) * 10
    answer = answer_of(Items(*script, "a"), dispatch=sent_to("r"))
    assert asyncio.run(watched(answer, silence_s=0.3)) == ["a"]


def test_a_call_that_waits_for_a_replica_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health(), "_monitor", SilentMonitor())
    assert asyncio.run(watched(answer_of(Items(0.4, "a"), dispatch=Dispatch()))) == ["a"]


@pytest.mark.parametrize("script", [(5.0,), (Usage(), 5.0), (Usage(), *(0.02, Usage()) * 50)])
def test_time_runs_out_before_and_after_the_first_sign(script: tuple[Scripted, ...]) -> None:
    items = Items(*script)

    async def main() -> None:
        await answer_of(items, deadline=asyncio.get_running_loop().time() + 0.1).next()

    with pytest.raises(DeadlineError):
        asyncio.run(main())
    assert items.cancelled


def test_a_replica_that_says_its_engine_is_dead_is_lost() -> None:
    async def main() -> None:
        with expected("call 2") as dispatch:
            dispatched("call 2", "replica 2")
            await answer_of(Items(EngineDeadError("dead")), dispatch=dispatch).next()

    with pytest.raises(EngineDeadError):
        asyncio.run(main())
    assert health().usable(["replica 2"]) == []


def test_an_error_sent_as_a_value_is_raised() -> None:
    with pytest.raises(RequestError, match="no such"):
        asyncio.run(answer_of(Items(Usage(), RequestError("no such thing"))).next())


def test_a_stream_whose_time_runs_out_ends_with_an_error_event() -> None:
    async def main() -> list[str]:
        answer = answer_of(Items("data: 2\n\n", 5.0), asyncio.get_running_loop().time() + 0.1)
        return [chunk async for chunk in events(answer, Chunk("data: 1\n\n"))]

    *chunks, last = asyncio.run(main())
    assert chunks == ["data: 1\n\n", "data: 2\n\n"]
    assert last.startswith("event: error")
    assert "timeout_error" in last


async def told(*script: Scripted) -> list[str]:
    return [chunk async for chunk in events(answer_of(Items(*script)), Chunk("data: 1\n\n"))]


@pytest.mark.parametrize("after", [(), (EngineDeadError("dead"),), (5.0,)])
def test_nothing_follows_done(after: tuple[Scripted, ...]) -> None:
    """If a replica dies after its last chunk, the answer is complete."""
    assert asyncio.run(told("data: 2\n\n", DONE, *after)) == ["data: 1\n\n", "data: 2\n\n", DONE]


def test_a_stream_that_ends_before_done_is_no_answer() -> None:
    *chunks, last = asyncio.run(told("data: 2\n\n"))
    assert chunks == ["data: 1\n\n", "data: 2\n\n"]
    assert last.startswith("event: error")


@pytest.mark.parametrize("served", [True, False])
def test_the_place_is_given_back_once(served: bool) -> None:
    ended: list[bool] = []

    async def main() -> None:
        async def chunks() -> AsyncIterator[str]:
            yield "data: 1\n\n"

        async def receive() -> MutableMapping[str, Any]:
            await asyncio.sleep(10)
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            pass

        response = EventStream(chunks(), on_end=lambda: ended.append(True))
        if served:
            await response({"type": "http"}, receive, send)
            assert ended == [True]

    asyncio.run(main())
    gc.collect()
    assert ended == [True]


def test_a_client_that_leaves_before_the_first_event_cancels_the_call() -> None:
    """The response may be dropped, or fail, before anybody reads its events."""
    items = Items("data: 1\n\n", "data: 2\n\n")
    settled: list[int] = []

    async def main() -> None:
        place: Any = SimpleNamespace(begun=lambda: None, leave=lambda: None)
        job: Any = SimpleNamespace(settle=settled.append, span=None)
        request = AdmittedRequest(job, place, on_end=lambda _: None)
        request.answer = answer_of(items)
        first = await request.answer.next()
        assert isinstance(first, Chunk)
        EventStream(events(request.answer, first), on_end=request.end)

    asyncio.run(main())
    gc.collect()
    assert items.cancelled
    assert settled == [0]


@pytest.mark.parametrize("script", [("a", DONE), (RequestError("no", "prompt"),)])
def test_an_answer_that_is_complete_is_not_cancelled(script: tuple[Scripted, ...]) -> None:
    """Else its connection would be closed, and could not be used again."""
    items = Items(*script)

    async def main() -> None:
        answer = answer_of(items)
        try:
            first = await answer.next()
            assert isinstance(first, Chunk)
            async for _ in events(answer, first):
                pass
        except RequestError:
            pass
        answer.cancel()

    asyncio.run(main())
    assert not items.cancelled


def test_a_replica_whose_connection_was_lost_is_suspected_and_not_given_up() -> None:
    """The connection may be at fault. If the replica died, Serve's next call finds that out."""

    class Lost(Items):
        async def next(self) -> Message:
            raise ConnectionLostError("lost")

    answer = answer_of(Lost(), dispatch=sent_to("r"))
    with pytest.raises(EngineDeadError):
        asyncio.run(answer.next())
    assert health().usable(["r"]) == ["r"]
    assert health().usable(["r", "other"]) == ["other"]


def admitted_request(span: Span) -> AdmittedRequest:
    call = GenerateCall(
        endpoint="completion",
        body={},
        guidance=None,
        group=GroupRequest(prefixes=(Prefix(num_tokens=1, chain=()),)),
        headers={},
    )
    job: Any = SimpleNamespace(span=span, settle=lambda _: None, call=call)
    place: Any = SimpleNamespace(leave=lambda: None)
    return AdmittedRequest(job, place, on_end=lambda _: None)


def test_each_try_of_a_call_has_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "_exporter", lambda _: exporter)
    tracing = Tracing(TracingArgs(otlp_traces_endpoint="http://nowhere:4317"), {})
    request = tracing.begin("request")
    admitted = admitted_request(request)
    tries: tuple[tuple[str, Exception | None], ...] = (("r1", EngineDeadError("")), ("r2", None))
    for replica, error in tries:
        admitted.begin_call()
        dispatch = Dispatch()
        dispatch.replica, dispatch.reason, dispatch.is_direct = replica, "load", error is None
        admitted.dispatched(dispatch)
        admitted.end_call(error)
    request.end()
    tracing.flush(5)
    first, second, _ = (dict(span.attributes or {}) for span in exporter.get_finished_spans())
    assert first == {
        "cfg_serve.try": 1,
        "cfg_serve.replica": "r1",
        "cfg_serve.reason": "load",
        "cfg_serve.way": "serve",
        "error.type": "EngineDeadError",
    }
    assert second == {
        "cfg_serve.try": 2,
        "cfg_serve.replica": "r2",
        "cfg_serve.reason": "load",
        "cfg_serve.way": "direct",
    }


def test_a_dispatch_without_a_replica_names_none(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "_exporter", lambda _: exporter)
    tracing = Tracing(TracingArgs(otlp_traces_endpoint="http://nowhere:4317"), {})
    admitted = admitted_request(tracing.begin("request"))
    admitted.begin_call()
    admitted.dispatched(Dispatch())
    admitted.end_call(None)
    tracing.flush(5)
    (told,) = exporter.get_finished_spans()
    assert "cfg_serve.replica" not in (told.attributes or {})


def test_the_failure_of_a_lost_stream_is_what_its_client_was_told() -> None:
    async def run() -> Answer:
        answer = answer_of(Items("a"))
        first = await answer.next()
        assert isinstance(first, Chunk)
        told = [text async for text in events(answer, first)]
        assert "engine" in told[-1].lower()
        return answer

    assert type(asyncio.run(run()).failure) is EngineDeadError


@pytest.mark.parametrize("is_complete", [True, False])
def test_a_client_who_leaves_a_stream_is_told_by_the_span_of_its_call(
    monkeypatch: pytest.MonkeyPatch, is_complete: bool
) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "_exporter", lambda _: exporter)
    tracing = Tracing(TracingArgs(otlp_traces_endpoint="http://nowhere:4317"), {})
    request = tracing.begin("request")
    admitted = admitted_request(request)
    admitted.begin_call()
    admitted.answer = answer_of(Items("a"))
    admitted.answer.is_complete = is_complete
    admitted.end()
    tracing.flush(5)
    (call,) = exporter.get_finished_spans()
    assert ("cfg_serve.client_left" in (call.attributes or {})) is not is_complete
    assert call.status.is_unset


# --- the generator's numbers ----------------------------------------------------------------------


def client_of(waited: Any = lambda _: None) -> GeneratorClient:
    """Return the client of a generator that has no replicas and answers nothing."""
    handle: Any = SimpleNamespace(options=lambda **_: None, deployment_name="generator")
    return GeneratorClient(handle, AppArgs.model_validate({"model": "m"}), waited)


def test_replicas_are_not_told_of_before_anything_is_known() -> None:
    """0 would look as if none could start."""
    told = client_of().reading()
    assert not {"replicas", "replica_report_age_seconds"} & told.keys()
    fleets.generator_fleet("generator").update([])
    assert client_of().reading()["replicas"] == 0


def test_no_replicas_are_told_of_once_one_was_asked() -> None:
    client = client_of()
    with pytest.raises(AttributeError):
        asyncio.run(client.ask("models"))
    assert client.reading()["replicas"] == 0


@pytest.mark.parametrize("how", ["is served", "leaves", "runs out of time", "is refused"])
def test_every_wait_counts_but_that_of_a_refusal(how: str) -> None:
    waits: list[float] = []
    share, demand = Share(tenant="a"), Demand(streams=1, tokens=1)

    async def run() -> None:
        client = client_of(waits.append)
        client.queue = AdmissionQueue(lambda: 1, 0 if how == "is refused" else 8, 10**6)
        place = await client.queue.enter(share, demand, 0)
        deadline = deadline_in(0.05 if how == "runs out of time" else None)
        terms = SimpleNamespace(priority=0)
        job: Any = SimpleNamespace(
            span=None, share=share, demand=demand, terms=terms, settle=lambda _: None
        )
        task = asyncio.ensure_future(client._enter(job, deadline))
        await asyncio.sleep(0.03)
        if how == "leaves":
            task.cancel()
        if how == "is served":
            place.leave()
        await task

    if how == "is served":
        asyncio.run(run())
    else:
        with pytest.raises((asyncio.CancelledError, DeadlineError, OverloadedError)):
            asyncio.run(run())
    assert [wait >= 0.02 for wait in waits] == ([] if how == "is refused" else [True])

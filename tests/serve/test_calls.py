"""A replica's answer as the ingress watches it. No server."""

import asyncio
import gc
import itertools
import time

import pytest

from cfg_core.errors import CfgServeError, DeadlineError, EngineDeadError, RequestError
from deployments.calls.answers import Answer
from deployments.calls.events import EventStream, events
from deployments.http.events import DONE
from deployments.messages import Chunk, Failed, Heartbeat, Whole
from deployments.requests.usage import Usage
from deployments.routing import shared
from deployments.routing.shared import Dispatch


@pytest.fixture(autouse=True)
def _nothing_is_known():
    shared.reset()
    yield
    shared.reset()


def message(item):
    """What a replica would send: texts are chunks."""
    if isinstance(item, str):
        return Chunk(item)
    if isinstance(item, Usage):
        return Heartbeat(item)
    return Failed(item) if isinstance(item, CfgServeError) else item


class Items:
    """Stands in for Serve's response generator: numbers are pauses in seconds."""

    def __init__(self, *script):
        self.script, self.cancelled = list(script), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        pauses = [*itertools.takewhile(lambda item: isinstance(item, float), self.script)]
        del self.script[: len(pauses)]
        for pause in pauses:
            await asyncio.sleep(pause)
        if not self.script:
            raise StopAsyncIteration
        return message(self.script.pop(0))

    def cancel(self):
        self.cancelled = True


async def all_of(answer):
    items = []
    try:
        while True:
            items.append((await answer.next()).text)
    except StopAsyncIteration:
        return items


class SilentLookout:
    """Says of each replica that it has been silent for so long."""

    def __init__(self, silent_s=60.0):
        self.silent = silent_s

    def silent_s(self, replica):
        return self.silent


def sent_to(replica):
    dispatch = Dispatch()
    dispatch.replica, dispatch.at = replica, time.monotonic()
    return dispatch


def test_usage_is_kept_and_not_told():
    answer = Answer(
        Items(
            Usage(), 0.04, Usage(prompt_tokens=3), "a", Usage(prompt_tokens=3, output_tokens=4), "b"
        )
    )
    assert asyncio.run(all_of(answer)) == ["a", "b"]
    assert answer.usage.tokens == 7


def test_a_whole_answer_comes_in_parts():
    async def main():
        answer = Answer(Items(Whole("a"), Whole("b"), Usage(), Whole("c")))
        return await answer.rest(await answer.next())

    assert asyncio.run(main()) == "abc"


async def watch(answer, silence_s):
    """As GeneratorClient does, while somebody waits for `answer`."""
    while True:
        await asyncio.sleep(0.02)
        answer.give_up_if_silent(silence_s)


async def watched(answer, silence_s=0.1):
    watching = asyncio.ensure_future(watch(answer, silence_s))
    try:
        return await all_of(answer)
    finally:
        watching.cancel()


@pytest.mark.parametrize("script", [(5.0, "b"), ("a", 5.0, "b")])
def test_a_replica_that_falls_silent_is_given_up_and_suspected(monkeypatch, script):
    monkeypatch.setattr(shared, "lookout", SilentLookout)
    items = Items(*script)
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        asyncio.run(watched(Answer(items, dispatch=sent_to("replica 1"))))
    assert 0.1 <= time.monotonic() - began < 2
    assert items.cancelled
    assert shared.usable(["replica 1", "replica 2"]) == ["replica 2"]


def test_a_call_that_is_slow_to_end_may_be_looked_at_again(monkeypatch):
    """The look around goes on for all other calls, whatever one of them is at."""
    monkeypatch.setattr(shared, "lookout", SilentLookout)

    class Slow(Items):
        async def __anext__(self):
            try:
                await asyncio.sleep(5)
            finally:
                await asyncio.sleep(0.2)

    async def main():
        answer = Answer(Slow(), dispatch=sent_to("r"))
        waiting = asyncio.ensure_future(answer.next())
        for _ in range(20):
            await asyncio.sleep(0.02)
            answer.give_up_if_silent(0.05)
        with pytest.raises(EngineDeadError):
            await waiting

    asyncio.run(main())


def test_a_replica_that_is_only_slow_is_not_given_up(monkeypatch):
    """Its beacon answers: slow is not dead."""
    monkeypatch.setattr(shared, "lookout", lambda: SilentLookout(silent_s=0.05))
    assert asyncio.run(watched(Answer(Items(0.5, "a", 0.5, "b"), dispatch=sent_to("r")))) == [
        "a",
        "b",
    ]


def test_a_call_that_still_hears_of_its_replica_is_not_given_up(monkeypatch):
    """Whatever the lookout believes: a firewall may have closed the beacon's port meanwhile."""
    monkeypatch.setattr(shared, "lookout", SilentLookout)
    script = (0.05, Usage()) * 10
    assert asyncio.run(
        watched(Answer(Items(*script, "a"), dispatch=sent_to("r")), silence_s=0.3)
    ) == ["a"]


def test_a_call_that_waits_for_a_replica_is_not(monkeypatch):
    monkeypatch.setattr(shared, "lookout", SilentLookout)
    assert asyncio.run(watched(Answer(Items(0.4, "a"), dispatch=Dispatch()))) == ["a"]


@pytest.mark.parametrize("script", [(5.0,), (Usage(), 5.0), (Usage(), *(0.02, Usage()) * 50)])
def test_time_runs_out_before_and_after_the_first_sign(script):
    items = Items(*script)

    async def main():
        await Answer(items, deadline=asyncio.get_running_loop().time() + 0.1).next()

    with pytest.raises(DeadlineError):
        asyncio.run(main())
    assert items.cancelled


def test_a_replica_that_says_its_engine_is_dead_is_lost():
    async def main():
        with shared.expected("call 2") as dispatch:
            shared.dispatched("call 2", "replica 2")
            await Answer(Items(EngineDeadError("dead")), dispatch=dispatch).next()

    with pytest.raises(EngineDeadError):
        asyncio.run(main())
    assert shared.usable(["replica 2"]) == []


def test_an_error_sent_as_a_value_is_raised():
    with pytest.raises(RequestError, match="no such"):
        asyncio.run(Answer(Items(Usage(), RequestError("no such thing"))).next())


def test_a_stream_whose_time_runs_out_ends_with_an_error_event():
    async def main():
        answer = Answer(Items("data: 2\n\n", 5.0), asyncio.get_running_loop().time() + 0.1)
        return [chunk async for chunk in events(answer, Chunk("data: 1\n\n"))]

    *chunks, last = asyncio.run(main())
    assert chunks == ["data: 1\n\n", "data: 2\n\n"]
    assert last.startswith("event: error")
    assert "timeout_error" in last


async def told(*script):
    return [chunk async for chunk in events(Answer(Items(*script)), Chunk("data: 1\n\n"))]


@pytest.mark.parametrize("after", [(), (EngineDeadError("dead"),), (5.0,)])
def test_nothing_follows_done(after):
    """A replica that dies between its last chunk and the end of its call has answered."""
    assert asyncio.run(told("data: 2\n\n", DONE, *after)) == ["data: 1\n\n", "data: 2\n\n", DONE]


def test_a_stream_that_ends_before_done_is_no_answer():
    *chunks, last = asyncio.run(told("data: 2\n\n"))
    assert chunks == ["data: 1\n\n", "data: 2\n\n"]
    assert last.startswith("event: error")


@pytest.mark.parametrize("served", [True, False])
def test_the_place_is_given_back_once(served):
    ended = []

    async def main():
        async def chunks():
            yield "data: 1\n\n"

        async def receive():
            await asyncio.sleep(10)

        async def send(message):
            pass

        response = EventStream(chunks(), on_end=lambda: ended.append(True))
        if served:
            await response({"type": "http"}, receive, send)
            assert ended == [True]

    asyncio.run(main())
    gc.collect()
    assert ended == [True]

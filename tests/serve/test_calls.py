"""A replica's answer as the ingress watches it. No server."""

import asyncio
import gc
import itertools

import pytest

from cfg_core.errors import EngineDeadError, RequestError
from deployments import dispatches
from deployments.calls import Answer, EventStream, events
from deployments.heartbeat import HEARTBEAT
from deployments.http_errors import DeadlineError
from deployments.sse import DONE


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
        return self.script.pop(0)

    def cancel(self):
        self.cancelled = True


async def all_of(answer):
    items = []
    try:
        while True:
            items.append(await answer.next())
    except StopAsyncIteration:
        return items


def test_heartbeats_are_heard_and_not_told():
    items = Items(HEARTBEAT, 0.04, HEARTBEAT, 0.04, "a", HEARTBEAT, "b")
    assert asyncio.run(all_of(Answer(items, silence_s=0.07))) == ["a", "b"]
    assert not items.cancelled


def test_a_replica_that_falls_silent_is_given_up():
    items = Items(HEARTBEAT, "a", 5.0, "b")
    answer = Answer(items, silence_s=0.05)

    async def main():
        assert await answer.next() == "a"
        await answer.next()

    with pytest.raises(EngineDeadError):
        asyncio.run(main())
    assert items.cancelled


def test_a_call_that_waits_for_a_replica_is_not():
    assert asyncio.run(all_of(Answer(Items(0.2, "a"), silence_s=0.05))) == ["a"]


def test_a_replica_that_takes_a_call_and_says_nothing_is_given_up_and_suspected(monkeypatch):
    monkeypatch.setattr("deployments.calls._LOOK_EVERY_S", 0.02)
    items = Items(5.0, "a")

    async def main():
        with dispatches.expected("call 1") as dispatch:
            answer = Answer(items, silence_s=0.1, dispatch=dispatch)
            asyncio.get_running_loop().call_later(0.1, dispatches.dispatched, "call 1", "replica 1")
            start = asyncio.get_running_loop().time()
            with pytest.raises(EngineDeadError):
                await answer.next()
            assert 0.2 <= asyncio.get_running_loop().time() - start < 1
            assert (await all_of(Answer(Items("b"), silence_s=0.1))) == ["b"]

    asyncio.run(main())
    assert items.cancelled
    assert dispatches.usable(["replica 1", "replica 2"]) == ["replica 2"]
    dispatches._suspects.clear()


@pytest.mark.parametrize("script", [(5.0,), (HEARTBEAT, 5.0), (HEARTBEAT, *(0.02, HEARTBEAT) * 50)])
def test_time_runs_out_before_and_after_the_first_sign(script):
    items = Items(*script)

    async def main():
        await Answer(items, silence_s=0.2, deadline=asyncio.get_running_loop().time() + 0.1).next()

    with pytest.raises(DeadlineError):
        asyncio.run(main())
    assert items.cancelled


def test_a_replica_that_says_its_engine_is_dead_is_lost():
    async def main():
        with dispatches.expected("call 2") as dispatch:
            dispatches.dispatched("call 2", "replica 2")
            await Answer(Items(EngineDeadError("dead")), 1.0, dispatch=dispatch).next()

    with pytest.raises(EngineDeadError):
        asyncio.run(main())
    assert dispatches.usable(["replica 2"]) == []
    dispatches._lost.clear()


def test_an_error_sent_as_a_value_is_raised():
    with pytest.raises(RequestError, match="no such"):
        asyncio.run(Answer(Items(HEARTBEAT, RequestError("no such thing")), 1.0).next())


def test_a_stream_whose_time_runs_out_ends_with_an_error_event():
    async def main():
        answer = Answer(Items("data: 2\n\n", 5.0), 1.0, asyncio.get_running_loop().time() + 0.1)
        return [chunk async for chunk in events(answer, "data: 1\n\n")]

    *chunks, last = asyncio.run(main())
    assert chunks == ["data: 1\n\n", "data: 2\n\n"]
    assert last.startswith("event: error")
    assert "timeout_error" in last


async def told(*script):
    return [chunk async for chunk in events(Answer(Items(*script), 1.0), "data: 1\n\n")]


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

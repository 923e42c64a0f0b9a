"""Heartbeats between the items of an answer."""

import asyncio
import time

import pytest

from deployments.generator.heartbeats import with_heartbeats
from deployments.http.text_answers import DONE
from deployments.messages import Chunk, Heartbeat, Whole
from deployments.requests.usage import Meter, Usage

IDLE = Heartbeat(Usage())


async def slowly(items, pause_s=0.0, log=None):
    try:
        for item in items:
            await asyncio.sleep(pause_s)
            if isinstance(item, Exception):
                raise item
            yield Chunk(item)
    finally:
        if log is not None:
            log.append("closed")


async def all_of(texts, every_s, meter=None):
    items = with_heartbeats(texts, lambda: (meter or Meter()).usage, every_s)
    return [item async for item in items]


async def test_texts_pass_in_order_and_the_first_reports_the_usage():
    items = await all_of(slowly(["a", "b", DONE]), 1.0)
    assert items[:2] == [Chunk("a", Usage()), Chunk("b")]


async def test_a_stream_without_a_last_event_is_reported_at_its_end():
    assert await all_of(slowly("ab"), 1.0) == [Chunk("a", Usage()), Chunk("b"), IDLE]
    assert await all_of(slowly("a"), 1.0) == [Chunk("a", Usage())]


@pytest.mark.parametrize("last", [DONE, "data: {}\n\n" + DONE, "event: message_stop\ndata: {}\n\n"])
async def test_the_item_that_ends_a_stream_reports_the_usage(last):
    assert await all_of(slowly(["a", last]), 1.0) == [Chunk("a", Usage()), Chunk(last, Usage())]
    assert await all_of(slowly([last]), 1.0) == [Chunk(last, Usage())]


async def test_each_piece_of_a_whole_answer_reports_the_usage():
    async def pieces():
        yield Whole("a")
        yield Whole("b")

    assert await all_of(pieces(), 1.0) == [Whole("a", Usage()), Whole("b", Usage())]


async def test_usage_is_reported_while_nothing_is_sent():
    items = await all_of(slowly("a", 0.13), 0.05)
    assert 2 <= items.index(Chunk("a", Usage())) <= 3


async def test_the_first_heartbeat_comes_soon():
    assert await all_of(slowly("a", 0.2), 5.0) == [IDLE, Chunk("a", Usage())]


async def test_usage_is_reported_between_texts_at_intervals():
    items = await all_of(slowly("abcdef", 0.03), 0.05)
    assert 3 <= sum(item.usage is not None for item in items) <= 6
    assert [item.text for item in items if item != IDLE] == list("abcdef")


async def test_a_report_has_the_counts_of_its_moment():
    meter = Meter()

    async def texts():
        meter.prompt_tokens, meter.output_tokens = 7, 1
        yield Chunk("a")
        meter.output_tokens = 9
        yield Chunk(DONE)

    told = [item.usage for item in await all_of(texts(), 5.0, meter) if item.usage is not None]
    assert told == [
        Usage(prompt_tokens=7, output_tokens=1),
        Usage(prompt_tokens=7, output_tokens=9),
    ]
    assert told[1].tokens == 16


async def test_an_empty_answer_stays_empty():
    assert await all_of(slowly(""), 1.0) == []


@pytest.mark.parametrize("script", [[ValueError("broken")], ["a", ValueError("broken")]])
async def test_errors_pass(script):
    with pytest.raises(ValueError, match="broken"):
        await all_of(slowly(script), 1.0)


@pytest.mark.parametrize("taken", [1, 2, 3])
async def test_closing_closes_the_source(taken):
    log = []
    items = with_heartbeats(slowly("abc", 0.01, log), lambda: Usage(), 0.001)
    for _ in range(taken):
        await anext(items)
    await items.aclose()
    assert log == ["closed"]


@pytest.mark.parametrize("first", ["", "a"])
async def test_cancelling_the_waiting_task_stops_the_source(first):
    log = []

    async def texts():
        try:
            for text in first:
                yield Chunk(text)
            await asyncio.sleep(10)
            yield Chunk("never")
        finally:
            log.append("closed")

    async def wait():
        async for _ in with_heartbeats(texts(), lambda: Usage(), 10):
            pass

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    start = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - start < 1
    assert log == ["closed"]

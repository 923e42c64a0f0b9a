"""generator/answers/chunks.py: into how many chunks the tokens of a stream are grouped."""

import asyncio
import time
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from deployments.generator.answers.chunks import CHUNKS_PER_S, LONGEST_S, ChunkSpacing


def output(finished=False, choices=1):
    return SimpleNamespace(finished=finished, outputs=[None] * choices)


async def given(*outputs):
    for one in outputs:
        yield one


async def times(spaced):
    """When each output came, in seconds after the call."""
    started = time.monotonic()
    return [time.monotonic() - started async for _ in spaced]


async def test_one_stream_sends_each_token_at_once():
    outputs = [output() for _ in range(100)]
    came = await times(ChunkSpacing().spaced(given(*outputs, output(finished=True))))
    assert len(came) == 101
    assert came[-1] < 10 / CHUNKS_PER_S


@pytest.mark.parametrize("streams", [16, 1000])
async def test_more_streams_send_less_often(streams):
    chunks = ChunkSpacing()
    others = [chunks.spaced(given(output(), output())) for _ in range(streams)]
    waiting = []
    for other in others:
        await anext(other)
        waiting.append(asyncio.ensure_future(anext(other)))
    await asyncio.sleep(0)
    assert chunks.streams == streams
    interval = chunks.interval_s
    assert interval == min(LONGEST_S, (streams - 1) / CHUNKS_PER_S)
    came = await times(chunks.spaced(given(output(), output(finished=True))))
    assert came[0] < interval / 2
    assert came[1] >= 0.9 * interval
    await asyncio.gather(*waiting)
    for other in others:
        await other.aclose()
    assert chunks.streams == 0


async def test_choices_count_and_whole_answers_do_not():
    chunks = ChunkSpacing()
    async with aclosing(
        chunks.spaced(given(output(choices=2), output(choices=40), output(finished=True)))
    ) as spaced:
        seen = [chunks.streams async for _ in spaced]
    assert seen == [0, 2, 40]
    assert chunks.streams == 0
    await times(chunks.spaced(given(output(finished=True, choices=9))))
    assert chunks.streams == 0


async def test_a_cancelled_stream_is_no_longer_counted():
    chunks = ChunkSpacing()
    spaced = chunks.spaced(given(output(choices=300), output()))
    await anext(spaced)
    waiting = asyncio.ensure_future(anext(spaced))
    await asyncio.sleep(0)
    assert chunks.streams == 300
    waiting.cancel()
    await asyncio.wait([waiting])
    assert chunks.streams == 0


async def test_an_end_does_not_wait():
    """A choice that finishes ends the pause, also if it does so before the pause begins."""
    for early in (True, False):
        chunks, wake = ChunkSpacing(), asyncio.Event()
        chunks.streams = 10_000
        spaced = chunks.spaced(given(output(), output(finished=True)), wake)
        await anext(spaced)
        if early:
            wake.set()
        started = time.monotonic()
        last = asyncio.ensure_future(anext(spaced))
        await asyncio.sleep(0.01)
        wake.set()
        assert (await last).finished
        assert time.monotonic() - started < LONGEST_S / 2
        await spaced.aclose()


async def test_what_the_last_output_holds_wakes_nobody():
    chunks, wake = ChunkSpacing(), asyncio.Event()
    chunks.streams = 10_000
    wake.set()
    came = await times(chunks.spaced(given(output(), output(finished=True)), wake))
    assert came[1] >= 0.9 * LONGEST_S

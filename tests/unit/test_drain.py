"""Which streams of a replica that is to stop are asked to go on elsewhere, and when."""

import asyncio

import pytest

from deployments.generator.moving import drain
from deployments.generator.moving.drain import EACH_S, Drain, announced, follow
from deployments.http.text_answers import DONE
from deployments.messages import Chunk, Heartbeat, Whole, joined
from deployments.requests.progress import Progress
from deployments.requests.usage import OutputCounts, Usage

TOLD = Progress((), OutputCounts(0, 0, 0, 0, (0, 0, 0, 0.0)))
CHUNK = Chunk("data: 1\n\n", progress=TOLD)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_streams_have_time_to_end_and_then_the_oldest_go_first(clock):
    drained = Drain(2.0, clock)
    calls = [drained.enter() for _ in range(3)]

    def going():
        return [drained.marked(call, CHUNK).leaves for call in calls]

    assert going() == [False, False, False], "nobody stops it"
    drained.begin()
    clock.now += 1.99
    assert going() == [False, False, False]
    drained.begin()  # again: the time runs on
    clock.now += 0.01
    assert going() == [True, False, False]
    clock.now += 1.1 * EACH_S
    assert going() == [True, True, False]
    drained.leave(calls.pop(0))
    assert going() == [True, True], "one less before it"
    calls.append(drained.enter())
    assert going() == [True, True, False], "it came when the replica was stopping already"
    clock.now += 1.5 * EACH_S
    assert going() == [True, True, True]


@pytest.mark.parametrize(
    "item",
    [
        Chunk("data: 1\n\n"),
        Chunk(DONE, progress=TOLD),
        Whole("{}"),
        Heartbeat(Usage()),
    ],
    ids=["nobody can go on with it", "the last one", "not streamed", "nothing told"],
)
def test_what_cannot_be_moved_is_not_asked_to_go(clock, item):
    drained = Drain(0.0, clock)
    call = drained.enter()
    drained.begin()
    assert drained.marked(call, CHUNK).leaves
    assert drained.marked(call, item) is item


def test_heartbeats_ask_for_answers_that_are_not_streamed(clock):
    drained = Drain(1.0, clock)
    call, beat = drained.enter(), Heartbeat(Usage(), TOLD)
    drained.begin()
    assert drained.marked(call, beat) is beat
    clock.now += 1
    assert drained.marked(call, beat).leaves


def test_nothing_goes_if_the_configuration_says_so(clock):
    drained = Drain(None, clock)
    call = drained.enter()
    drained.begin()
    clock.now += 1e9
    assert drained.marked(call, CHUNK) is CHUNK


def test_chunks_that_are_joined_keep_the_mark(clock):
    drained = Drain(0.0, clock)
    call = drained.enter()
    drained.begin()
    assert joined([CHUNK, drained.marked(call, CHUNK), CHUNK]).leaves
    assert not joined([CHUNK, CHUNK]).leaves


def test_the_drains_are_told_before_the_replica_is_stopped(monkeypatch, clock):
    monkeypatch.setattr(drain, "_drains", [])
    drained = Drain(0.0, clock)
    follow(drained)
    call, seen = drained.enter(), []

    async def stop(replica):
        seen.append((replica, drained.marked(call, CHUNK).leaves))

    asyncio.run(announced(stop)("replica"))
    assert seen == [("replica", True)]

"""Heartbeats between the items of an answer."""

import asyncio
import time

import pytest

from deployments.heartbeat import HEARTBEAT, with_heartbeats


async def slowly(items, pause_s=0.0, log=None):
    try:
        for item in items:
            await asyncio.sleep(pause_s)
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        if log is not None:
            log.append("closed")


def test_none_between_quick_items():
    async def main():
        return [item async for item in with_heartbeats(slowly("abc"), 1.0)]

    assert asyncio.run(main()) == [*"abc"]


def test_one_in_each_silence():
    async def main():
        return [item async for item in with_heartbeats(slowly("ab", 0.13), 0.05)]

    items = asyncio.run(main())
    assert [item for item in items if item] == ["a", "b"]
    assert 4 <= items.count(HEARTBEAT) <= 5


def test_errors_pass():
    async def main():
        return [item async for item in with_heartbeats(slowly(["a", ValueError("broken")]), 1.0)]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(main())


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_closing_closes_what_is_behind(taken):
    log = []

    async def main():
        items = with_heartbeats(slowly("abc", 0.01, log), 0.001)
        for _ in range(taken):
            await anext(items)
        await items.aclose()

    asyncio.run(main())
    assert log == ["closed"]


def test_cancelling_whoever_waits_stops_what_is_behind():
    log = []

    async def main():
        async def wait():
            async for _ in with_heartbeats(slowly("abc", 10, log), 10):
                pass

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        task.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - start < 1

    asyncio.run(main())
    assert log == ["closed"]

"""cfg_core/lanes.py: which jobs wait for which others."""

import asyncio
import threading

import pytest

from cfg_core.lanes import LONG_TEXT, Lanes, num_chars


@pytest.fixture
def lanes():
    lanes = Lanes("test")
    yield lanes
    lanes.close()


async def test_short_texts_pass_long_ones(lanes):
    release = threading.Event()
    running = [asyncio.create_task(lanes.run(LONG_TEXT + 1, release.wait, 10)) for _ in range(5)]
    await asyncio.sleep(0.01)
    assert await asyncio.wait_for(lanes.run(LONG_TEXT, lambda: "short"), 5) == "short"
    assert not any(task.done() for task in running)
    release.set()
    assert await asyncio.gather(*running) == [True] * 5


async def test_one_long_text_at_a_time(lanes):
    at_work, most = 0, 0
    lock = threading.Lock()

    def work():
        nonlocal at_work, most
        with lock:
            at_work += 1
            most = max(most, at_work)
        threading.Event().wait(0.01)
        with lock:
            at_work -= 1

    await asyncio.gather(*(lanes.run(LONG_TEXT * 2, work) for _ in range(6)))
    assert most == 1


async def test_a_job_that_is_cancelled_before_it_begins_never_runs(lanes):
    release, ran = threading.Event(), []
    first = asyncio.create_task(lanes.run(LONG_TEXT * 2, release.wait, 10))
    second = asyncio.create_task(lanes.run(LONG_TEXT * 2, ran.append, 1))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.wait([second])
    release.set()
    await first
    await lanes.run(LONG_TEXT * 2, ran.append, 2)
    assert ran == [2]


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("abc", 3),
        (["ab", "c"], 3),
        ([{"role": "user", "content": [{"text": "abcd"}]}], 8),
        ([1, 2, 3], 12),
        (None, 0),
        (5, 0),
        ([], 0),
    ],
)
def test_num_chars(value, size):
    assert num_chars(value) == size

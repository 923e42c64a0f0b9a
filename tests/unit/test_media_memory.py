"""The memory that images, audio and video may have while they are read."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from cfg_core.errors import CapacityError, OverloadedError
from deployments.generator.media import memory as media_memory
from deployments.generator.media.memory import (
    Budget,
    Client,
    MediaShare,
    Working,
    current_share,
    one_request,
)


class Item:
    """Something decoded."""

    def __init__(self, size: int) -> None:
        self.size = size


def load(share: MediaShare, expected: int, size: int) -> Item:
    return share.load(expected, lambda: Item(size), lambda item: item.size)


def test_what_is_deleted_gives_its_bytes_back() -> None:
    share = MediaShare(Budget(100), limit=80)
    held = load(share, 80, 60)
    with pytest.raises(CapacityError, match="send fewer, or smaller"):
        load(share, 30, 1)
    del held
    held = load(share, 80, 80)
    assert held.size == 80


def test_others_may_hold_the_rest() -> None:
    replica = Budget(100)
    one, two = MediaShare(replica, limit=80), MediaShare(replica, limit=80)
    held = load(one, 70, 70)
    with pytest.raises(OverloadedError, match="send the request again") as error:
        load(two, 40, 40)
    assert error.value.reason == "media"
    del held
    assert load(two, 40, 40).size == 40


def test_what_fails_holds_nothing() -> None:
    share = MediaShare(Budget(100), limit=100)

    def broken() -> Item:
        raise ValueError("no image")

    for _ in range(3):
        with pytest.raises(ValueError, match="no image"):
            share.load(90, broken, lambda item: item.size)
    with pytest.raises(CapacityError):
        load(share, 10, 200)  # it was larger than expected
    assert load(share, 100, 100).size == 100


def test_many_threads() -> None:
    budget = Budget(1000)

    def work() -> None:
        for _ in range(2000):
            if budget.take(7):
                budget.give(7)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert budget.take(1000)


def test_after_the_request_nothing_is_fetched_or_decoded_for_it() -> None:
    fetched = []

    async def fetch() -> None:
        fetched.append(True)

    with one_request():
        share = current_share()
        assert current_share() is share
        asyncio.run(share.downloads.run(fetch))
        load(share, 1, 1)
    assert fetched == [True]
    with pytest.raises(CapacityError, match="has ended"):
        asyncio.run(share.downloads.run(fetch))
    with pytest.raises(CapacityError, match="has ended"):
        load(share, 1, 1)
    assert fetched == [True]


def test_one_client_leaves_room_for_others() -> None:
    """However many requests it sends."""
    replica, attacker = Budget(media_memory.REPLICA_BYTES), Client()
    half = media_memory.REQUEST_BYTES // 2
    held = [load(MediaShare(replica, client=attacker), half, half) for _ in range(2)]
    with pytest.raises(OverloadedError, match="Your other requests") as error:
        load(MediaShare(replica, client=attacker), half, half)
    assert error.value.reason == "media"
    assert load(MediaShare(replica, client=Client()), half, half).size == half
    del held
    assert load(MediaShare(replica, client=attacker), half, half).size == half


def test_requests_of_one_client_are_known_by_its_name() -> None:
    with one_request("a"):
        first = current_share().client
        with one_request("b"):
            assert current_share().client is not first
        with one_request("a"):
            assert current_share().client is first


def test_decoders_wait_for_memory() -> None:
    working, most, held = Working(100), [0], [0]
    lock = threading.Lock()

    def decode(size: int) -> None:
        with working.lent(size):
            with lock:
                held[0] += min(size, 100)
                most[0] = max(most[0], held[0])
            time.sleep(0.001)
            with lock:
                held[0] -= min(size, 100)

    threads = [threading.Thread(target=decode, args=(size,)) for size in [40, 70, 500] * 10]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert held == [0]
    assert most[0] <= 100

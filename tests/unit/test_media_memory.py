"""The memory that images, audio and video may have while they are read."""

from __future__ import annotations

import threading

import pytest

from cfg_core.errors import CapacityError, OverloadedError
from deployments.generator.media_memory import Budget, MediaShare, current_share, one_request


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


def test_after_the_request_nothing_is_fetched_for_it() -> None:
    with one_request():
        share = current_share()
        assert current_share() is share
        share.check_open()
    with pytest.raises(CapacityError, match="has ended"):
        share.check_open()

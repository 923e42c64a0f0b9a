"""A device thread that is stuck, one that is slow, and an event loop that is busy."""

from __future__ import annotations

import pytest

from cfg_core.stall import Stall


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


def look(stall: Stall, clock: Clock, seconds: float, counts: tuple[int, int], every: float = 0.2):
    for _ in range(round(seconds / every)):
        clock.time += every
        stall.look(*counts)


def test_it_is_stuck_if_a_batch_does_not_end(clock):
    stall = Stall(10.0, clock)
    look(stall, clock, 9.0, (3, 2))
    assert not stall.is_stuck
    look(stall, clock, 2.0, (3, 2))
    assert stall.is_stuck


def test_a_slow_batch_is_not_stuck(clock):
    stall = Stall(10.0, clock)
    for number in range(10):
        look(stall, clock, 9.0, (number + 2, number))
        assert not stall.is_stuck


def test_an_idle_engine_is_not_stuck(clock):
    stall = Stall(10.0, clock)
    look(stall, clock, 100.0, (5, 5))
    look(stall, clock, 9.0, (6, 5))
    assert not stall.is_stuck


def test_a_busy_loop_says_nothing_about_the_device(clock):
    """The loop looks once in a minute. The device thread may have waited for it all the time."""
    stall = Stall(10.0, clock)
    look(stall, clock, 480.0, (3, 2), every=60.0)
    assert not stall.is_stuck

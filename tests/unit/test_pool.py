"""Whether the streams of a group can ever fit the KV pool together."""

import pytest

from cfg_core.policy.pool import ELASTIC, EVEN, Lengths, Pool


@pytest.mark.parametrize(
    ("pool", "leader", "follower", "fits"),
    [
        (Pool(10, 0, ELASTIC), 9, 1, True),
        (Pool(10, 0, ELASTIC), 9, 2, False),
        (Pool(10, 1, ELASTIC), 8, 1, True),
        (Pool(10, 1, ELASTIC), 9, 1, False),
        (Pool(10, 0, EVEN), 5, 5, True),
        (Pool(10, 0, EVEN), 6, 1, False),
        (Pool(10, 0, EVEN), 1, 6, False),
        (Pool(10, 1, EVEN), 4, 4, True),
        (Pool(10, 1, EVEN), 5, 1, False),
        (Pool(11, 0, EVEN), 6, 1, False),  # an odd block belongs to no half
    ],
)
def test_two_streams_fit(pool, leader, follower, fits):
    assert pool.fits(leader, [follower]) is fits


@pytest.mark.parametrize(
    ("pool", "leader", "followers", "fits"),
    [
        (Pool(10, 0, ELASTIC), 4, [3, 3], True),
        (Pool(10, 0, ELASTIC), 4, [3, 4], False),
        (Pool(10, 0, EVEN), 5, [3, 2], True),
        (Pool(10, 0, EVEN), 1, [3, 3], False),  # the followers share one half
    ],
)
def test_followers_fit_together(pool, leader, followers, fits):
    assert pool.fits(leader, followers) is fits


@pytest.mark.parametrize(
    ("lengths", "asked", "room"),
    [
        (Lengths(10, (20, 30)), 100, 70),
        (Lengths(40, (20, 30)), 100, 60),
        (Lengths(10, (20,)), 5, 5),
        (Lengths(10, (60,), end=20), 100, 90),  # the follower leaves with 80 tokens
        (Lengths(10, (80,), end=20), 100, 20),  # it would leave with its context full
        (Lengths(10, (90,), end=20), 100, 10),
        (Lengths(10, (60,), end=50), 100, 40),
        (Lengths(10, (60,), end=50), 30, 30),
        (Lengths(10, (), suffix=7), 100, 83),
        (Lengths(10, (), end=5, suffix=7), 100, 83),
        (Lengths(10, (), suffix=7), 83, 83),
    ],
)
def test_room_for_output(lengths, asked, room):
    assert lengths.room(asked, 100) == room


def test_followers_end_with_their_window():
    assert Lengths(10, (20, 30), end=8).totals(50) == (60, (28, 38))
    assert Lengths(10, (20, 30), end=8).totals(5) == (15, (25, 35))
    assert Lengths(10, (20, 30)).totals(50) == (60, (70, 80))
    assert Lengths(10, (), suffix=7).totals(50) == (67, ())


def test_the_limit_of_a_role():
    assert (Pool(11, 2, ELASTIC).limit, Pool(11, 2, EVEN).limit) == (11, 5)

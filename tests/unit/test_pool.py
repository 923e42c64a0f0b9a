"""Whether two streams can ever fit the KV pool together."""

import pytest

from cfg_core.pool import ELASTIC, EVEN, Pool


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
    assert pool.fits(leader, follower) is fits


def test_the_limit_of_a_role():
    assert (Pool(11, 2, ELASTIC).limit, Pool(11, 2, EVEN).limit) == (11, 5)

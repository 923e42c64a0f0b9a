"""Places that are given out while replicas are slower than their engines."""

import pytest

from deployments.throttle import LEAST, LOOK_EVERY_S, Throttle


def after(waits, looks, throttle=None, start_s=0.0, held_s=0.0):
    """A throttle that has looked so often, while the engine waited for this share of the time."""
    throttle = throttle or Throttle()
    for look in range(looks):
        now_s = start_s + look * LOOK_EVERY_S
        throttle.observe(held_s + waits * (now_s - start_s), 1, now_s)
    return throttle


@pytest.mark.parametrize(("waits", "share"), [(0.0, 1.0), (0.2, 1.0), (0.9, LEAST)])
def test_fewer_places_while_engines_wait_much(waits, share):
    assert after(waits, 50).share == share


def test_down_step_by_step_and_up_again():
    throttle = after(0.9, 4)
    low = throttle.share
    assert LEAST < low < 0.7
    assert after(0.0, 40, throttle, start_s=1000.0, held_s=1000.0).share == 1.0


def test_looks_that_come_too_early_do_not_count():
    throttle = Throttle()
    for look in range(100):
        throttle.observe(look * 0.01, 1, look * 0.01)
    assert throttle.share == 1.0


def test_a_replica_that_comes_or_goes_is_no_sign():
    throttle = Throttle()
    throttle.observe(100.0, 2, 0.0)
    throttle.observe(50.0, 1, 10.0)
    throttle.observe(150.0, 2, 20.0)
    throttle.observe(0.0, 2, 30.0)  # restarted
    assert throttle.share == 1.0


def test_the_share_is_of_the_time_of_all_replicas():
    throttle = Throttle()
    for look in range(10):
        throttle.observe(0.2 * 4 * look * 2.0, 4, look * 2.0)
    assert throttle.share == 1.0

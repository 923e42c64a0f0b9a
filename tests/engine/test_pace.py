"""The engine does not run ahead of its frontend.

Tested are the file that both map, and a real engine whose frontend is slow.
"""

import time
from types import SimpleNamespace

import pytest

from cfg_core.vllm_plugin import pace
from cfg_core.vllm_plugin.pace import FrontendPace, Pace, new_file


def outputs(timestamp, num=1):
    return {0: SimpleNamespace(timestamp=timestamp, outputs=[None] * num)}


@pytest.fixture
def sides(tmp_path):
    path = tmp_path / "pace"
    new_file(path)
    scheduler, frontend = Pace(path), FrontendPace(path)
    path.unlink()  # both have the file open
    return scheduler, frontend


def test_nothing_is_held_while_the_frontend_keeps_up(sides):
    scheduler, frontend = sides
    now = time.monotonic()
    assert not scheduler.holds()
    scheduler.sent(outputs(now))
    assert not scheduler.holds()
    frontend.processed(now)
    assert not scheduler.holds()


def test_held_until_the_old_outputs_are_processed(sides):
    scheduler, frontend = sides
    long_ago = time.monotonic() - 1
    for step in range(3):
        scheduler.sent(outputs(long_ago + step * 0.1))
    assert scheduler.holds()
    frontend.processed(long_ago + 0.1)
    assert scheduler.holds()
    frontend.processed(long_ago + 0.2)
    assert not scheduler.holds()


def test_outputs_of_two_engines_come_out_of_order(tmp_path):
    path = tmp_path / "pace"
    new_file(path)
    first, second, frontend = Pace(path), Pace(path), FrontendPace(path)
    long_ago = time.monotonic() - 1
    first.sent(outputs(long_ago + 0.1))
    second.sent(outputs(long_ago))
    frontend.processed(long_ago + 0.1)
    frontend.processed(long_ago)  # the last that the second one sends: it has become idle
    assert not first.holds()
    assert not second.holds()


def test_steps_without_outputs_are_not_waited_for(sides):
    scheduler, _ = sides
    scheduler.sent(outputs(time.monotonic() - 1, num=0))
    assert not scheduler.holds()


def test_without_a_file_nothing_is_held():
    scheduler = Pace(None)
    scheduler.sent(outputs(0.0))
    assert not scheduler.holds()


def test_held_steps_wait_a_moment(sides):
    scheduler, _ = sides
    scheduler.sent(outputs(time.monotonic() - 1))
    began = time.monotonic()
    assert scheduler.holds()
    assert time.monotonic() - began >= pace.WAIT_S

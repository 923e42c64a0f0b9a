"""Beacons and the monitor, with real sockets on the loopback address and real stopped processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from deployments.health import beacon, beacon_monitor
from deployments.health.beacon import Beacon
from deployments.health.beacon_monitor import BeaconMonitor

LOOPBACK = "127.0.0.1"
PROGRAM = """
import threading, time
from deployments.health.beacon import Beacon
beacon = Beacon("127.0.0.1", 1000.0)
while not beacon.address:
    time.sleep(0.01)
print(beacon.address["beacon_port"], flush=True)
{then}
time.sleep(60)
"""
BUSY = "while True: sum(range(100_000))"


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(beacon, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(beacon_monitor, "ASK_EVERY_S", 0.05)


@contextmanager
def replica(then=""):
    """Another process with a beacon; yields it and its port."""
    command = [sys.executable, "-c", PROGRAM.format(then=then)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def within(seconds, true):
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()


def watched(port):
    monitor = BeaconMonitor()
    monitor.watch({"r": (LOOPBACK, port)})
    assert within(10, lambda: "r" in monitor._heard)
    return monitor


def test_a_stopped_replica_is_silent_until_it_continues():
    with replica() as (process, port):
        monitor = watched(port)
        time.sleep(0.5)
        assert monitor.silent_s("r") < 0.4
        os.kill(process.pid, signal.SIGSTOP)
        assert within(10, lambda: monitor.silent_s("r") > 0.5)
        os.kill(process.pid, signal.SIGCONT)
        assert within(10, lambda: monitor.silent_s("r") < 0.4)


def test_a_dead_replica_is_silent():
    with replica() as (process, port):
        monitor = watched(port)
        process.kill()
        assert within(10, lambda: monitor.silent_s("r") > 0.5)


def test_a_busy_replica_is_not_silent():
    """Its interpreter computes without a pause, but the thread of the beacon still runs."""
    with replica(BUSY) as (_, port):
        monitor = watched(port)
        longest = 0.0
        for _ in range(100):
            longest = max(longest, monitor.silent_s("r"))
            time.sleep(0.01)
        assert longest < 0.5


def test_a_replica_that_was_never_heard_is_not_silent():
    monitor = BeaconMonitor()
    monitor.watch({"r": (LOOPBACK, 1)})  # nobody listens there
    time.sleep(0.5)
    assert monitor.silent_s("r") == 0
    assert monitor.silent_s("unknown") == 0


def test_a_replica_that_is_not_watched_any_more_is_forgotten():
    with replica() as (_, port):
        monitor = watched(port)
        monitor.watch({})
        assert within(5, lambda: monitor.silent_s("r") == 0 and not monitor._asking)


def test_a_blocked_event_loop_ends_the_process():
    ended = threading.Event()
    beacon = Beacon(LOOPBACK, 0.3, end=lambda code: ended.set())
    for _ in range(20):
        beacon.tick()
        time.sleep(0.05)
    assert not ended.is_set()
    assert ended.wait(10)


def test_where_beacons_are():
    reports = {"a": {"beacon_host": "h", "beacon_port": 5, "running": 1}, "b": {"running": 1}}
    assert beacon.beacons(reports) == {"a": ("h", 5)}

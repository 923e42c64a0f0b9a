"""Which replicas may get calls: silent, dead and unreachable ones, and how often they failed."""

import threading

import pytest

from deployments.health.replica_health import COUNTS_FOR_S, LEAVES_FOR_S, Failure, ReplicaHealth

DEAD, SILENT, UNREACHABLE = Failure.DEAD, Failure.SILENT, Failure.UNREACHABLE


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class BeaconMonitor:
    """Stands in for the thread that asks beacons; `silent` is by replica."""

    def __init__(self):
        self.silent, self.watched = {}, {}

    def watch(self, beacons):
        self.watched = beacons

    def silent_s(self, replica):
        return self.silent.get(replica, 0.0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def health(clock):
    made = ReplicaHealth(clock)
    made._monitor = BeaconMonitor()
    return made


def test_a_silent_replica_is_the_last_choice_and_a_dead_one_is_not_used(health, clock):
    assert health.usable("abc") == ["a", "b", "c"]
    health.failed("a", SILENT)
    health.failed("b", DEAD)
    health.failed(None, DEAD)
    assert health.usable("abc") == ["c"]
    assert health.usable("ab") == ["a"]
    assert health.usable("b") == []
    assert [health.why(replica) for replica in "abc"] == [SILENT, DEAD, None]
    clock.now += COUNTS_FOR_S[DEAD]
    assert health.usable("abc") == ["b", "c"]
    clock.now += COUNTS_FOR_S[SILENT]
    assert health.usable("abc") == ["a", "b", "c"]


def test_a_replica_that_leaves_is_used_last_of_those_that_are_well_and_has_not_failed(
    health, clock
):
    health.leaves("a")
    health.leaves(None)
    assert health.usable("abc") == ["b", "c"]
    assert health.why("a") is None
    assert health.failures() == {"silent": 0, "dead": 0}
    health.failed("b", SILENT)
    assert health.usable("ab") == ["a"]
    assert [health.is_leaving(replica) for replica in "ab"] == [True, False]
    clock.now += LEAVES_FOR_S
    assert health.usable("ac") == ["a", "c"]
    health.leaves("b")
    assert "a" not in health._leaving, "it does not grow"


def test_dead_counts_before_silent(health, clock):
    health.failed("a", SILENT)
    health.failed("a", DEAD)
    assert health.why("a") is DEAD
    clock.now += COUNTS_FOR_S[DEAD]
    assert health.why("a") is SILENT


def test_a_failure_of_which_several_calls_tell_counts_once(health, clock):
    for _ in range(3):
        health.failed("a", SILENT)
    health.failed("b", SILENT)
    health.failed("b", UNREACHABLE)
    assert health.failures() == {"silent": 2, "dead": 0}
    clock.now += COUNTS_FOR_S[SILENT]
    health.failed("a", SILENT)
    assert health.failures() == {"silent": 3, "dead": 0}


def test_one_call_tries_an_unreachable_replica_for_all(health, clock):
    assert health.may_connect("a")
    assert health.may_connect("a"), "nothing is known against it"
    health.failed("a", UNREACHABLE)
    assert not health.may_connect("a")
    assert health.usable("a") == ["a"], "Serve's handle may reach it"
    clock.now += COUNTS_FOR_S[UNREACHABLE]
    assert [health.may_connect("a") for _ in range(3)] == [True, False, False]
    health.connected("a")
    assert [health.may_connect("a") for _ in range(2)] == [True, True]


def test_silent_is_where_neither_the_beacon_nor_the_call_gave_a_sign(health, clock):
    health._monitor.silent = {"a": 20.0}
    assert health.is_silent("a", clock.now - 20.0, for_s=10.0)
    assert not health.is_silent("a", clock.now - 5.0, for_s=10.0), "the call was heard"
    assert not health.is_silent("b", clock.now - 20.0, for_s=10.0), "the beacon was heard"


def test_reports_say_where_beacons_are_and_who_is_forgotten(health, clock):
    for replica in "ab":
        health.failed(replica, UNREACHABLE)
    health.reported("d", {"b": {"beacon_host": "h", "beacon_port": 5}})
    assert health._monitor.watched == {"b": ("h", 5)}
    assert not health.may_connect("a"), "Serve may list it again"
    clock.now += COUNTS_FOR_S[UNREACHABLE]
    health.reported("d", {"b": {}})
    assert set(health._failing) == {"b"}, "one call is still to try it"


def test_the_replicas_of_one_deployment_do_not_replace_those_of_another(health, clock):
    health.failed("b", UNREACHABLE)
    health.reported("one", {"a": {"beacon_host": "h", "beacon_port": 5}})
    health.reported("two", {"b": {"beacon_host": "h", "beacon_port": 6}})
    assert health._monitor.watched == {"a": ("h", 5), "b": ("h", 6)}
    clock.now += COUNTS_FOR_S[UNREACHABLE]
    health.reported("one", {})
    assert health._monitor.watched == {"b": ("h", 6)}
    assert set(health._failing) == {"b"}, "it runs"
    health.reported("two", {})
    assert health._monitor.watched == {}
    assert not health._failing


def test_several_threads_may_tell_and_ask(health):
    def work(replica):
        for _ in range(2000):
            health.failed(replica, SILENT)
            health.reported("d", {})
            assert health.usable([replica, "well"]) == ["well"]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert health.failures() == {"silent": 4, "dead": 0}

"""CallPlacer: one placer for the calls that go directly and for those that go through Serve."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deployments.direct.address import Address
from deployments.health import replica_health
from deployments.health.replica_health import Failure, ReplicaHealth
from deployments.messages import GenerateCall
from deployments.requests.group import GroupRequest
from deployments.requests.prefix_hashes import Prefix
from deployments.requests.progress import Begun, Outputs
from deployments.requests.usage import OutputCounts
from deployments.routing import call_placer, fleets
from deployments.routing.call_placer import MODEL, CallPlacer, placer_of
from deployments.routing.dispatches import dispatched, expected
from deployments.routing.fleets import generator_fleet

ADDRESS = {name: Address("10.0.0.1", port, bytes(32)) for port, name in enumerate("ab", 1)}


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(replica_health, "_health", ReplicaHealth())
    monkeypatch.setattr(fleets, "_fleets", {})
    monkeypatch.setattr(call_placer, "_placers", {})
    # Loads fade with time, so the order would depend on how fast the test runs.
    monkeypatch.setattr(call_placer, "time", SimpleNamespace(monotonic=lambda: 0.0, time=time.time))


def call(name: str, tokens: int = 100) -> GenerateCall:
    group = GroupRequest(prefixes=(Prefix(num_tokens=tokens, chain=()),))
    return GenerateCall(
        endpoint="completion", body={}, guidance=None, group=group, headers={}, call_id=name
    )


def report(name: str, **fields) -> dict:
    known = {"total_blocks": 1000, "free_blocks": 1000, "max_num_seqs": 64}
    return {**known, **ADDRESS[name].report(), **fields}


def placer(**reports) -> CallPlacer:
    made = CallPlacer()
    made.update("generator", reports or {name: report(name) for name in "ab"})
    return made


def test_the_ingress_finds_it_by_the_name_of_the_deployment():
    assert placer_of("generator") is None
    made = placer()
    assert placer_of("generator") is made
    assert generator_fleet("generator").view.replicas == 2


def test_calls_of_both_ways_count_as_load():
    made = placer()
    first, address = made.direct(call("1"))
    assert address == ADDRESS[first]
    made.sent("1", call("1"), first)
    other = "b" if first == "a" else "a"
    assert made.rank("serve's name", call("2"), "ab") == [other, first]
    made.sent("serve's name", call("2"), other)
    made.sent("3", call("3", tokens=50), first)
    assert made.direct(call("4"))[0] == other
    made.answered("1", first)
    made.answered("3", first)
    assert made.direct(call("5"))[0] == first


def test_a_dispatch_names_the_replica_that_has_the_call():
    made = placer()
    with expected("1") as dispatch:
        replica, _ = made.direct(call("1"))
        assert dispatch.replica == replica
        made.sent("1", call("1"), "b")
        assert dispatch.replica == "b"


def test_a_dispatch_is_seen_while_it_is_expected():
    with expected("a") as dispatch:
        assert dispatch.replica is None
        thread = threading.Thread(target=dispatched, args=("a", "replica 1"))
        thread.start()
        thread.join()
        assert dispatch.replica == "replica 1"
        assert dispatch.at < float("inf")
    dispatched("a", "replica 2")
    assert dispatch.replica == "replica 1", "the call is over"


def test_no_direct_call_where_the_best_replica_takes_none():
    silent = {k: v for k, v in report("a").items() if not k.startswith("direct")}
    assert placer(a=silent).direct(call("1")) is None
    assert CallPlacer().direct(call("1")) is None


def test_a_call_that_does_not_go_directly_is_not_planned_there():
    """Serve's router ranks it again, under a name of its own."""
    silent = {k: v for k, v in report("a").items() if not k.startswith("direct")}
    for reports in ({"a": silent}, {"a": silent, "b": report("b", running=60)}):
        made = placer(**reports)
        for n in range(5):
            assert made.direct(call(str(n))) is None
        assert made._placer._ledger._planned == {}


def test_a_lost_replica_gets_nothing():
    made = placer()
    replica_health.health().failed("a", Failure.DEAD)
    assert [made.direct(call(str(n)))[0] for n in range(3)] == ["b"] * 3
    replica_health.health().failed("b", Failure.DEAD)
    assert made.direct(call("4")) is None


def test_a_dead_replica_gets_nothing_while_the_controller_still_lists_it():
    """It would look idle: what was sent to it is forgotten."""
    made, reports = placer(), {name: report(name) for name in "ab"}
    made.died("a")
    made.update("generator", reports)
    for i in range(20):
        assert made.direct(call(str(i)))[0] == "b"
        made.sent(str(i), call(str(i)), "b")


def test_a_replica_that_is_gone_is_forgotten():
    made = placer()
    made.died("a")
    assert made.direct(call("1"))[0] == "b"
    made.update(None, {})
    assert made.direct(call("2")) is None
    assert generator_fleet("generator").view.replicas == 0


def test_threads_may_place_calls_at_once():
    made, failed = placer(), []

    def work(prefix: str) -> None:
        try:
            for n in range(300):
                name = f"{prefix}{n}"
                replica, _ = made.direct(call(name))
                made.sent(name, call(name), replica)
                made.update("generator", {name: report(name, running=n) for name in "ab"})
                made.answered(name, replica)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not made._placer._ongoing
    made._placer.check_integrity()


def test_a_stream_is_not_sent_to_a_replica_that_has_failed():
    made = placer()
    assert made.can_place("")
    made.died("a")
    assert made.can_place("")
    replica_health.health().failed("b", Failure.SILENT)
    assert not made.can_place("")
    assert not CallPlacer().can_place(""), "no replica is known"


def begun(name: str, model: str) -> GenerateCall:
    counts = OutputCounts(0, 0, 0, 0, (0, 0, 0, 0.0))
    return replace(call(name), begun=Begun(Outputs(), counts, model))


def test_a_stream_that_was_begun_goes_on_with_the_same_model():
    made = placer(a=report("a", **{MODEL: "x"}), b=report("b", **{MODEL: "y"}))
    assert {made.direct(begun(str(n), "x"))[0] for n in range(8)} == {"a"}
    assert {made.direct(begun(str(n), "y"))[0] for n in range(8)} == {"b"}
    assert made.can_place("x")
    assert made.can_place("y")
    assert not made.can_place("z")
    assert made.rank("1", begun("1", "z"), "ab"), "Serve would ask for ever; the replica refuses"
    made.died("a")
    assert not made.can_place("x")


def test_a_replica_that_has_just_started_has_not_told_its_model():
    made = placer(a=report("a", **{MODEL: "x"}), b={})
    assert made.awaits_report()
    replica_health.health().failed("b", Failure.DEAD)
    assert not made.awaits_report()
    made.update("generator", {"a": report("a", **{MODEL: "x"})})
    assert not made.awaits_report()


def test_a_replica_that_leaves_gets_nothing_if_there_is_another():
    made = placer()
    replica_health.health().leaves("a")
    assert {made.direct(call(str(n)))[0] for n in range(8)} == {"b"}
    assert made.can_place("")
    assert made.has_room(call("8").group, "")
    replica_health.health().leaves("b")
    assert not made.has_room(call("8").group, "")
    assert made.can_place(""), "a stream that was lost is better there than nowhere"
    assert made.direct(call("8")), "a new call is better there than nowhere"


def test_room_is_that_of_replicas_which_stay():
    full = {"running": 64}
    group = call("1").group
    assert placer(a=report("a", **full), b=report("b")).has_room(group, "")
    assert not placer(a=report("a", **full), b=report("b", **full)).has_room(group, "")
    assert not placer(a=report("a", **{MODEL: "x"})).has_room(group, "")
    made = placer(a=report("a", **full), b=report("b"))
    replica_health.health().leaves("b")
    assert not made.has_room(group, "")

"""The ingress's state: to which replica each call went, and which replicas are silent."""

import threading

from deployments.routing import shared


def test_a_dispatch_is_seen_while_it_is_expected():
    with shared.expected("a") as dispatch:
        assert dispatch.replica is None
        thread = threading.Thread(target=shared.dispatched, args=("a", "replica 1"))
        thread.start()
        thread.join()
        assert dispatch.replica == "replica 1"
        assert dispatch.at < float("inf")
    shared.dispatched("a", "replica 2")
    assert dispatch.replica == "replica 1", "the call is over"


def test_a_suspect_replica_is_the_last_choice_and_a_lost_one_is_not_used(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(shared.time, "monotonic", lambda: now[0])
    assert shared.usable("abc") == ["a", "b", "c"]
    shared.suspect("a")
    shared.suspect(None)
    shared.lost("b")
    shared.lost(None)
    assert shared.usable("abc") == ["c"]
    assert shared.usable("ab") == ["a"]
    assert shared.usable("b") == []
    now[0] += shared.LOST_S
    assert shared.usable("abc") == ["b", "c"]
    now[0] += shared.SUSPECT_S
    assert shared.usable("abc") == ["a", "b", "c"]

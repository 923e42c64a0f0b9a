"""Where calls went, and who fell silent."""

import threading

from deployments import dispatches


def test_a_dispatch_is_seen_while_it_is_expected():
    with dispatches.expected("a") as dispatch:
        assert dispatch.replica is None
        thread = threading.Thread(target=dispatches.dispatched, args=("a", "replica 1"))
        thread.start()
        thread.join()
        assert dispatch.replica == "replica 1"
        assert dispatch.at < float("inf")
    dispatches.dispatched("a", "replica 2")
    assert dispatch.replica == "replica 1", "the call is over"


def test_a_suspect_is_one_for_a_while(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(dispatches.time, "monotonic", lambda: now[0])
    dispatches.suspect("replica 1")
    dispatches.suspect(None)
    assert dispatches.suspects() == {"replica 1"}
    dispatches.lost("replica 2")
    assert dispatches.lost_replicas() == {"replica 2"}
    now[0] += dispatches.SUSPECT_S + 1
    assert dispatches.suspects() == dispatches.lost_replicas() == frozenset()

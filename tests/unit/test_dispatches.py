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


def test_a_suspect_is_the_last_choice_and_a_lost_one_is_none(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(dispatches.time, "monotonic", lambda: now[0])
    assert dispatches.usable("abc") == ["a", "b", "c"]
    dispatches.suspect("a")
    dispatches.suspect(None)
    dispatches.lost("b")
    dispatches.lost(None)
    assert dispatches.usable("abc") == ["c"]
    assert dispatches.usable("ab") == ["a"]
    assert dispatches.usable("b") == []
    now[0] += dispatches.LOST_S
    assert dispatches.usable("abc") == ["b", "c"]
    now[0] += dispatches.SUSPECT_S
    assert dispatches.usable("abc") == ["a", "b", "c"]

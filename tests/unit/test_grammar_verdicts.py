"""Verdicts on grammars: which are remembered, and for how long."""

from __future__ import annotations

import time

import pytest

from cfg_core.grammars import trials


def test_refusals_that_depend_on_the_machine_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trials, "COSTLY_S", 0.05)
    known = trials.Verdicts(most=2)
    known.keep(b"costly", {"refused": "slow", "costly": True})
    known.keep(b"invalid", {"refused": "invalid", "costly": False})
    assert known.get(b"costly") is not None
    time.sleep(0.1)
    assert known.get(b"costly") is None
    assert known.get(b"invalid") is not None


def test_the_last_ones_are_remembered():
    known = trials.Verdicts(most=2)
    for key in (b"first", b"second"):
        known.keep(key, {"backend": "xgrammar"})
    assert known.get(b"first") is not None  # and is now the last one that was used
    known.keep(b"third", {})
    assert known.get(b"second") is None
    assert known.get(b"first") is not None
    assert known.get(b"third") == {}

"""The policy of gates: when a leader is tried alone, without an engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from cfg_core.policy.gates import Gates, pays

ALWAYS = 1e9
"""A cost of a token at which a probe pays however often the gate opens."""


def steps(is_open: Sequence[bool], token_cost: float = ALWAYS) -> list[str]:
    """The steps by which one text of so many tokens is made, with a suffix of one token."""
    gates, made = Gates(lost=1.0), []
    gates.add("a", 1)
    for opened in is_open:
        if gates.to_probe(token_cost):
            made.append("probe")
            gates.saw("a", opened)
            if not opened:
                continue
        assert not gates.to_probe(ALWAYS) or token_cost < ALWAYS
        made.append("joint")
        gates.saw("a", opened)
    return made


def test_the_first_token_is_not_delayed() -> None:
    assert steps([False]) == steps([True]) == ["joint"]


def test_closed_gates_need_no_joint_step() -> None:
    assert steps([False] * 5) == ["joint", *["probe"] * 4]


def test_a_run_of_open_gates_is_probed_once() -> None:
    run = [False, *[True] * 4, False, False]
    assert steps(run) == ["joint", "probe", *["joint"] * 5, "probe"]


def test_open_gates_are_never_probed() -> None:
    assert steps([True] * 5) == ["joint"] * 5


@pytest.mark.parametrize("seed", range(20))
def test_each_run_of_open_gates_costs_a_step_more_and_one_joint_step_behind_it(seed: int) -> None:
    rng = random.Random(seed)
    is_open = [False, *(rng.random() < 0.3 for _ in range(50))]
    made = steps(is_open)
    openings = sum(b and not a for a, b in itertools.pairwise(is_open))
    closings = sum(a and not b for a, b in itertools.pairwise(is_open))
    assert len(made) == len(is_open) + openings
    assert made.count("joint") == sum(is_open) + 1 + closings


def test_a_probe_pays_where_all_gain_more_than_one_loses() -> None:
    assert not pays(0.5, saved=1.0, lost=1.0)
    assert pays(0.5, saved=1.1, lost=1.0)
    assert not pays(0.5, saved=1.1, lost=2.0)
    assert pays(0.1, saved=0.12, lost=1.0)
    assert not pays(0.0, saved=0.0, lost=1.0)
    assert not pays(1.0, saved=1e9, lost=1.0)


def test_what_costs_nothing_is_not_probed() -> None:
    assert steps([False] * 5, token_cost=0.0) == ["joint"] * 5


def test_gates_that_open_often_are_probed_less() -> None:
    """A token costs a fifth of a step, so a probe pays below one opening in six."""
    rng = random.Random(1)

    def probes(share: float) -> int:
        return steps([rng.random() < share for _ in range(1000)], token_cost=0.2).count("probe")

    assert probes(0.02) > 800
    assert probes(0.5) < 60


def test_joint_steps_tell_when_a_text_has_become_certain() -> None:
    often = [False, True] * 50
    made = steps(often + [False] * 100, token_cost=0.2)
    assert made[-40:] == ["probe"] * 40


def test_a_longer_suffix_pays_earlier() -> None:
    gates = Gates(lost=2.0)
    for leader, tokens in (("a", 1), ("b", 20)):
        gates.add(leader, tokens)
        gates.saw(leader, is_open=False)
        assert gates.tokens(leader) == tokens
    assert gates.to_probe(0.02) == {"b"}


def test_each_group_has_a_gate_of_its_own() -> None:
    gates = Gates(lost=1.0)
    assert not gates
    for leader in "abc":
        gates.add(leader, 1)
    gates.saw("b", is_open=False)
    assert gates.to_probe(ALWAYS) == {"b"}
    assert "d" not in gates
    assert (gates.is_closed("b"), gates.is_closed("a")) == (True, False)
    gates.remove("b")
    assert not gates.to_probe(ALWAYS)
    gates.remove("nobody")
    assert list(gates) == ["a", "c"]

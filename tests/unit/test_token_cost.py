"""What one more token costs a step, from the times of steps, without an engine."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from cfg_core.policy.step_times import IN_FLIGHT
from cfg_core.policy.token_cost import UNKNOWN, TokenCost


def measured(times: Iterable[tuple[int, float]]) -> TokenCost:
    """Steps of so many tokens and seconds, one after the other."""
    cost, now = TokenCost(), 100.0
    for step, (tokens, seconds) in enumerate(times):
        cost.begin(step, tokens, now)
        now += seconds
        cost.end(step, now)
    return cost


def test_nothing_is_known_before_steps_differ() -> None:
    assert TokenCost().of_a_token == UNKNOWN
    assert measured([(8, 0.1)]).of_a_token == UNKNOWN
    assert measured([(8, 0.1 + 0.01 * i) for i in range(9)]).of_a_token == UNKNOWN


@pytest.mark.parametrize("slope", [0.0, 0.001, 0.02])
def test_the_slope_is_found_in_noise(slope: float) -> None:
    """In steps as they are now: here of 24 tokens on average."""
    rng = random.Random(2)
    sizes = [rng.choice((8, 16, 40)) for _ in range(300)]
    cost = measured((n, 0.1 + slope * n + rng.gauss(0, 0.002)) for n in sizes)
    mean = 0.1 + slope * sum(sizes[-50:]) / 50
    assert cost.of_a_token == pytest.approx(slope / mean, abs=0.002)


def test_it_follows_a_change() -> None:
    before = [(8 + 8 * (i % 2), 0.1) for i in range(100)]
    after = [(8 + 8 * (i % 2), 0.1 + 0.01 * (i % 2)) for i in range(200)]
    assert measured(before).of_a_token == pytest.approx(0)
    assert measured(before + after).of_a_token == pytest.approx(0.01 / 8 / 0.105, rel=0.1)


def test_one_slow_step_is_no_slope() -> None:
    steps = [(8 + 8 * (i % 2), 0.1) for i in range(100)]
    assert measured([*steps, (16, 60.0)]).of_a_token < 0.03


def test_it_is_a_share_of_a_step() -> None:
    assert measured([(1, 0.001), (50, 5.0)] * 30).of_a_token <= 1
    assert measured([(1, 5.0), (50, 0.001)] * 30).of_a_token == 0


def test_a_step_takes_from_the_end_of_the_one_before() -> None:
    """With async scheduling two steps are in flight, and each takes a second here."""
    cost, sizes = TokenCost(), [10, 20] * 20
    cost.begin(0, sizes[0], 0.0)
    for i in range(len(sizes) - 1):
        cost.begin(i + 1, sizes[i + 1], i + 0.1)
        cost.end(i, i + 1.0)
    assert cost.of_a_token == pytest.approx(0)


def test_steps_that_were_not_noted_are_no_steps() -> None:
    cost = TokenCost()
    cost.end("a prompt", 5.0)
    for step in range(IN_FLIGHT + 1):
        cost.begin(f"never ends {step}", 1, 6.0)
    for i in range(60):
        cost.begin(i, 10 + 10 * (i % 2), 10.0 + i)
        if i >= IN_FLIGHT - 1:
            cost.end(i - IN_FLIGHT + 1, 10.5 + i)
    assert cost.of_a_token == pytest.approx(0)


def test_a_step_whose_end_is_never_told_hides_no_later_one() -> None:
    """As when its last group was aborted while it ran."""
    cost = TokenCost()
    cost.begin("never ends", 10, 0.0)
    for i in range(100):
        cost.begin(i, 10 + 10 * (i % 2), 1.0 + i)
        cost.end(i, 1.5 + i + 0.1 * (i % 2))
    assert cost.of_a_token == pytest.approx(0.01 / 0.55, rel=0.1)

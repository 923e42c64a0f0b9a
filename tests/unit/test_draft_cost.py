"""What one more draft costs, from the times of steps, without an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from cfg_core.policy.draft_cost import ENOUGH, EVERY, FIRST_EVERY, KEPT, LEAST, DraftCosts
from cfg_core.policy.draft_length import DRAFT_COST
from cfg_core.policy.step_times import IN_FLIGHT, StepTimes

MOST = 4

Seconds = Callable[[int, int, int], float]
"""Of a step of so many rows that verifies and makes so many drafts for each row."""


def linear(cost: float, base: float = 0.02) -> Seconds:
    """One more draft costs `cost` steps: a third to make it, two thirds to verify it."""
    return lambda rows, verified, made: base * (1 + cost * (2 * verified + made) / 3)


class Engine:
    """Steps one after the other, of groups that choose `own` drafts where no trial decides."""

    def __init__(self, costs: DraftCosts, seconds: Seconds) -> None:
        self.costs, self.seconds = costs, seconds
        self.now, self.verified = 100.0, 0
        self.played: list[bool | None] = []

    def run(self, steps: int, rows: int, own: int | None = None) -> None:
        """own: None for a mixture, of which no step is steady."""
        for step in range(steps):
            played = self.costs.trial_move(rows)
            mixed = own is None and played is None
            made = (own or MOST) if played is None else MOST * played
            self.costs.begin(step, rows, made, int(rows * self.verified * (0.4 if mixed else 1)))
            self.now += self.seconds(rows, self.verified, made)
            self.costs.end(step, self.now)
            self.verified = made
            self.played.append(played)


def measured(seconds: Seconds, steps: int = 3000, rows: int = 4, own: int | None = 0) -> DraftCosts:
    engine = Engine(DraftCosts(), seconds)
    engine.run(steps, rows, own)
    return engine.costs


@pytest.mark.parametrize("own", [0, 2, MOST, None])
@pytest.mark.parametrize("cost", [0.05, 0.2, 1.5])
def test_the_cost_is_found_whatever_the_groups_choose(cost: float, own: int | None) -> None:
    assert measured(linear(cost), own=own).of(4) == pytest.approx(cost)


def test_each_power_of_two_of_rows_has_its_own() -> None:
    def seconds(rows: int, verified: int, made: int) -> float:
        return linear(0.05 * rows)(rows, verified, made)

    engine = Engine(DraftCosts(), seconds)
    for rows in (2, 8, 32):
        engine.run(1000, rows)
    found = engine.costs.measured
    assert found == {rows: pytest.approx(0.05 * rows) for rows in (2, 8, 32)}
    assert engine.costs.of(15) == engine.costs.of(8)
    assert engine.costs.of(16) == engine.costs.of(4) == DRAFT_COST, "not measured"


def test_the_constant_counts_until_there_are_a_few_trials() -> None:
    assert DraftCosts().of(4) == DRAFT_COST
    before = measured(linear(1.0), steps=FIRST_EVERY * ENOUGH - 1)
    assert (before.of(4), before.measured) == (DRAFT_COST, {})
    assert measured(linear(1.0), steps=FIRST_EVERY * ENOUGH).of(4) == pytest.approx(1.0)


def test_a_given_cost_is_not_measured() -> None:
    engine = Engine(DraftCosts(constant=0.3), linear(1.0))
    engine.run(2000, 4)
    assert set(engine.played) == {None}
    assert (engine.costs.of(4), engine.costs.measured) == (0.3, {})


def test_trials_decide_for_one_step_in_32() -> None:
    engine = Engine(DraftCosts(), linear(0.2))
    engine.run(10 * EVERY, 4)
    engine.played.clear()
    engine.run(100 * EVERY, 4)
    decided = [played for played in engine.played if played is not None]
    assert len(decided) == len(engine.played) / 32
    assert sum(decided) == len(decided) / 2


def test_it_follows_a_change() -> None:
    engine = Engine(DraftCosts(), linear(0.1))
    engine.run(1000, 4)
    assert engine.costs.of(4) == pytest.approx(0.1)
    engine.seconds = linear(0.5)
    engine.run(KEPT * EVERY, 4)
    assert engine.costs.of(4) == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_flap(seed: int) -> None:
    """Each step varies by a tenth, and one in twenty takes many times as long."""
    rng = random.Random(seed)

    def noisy(rows: int, verified: int, made: int) -> float:
        disturbed = 20 * rng.random() if rng.random() < 0.05 else 0
        return linear(0.2)(rows, verified, made) * (rng.gauss(1, 0.1) + disturbed)

    engine = Engine(DraftCosts(), noisy)
    engine.run(KEPT * EVERY, 4)
    seen = []
    for _ in range(50):
        engine.run(EVERY, 4)
        seen.append(engine.costs.of(4))
    assert max(abs(cost - 0.2) for cost in seen) < 0.1
    assert max(abs(b - a) for a, b in pairwise(seen)) < 0.06


def test_a_machine_that_is_slow_for_a_while_changes_nothing() -> None:
    """Both steps of a trial are slow then. Means of all steps would take this for a cost."""
    engine = Engine(DraftCosts(), linear(0.2))
    for turn in range(40):
        engine.seconds = linear(0.2, base=0.02 * (1 + turn % 3))
        engine.run(EVERY, 4, own=0)
    assert engine.costs.of(4) == pytest.approx(0.2)


def test_drafts_that_cost_nothing_still_back_off() -> None:
    assert measured(linear(0.0)).of(4) == LEAST
    assert measured(linear(-0.1)).of(4) == LEAST


def test_a_prompt_within_a_trial_ends_it() -> None:
    """The groups before and behind it are not as many, nor as long."""
    costs, now = DraftCosts(), 0.0
    for made, verified, is_prompt in [
        (0, 0, False),
        (0, 0, True),
        (4, 0, True),
        (4, 16, False),
    ] * 9:
        if not is_prompt:
            costs.begin("step", 4, made, verified)
        now += 0.02
        costs.end("prompt" if is_prompt else "step", now)
    assert costs.measured == {}


def test_steps_of_another_number_of_rows_are_no_measure() -> None:
    costs, now = DraftCosts(), 0.0
    for _ in range(9):
        for rows, made in ((4, 0), (5, MOST)):
            costs.begin("step", rows, made, rows * made)
            now += 0.02
            costs.end("step", now)
    assert costs.measured == {}


def test_n_grams_count_by_what_they_have_found() -> None:
    costs, now = DraftCosts(), 0.0
    for _ in range(ENOUGH):
        for made, found in ((0, 0), (MOST, 12), (0, 0), (MOST, 3)):  # of 16
            costs.begin("step", 4, made, found)
            now += 0.02 * (1 + 0.1 * found / 4)
            costs.end("step", now)
    assert costs.of(4) == pytest.approx(0.1)


def test_a_step_takes_from_the_end_of_the_one_before() -> None:
    times: StepTimes[str] = StepTimes()
    times.begin(1, "a", 0.0)
    times.begin(2, "b", 0.5)
    assert times.end(1, 2.0) == ("a", 2.0)
    assert times.end(2, 3.0) == ("b", 1.0)
    times.begin(3, "c", 5.0)
    assert times.end("not noted", 6.0) is None
    assert times.end(3, 7.0) == ("c", 1.0)


def test_steps_that_never_end_are_forgotten() -> None:
    times: StepTimes[int] = StepTimes()
    for step in range(IN_FLIGHT + 2):
        times.begin(step, step, 0.0)
    assert times.end(1, 1.0) is None, "too old"
    assert times.end(5, 2.0) == (5, 1.0)
    assert times.end(4, 3.0) is None, "a later one has ended"
    assert times.end(6, 4.0) == (6, 1.0)

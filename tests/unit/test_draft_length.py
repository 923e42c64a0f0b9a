"""The policy by which speculation backs off, without an engine."""

import random

import pytest

from cfg_core.policy.draft_length import (
    DRAFT_COST,
    PROBE_EVERY,
    DraftLength,
    best_length,
    never_pays,
    tokens_per_step,
)


def test_tokens_per_step_is_the_geometric_sum():
    assert tokens_per_step(0.5, 0) == 1
    assert tokens_per_step(0.5, 3) == 1.875
    assert tokens_per_step(1.0, 3) == 4
    assert tokens_per_step(0.0, 3) == 1


@pytest.mark.parametrize(
    ("rate", "length"), [(0.0, 0), (0.15, 0), (0.25, 1), (0.5, 2), (0.8, 4), (1.0, 7)]
)
def test_the_better_the_drafts_the_more_of_them(rate, length):
    assert best_length(rate, 7, 0.2) == length


def test_no_cost_never_backs_off():
    assert best_length(0.01, 5, 0) == best_length(0.0, 5, 0) == 5


def test_drafts_that_cost_more_than_they_give_are_never_made():
    assert never_pays(4, 0.9)
    assert not never_pays(4, DRAFT_COST)
    assert sum(run(DraftLength(), 1.0, 4 * PROBE_EVERY, cost=0.9)) == 0


def run(policy, rate, steps, most=4, seed=1, cost=DRAFT_COST):
    """The lengths of `steps` steps in which each draft is right with this probability."""
    rng, lengths = random.Random(seed), []
    for _ in range(steps):
        length = policy.next(most, cost)
        accepted = next((i for i in range(length) if rng.random() >= rate), length)
        policy.observe(length, accepted)
        lengths.append(length)
    return lengths


def test_the_first_estimate_is_the_prior():
    assert DraftLength().next(4) == best_length(0.8, 4, DRAFT_COST)


@pytest.mark.parametrize("seed", range(5))
def test_drafts_that_are_never_kept_are_given_up_within_a_few_steps(seed):
    lengths = run(DraftLength(), 0.0, 200, seed=seed)
    assert sum(lengths[:10]) <= 15
    assert sum(lengths[20:]) <= 180 / PROBE_EVERY + 1


def test_a_text_that_becomes_easier_is_drafted_again():
    policy = DraftLength()
    run(policy, 0.0, 100)
    assert sum(run(policy, 1.0, 200)[-20:]) == 20 * 4


def test_good_drafts_are_never_given_up():
    assert min(run(DraftLength(), 0.95, 500)) >= 2


def test_drafts_after_a_wrong_one_do_not_change_the_estimate():
    policy = DraftLength(accepted=0.0, tried=0.0)
    policy.observe(4, 1)
    assert (policy.accepted, policy.tried) == (1, 2)
    policy.observe(0, 0)
    assert (policy.accepted, policy.tried) == (1, 2)

"""Markers as requests send them, as the engine gets them, and as the scheduler reads them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cfg_core import GuidanceParams
from cfg_core.params import ResolvedFollower, ResolvedGuidance, TokenIds
from cfg_core.params.between import Between
from cfg_core.policy.groups import output_of_followers
from cfg_core.policy.markers import Markers
from cfg_core.reference import Formula

START, END = 1, 2


def params(**fields: Any) -> GuidanceParams:
    found = GuidanceParams.from_fields({"guidance_scale": 2, **fields})
    assert found is not None
    return found


def test_markers_travel_to_the_engine() -> None:
    entry = {"start_token_id": 5, "end_token_id": 6, "restart_negative": True}
    asked = params(guidance_between=entry, guidance_start=3)
    assert asked.between == Between(5, 6, True)
    sent = ResolvedGuidance.of(asked, (ResolvedFollower(token_ids=TokenIds.of([1])),))
    found = ResolvedGuidance.from_extra_args(sent.to_extra_args())
    assert found == sent
    assert found.timeline is not None
    assert found.timeline.between == Between(5, 6, True)
    assert GuidanceParams.from_fields(asked.to_extra_args()) == asked


def test_json_text_is_read_for_vllms_server() -> None:
    text = '{"start_token_id": "<a>", "end_token_id": 6}'
    assert params(guidance_between=text).between == Between("<a>", 6)


@pytest.mark.parametrize("restart", [False, True])
def test_markers_are_read_as_the_specification_reads_them(restart: bool) -> None:
    """All texts of a few tokens, read a few at a time."""
    rng = random.Random(1)
    formula = Formula(weights=(-1.0,), between=(START, END), restart=restart)
    between = Between(START, END, restart)
    for _ in range(400):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(4))]
        output = [rng.randrange(5) for _ in range(rng.randrange(12))]
        markers = Markers(between, between.is_open_after(prompt))
        for known in sorted({rng.randint(0, len(output)) for _ in range(3)} | {len(output)}):
            markers.read(output[:known])
            assert markers.is_inside == formula.guides_after(prompt, output[:known])
            shared = output_of_followers(output[:known], markers.since)
            assert shared == formula.output_of_followers(output[:known])


def test_an_end_that_never_comes() -> None:
    between = Between(START, None)
    markers = Markers(between, between.is_open_after([START, 9]))
    markers.read([4, 5, 6])
    assert markers.is_inside


def test_drafts_before_a_marker() -> None:
    markers = Markers(Between(START, END), is_inside=False)
    assert [markers.unmarked(d) for d in ([7, 8], [7, START, 8], [END], [7, -1], [])] == [
        2,
        1,
        0,
        1,
        0,
    ]

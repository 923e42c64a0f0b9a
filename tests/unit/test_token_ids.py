"""Token ids as bytes: what they are equal to, and that long ones are not walked in Python."""

import dataclasses
import gc
import pickle
import sys
from random import Random

import pytest

from cfg_core.errors import GuidanceError
from cfg_core.params import (
    Cuts,
    FollowerParams,
    GuidanceParams,
    ResolvedFollower,
    ResolvedGuidance,
    Scored,
    TokenIds,
)
from cfg_core.params.checks import check_token_ids
from cfg_core.params.rules import Rule
from cfg_core.params.strength import Strength
from cfg_core.params.timeline import Timeline

LONG = [Random(1).randrange(2**18) for _ in range(100_000)]


def lines_run(function):
    """The number of lines of Python that `function()` runs."""
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # finalizers of others would count, too
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return lines


@pytest.mark.parametrize(
    "ids", [[], [0], [5, 0, 2**32 - 1], range(3), (7,), LONG], ids=lambda ids: str(len(ids))
)
def test_they_are_the_tuple_of_the_same_ids(ids):
    packed = TokenIds.of(ids)
    assert packed == tuple(ids)
    assert packed == TokenIds.checked(list(ids))
    assert hash(packed) == hash(tuple(ids))
    assert (packed.tolist(), list(packed), len(packed)) == (list(ids), list(ids), len(ids))
    assert packed[1:] == tuple(ids)[1:]
    assert [packed[i] for i in range(-len(ids), len(ids))][:9] == [*ids, *ids][:9]
    assert packed + TokenIds.of([3]) == (*ids, 3)
    assert pickle.loads(pickle.dumps(packed)) == packed
    assert TokenIds.of(packed) is packed
    assert packed != [*ids]
    assert len(repr(packed)) < 120


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, True, 1.0, "1", None, [1]])
def test_what_is_no_token_id_is_found_anywhere(bad):
    for place in (0, 50_000, 99_999):
        ids = [*LONG[:place], bad, *LONG[place + 1 :]]
        assert TokenIds.checked(ids) is None
        with pytest.raises(GuidanceError, match=rf"negative_prompt_token_ids\[{place}\] "):
            check_token_ids(ids, "negative_prompt_token_ids")


def test_each_id_is_looked_at_without_a_loop_in_python():
    """100,000 ids take as many lines of Python as one."""
    make = [
        lambda ids: GuidanceParams(scale=2, negative_prompt_token_ids=ids),
        lambda ids: FollowerParams(weight=1, token_ids=ids),
        lambda ids: check_token_ids(check_token_ids(ids, "ids"), "ids", 2**18),
        lambda ids: GuidanceParams(scale=2, negative_prompt_token_ids=ids).to_extra_args(),
    ]
    for function in make:
        function(LONG), function([1])  # fills the caches of isinstance
        assert lines_run(lambda f=function: f(LONG)) == lines_run(lambda f=function: f([1])) < 300


def test_a_checked_prompt_is_not_looked_at_again(monkeypatch):
    params = GuidanceParams(scale=2, negative_prompt_token_ids=LONG)
    monkeypatch.setattr(TokenIds, "checked", None)
    again = GuidanceParams(scale=3, negative_prompt_token_ids=params.negative_prompt_token_ids)
    assert again.negative_prompt_token_ids is params.negative_prompt_token_ids


EVERY_STRENGTH = Strength(
    max_kl=0.5, min_entropy=1.5, rule=Rule.of_entry({"name": "adacad", "offset": 0.25})
)


def test_the_example_of_a_strength_has_each_of_its_values():
    values = [getattr(EVERY_STRENGTH, field.name) for field in dataclasses.fields(Strength)]
    assert None not in values


def test_resolved_guidance_survives_its_way():
    packed = TokenIds.of(LONG)
    followers = (
        ResolvedFollower(token_ids=packed),
        ResolvedFollower(embeds={"shape": [2, 4], "dtype": "float32", "data": b"x"}, lora=False),
        ResolvedFollower(token_ids=packed[:3], lora=["a", 1, "/a"]),
    )
    guidance = ResolvedGuidance(
        weights=(2.0, -1.0, 0.5, -0.5),
        followers=followers,
        timeline=Timeline(((0, (2.0, -1.0, 0.5, -0.5)),), start=2, end=9),
        cuts=Cuts(top_k=5, min_p=0.25, filter_top_k=3),
        logprobs=True,
        strength=EVERY_STRENGTH,
        scored=Scored(4, top=1),
    )
    extra = guidance.to_extra_args()
    assert ResolvedGuidance.from_extra_args({**extra, "other": 1}) == guidance
    assert ResolvedGuidance.from_extra_args({"other": 1}) is None
    assert ResolvedGuidance.from_extra_args(None) is None
    assert [one.num_tokens for one in guidance.followers] == [100_000, 2, 3]
    with pytest.raises(GuidanceError, match="not a guidance field"):
        GuidanceParams.from_fields(extra)  # nobody but admission may send it

"""GuidanceParams: what is accepted, and what is refused with which message.

No other exception than GuidanceError is raised.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cfg_core import GuidanceError, GuidanceParams
from cfg_core.params import (
    FollowerParams,
    ResolvedGuidance,
    Rule,
    TokenIds,
    follower,
    looks_like_guidance,
)
from cfg_core.params.checks import check_text, check_token_ids
from cfg_core.params.field_table import Field
from cfg_core.params.fields import AMBIGUOUS, FIELDS, ROWS, SYNONYMS
from tests.support.bad_bodies import TEXTS_OF_LISTS, VALUES, Bad

SCALES = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**60), 2**60))
REAL_SCALES = SCALES.filter(lambda s: float(s) != 1.0)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20)
TEXTS = st.text()
NEGATIVES = {
    "negative_prompt": TEXTS,
    "negative_prompt_token_ids": TOKEN_IDS,
    "negative_suffix": st.text(min_size=1),
    "negative_suffix_token_ids": TOKEN_IDS,
}


WEIGHTS = st.floats(-10, 10)
FOLLOWERS = st.one_of(
    st.builds(FollowerParams, weight=WEIGHTS, prompt=TEXTS),
    st.builds(FollowerParams, weight=WEIGHTS, token_ids=TOKEN_IDS.map(tuple)),
    st.builds(FollowerParams, weight=WEIGHTS, lora=st.just(False)),
)
CHANGES = st.lists(st.tuples(st.integers(1, 99), REAL_SCALES), max_size=4, unique_by=lambda c: c[0])


@st.composite
def valid_params(draw: st.DrawFn) -> GuidanceParams:
    """Of every kind: off, a pair, several streams, schedules, windows, cuts and scores."""
    kind = draw(st.sampled_from(["off", "scale", "streams", "schedule", "rule"]))
    fields: dict[str, Any] = {}
    if kind == "streams":
        fields["streams"] = tuple(draw(st.lists(FOLLOWERS, min_size=1, max_size=5)))
    else:
        negative = draw(st.sampled_from([*NEGATIVES, None]))
        if negative is not None:
            fields[negative] = draw(NEGATIVES[negative])
    if kind == "schedule":
        fields["schedule"] = ((0, 2.0), *sorted(draw(CHANGES)))
    elif kind == "rule":
        offset = draw(st.floats(-10, 10))
        fields["rule"] = draw(st.sampled_from([Rule("arr"), Rule("adacad", (("offset", offset),))]))
    elif kind == "scale":
        fields["scale"] = draw(REAL_SCALES)
    elif kind == "off":
        return GuidanceParams(**fields)
    if draw(st.booleans()):
        fields["start"] = draw(st.integers(0, 50))
        fields["end"] = fields["start"] + draw(st.integers(1, 50))
    elif (
        kind != "schedule" and not any("suffix" in name for name in fields) and draw(st.booleans())
    ):
        fields["score_tokens"] = draw(st.integers(1, 50))
    cuts = {"top_k": st.integers(1, 99), "min_p": st.floats(0.01, 1), "filter_top_k": st.just(4)}
    names = draw(st.sets(st.sampled_from(sorted(cuts))))
    return GuidanceParams(**fields, **{name: draw(cuts[name]) for name in names})


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.binary(),
        st.complex_numbers(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=8,
)
NAMES = st.one_of(
    st.sampled_from([*FIELDS, *SYNONYMS, *AMBIGUOUS]),
    st.builds(
        lambda head, rest: head + rest,
        st.sampled_from(["guidance", "cfg", "negative", "CFG_"]),
        st.text(),
    ),
    st.text(),
)


# ---- round trips ---------------------------------------------------------------------------------


@given(valid_params())
def test_round_trips_as_fields_as_json_and_pickled(params: GuidanceParams) -> None:
    extra = params.to_extra_args()
    assert GuidanceParams.from_fields(extra) == params
    assert GuidanceParams.from_fields(json.loads(json.dumps(extra))) == params
    # vLLM's server takes no objects and no nested lists, so its clients send them as text
    texts = {
        name: json.dumps(value) if name in ("guidance_streams", "guidance_schedule") else value
        for name, value in extra.items()
    }
    assert GuidanceParams.from_fields(texts) == params
    again = pickle.loads(pickle.dumps(params))
    assert (again, hash(again)) == (params, hash(params))
    assert math.isclose(sum(params.weights), 1, abs_tol=1e-9 * max(map(abs, params.weights)))


@given(
    valid_params(),
    st.dictionaries(st.text().filter(lambda name: not looks_like_guidance(name)), ANYTHING),
)
def test_unrelated_fields_change_nothing(params: GuidanceParams, others: dict[str, Any]) -> None:
    assert GuidanceParams.from_fields({**others, **params.to_extra_args()}) == params


@given(REAL_SCALES, TOKEN_IDS)
def test_synonyms_mean_the_same(scale: float, ids: list[int]) -> None:
    ours = {"guidance_scale": scale, "negative_prompt_token_ids": ids}
    theirs = {"cfg_scale": scale, "negative_prompt_ids": ids}
    assert GuidanceParams.from_fields(theirs) == GuidanceParams.from_fields(ours)


# ---- what is accepted ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"guidance_scale": 1, "negative_prompt": ""},
        {"guidance_scale": 1, "negative_prompt": "x"},
        {"negative_prompt": "x"},
        {"negative_prompt_ids": [3]},
    ],
)
def test_a_negative_at_scale_one_is_accepted_and_has_no_effect(fields: dict[str, Any]) -> None:
    """Clients send such fields with every request."""
    params = GuidanceParams.from_fields(fields)
    assert params is not None
    assert not params.enabled


@pytest.mark.parametrize("scale", [0, 0.0, -0.0, -2.5, 1, 1.0, 1.5, 3, 1e300, 5e-324])
def test_any_finite_real_is_a_scale(scale: float) -> None:
    params = GuidanceParams(scale=scale)
    assert params.scale == scale
    assert type(params.scale) is float
    assert params.enabled == (scale != 1)


@pytest.mark.parametrize(
    "fields", [None, {}, {"temperature": 0.5}, {"guidance_scale": None, "negative_prompt": None}]
)
def test_without_guidance_fields_the_result_is_none(fields: dict[str, Any] | None) -> None:
    assert GuidanceParams.from_fields(fields) is None


def test_a_scale_of_one_is_kept_and_means_off() -> None:
    params = GuidanceParams.from_fields({"guidance_scale": 1})
    assert params == GuidanceParams()
    assert params is not None
    assert not params.enabled
    assert not params.has_negative


def test_has_negative() -> None:
    assert not GuidanceParams(scale=2).has_negative
    assert GuidanceParams(scale=2, negative_prompt="x").has_negative
    assert GuidanceParams(scale=2, negative_prompt_token_ids=(0,)).has_negative


def test_token_ids_become_a_tuple_whatever_sequence_they_came_in() -> None:
    from_list = GuidanceParams(scale=2, negative_prompt_token_ids=[5, 0])  # type: ignore[arg-type]
    assert from_list.negative_prompt_token_ids == (5, 0)
    assert check_token_ids(range(3), "ids") == (0, 1, 2)


def test_it_is_frozen_and_keyword_only() -> None:
    params = GuidanceParams(scale=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.scale = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        GuidanceParams(2.0)  # type: ignore[misc]


def test_the_input_is_not_changed() -> None:
    fields = {"cfg_scale": 2, "negative_prompt_ids": [1, 2], "top_p": 0.5}
    before = json.dumps(fields)
    GuidanceParams.from_fields(fields)
    assert json.dumps(fields) == before


@pytest.mark.parametrize(
    ("rows", "holder", "others"),
    [(ROWS, GuidanceParams, set()), (follower.ROWS, FollowerParams, {"where"})],
)
def test_each_attribute_has_one_row_and_each_row_says_what_it_means(
    rows: tuple[Field, ...], holder: type, others: set[str]
) -> None:
    held = [row.attribute for row in rows if row.attribute is not None]
    assert len(held) == len(set(held))
    assert {*held, *others} == {field.name for field in dataclasses.fields(holder)}
    assert all(row.help.endswith(".") for row in rows)


# ---- what is refused, and how --------------------------------------------------------------------


@pytest.mark.parametrize("bad", [*VALUES, *TEXTS_OF_LISTS], ids=str)
def test_refusals_name_the_field_and_say_what_to_do(bad: Bad) -> None:
    with pytest.raises(GuidanceError) as caught:
        GuidanceParams.from_fields(bad.fields)
    assert caught.value.param == bad.param
    assert bad.words in str(caught.value)


@pytest.mark.parametrize(("token", "vocab_size"), [(10, 10), (11, 10), (-1, 10), (0, 0)])
def test_token_ids_outside_the_vocabulary(token: int, vocab_size: int) -> None:
    with pytest.raises(
        GuidanceError, match=f"is {token}: token ids of this model are in \\[0, {vocab_size}\\)"
    ):
        check_token_ids([token], "ids", vocab_size)


def test_checks_name_the_given_field() -> None:
    with pytest.raises(GuidanceError, match="weights is empty") as caught:
        check_token_ids([], "weights")
    assert caught.value.param == "weights"
    with pytest.raises(GuidanceError, match="other must be a string"):
        check_text(3, "other")


# ---- nothing but GuidanceError -------------------------------------------------------------------


@given(st.dictionaries(NAMES, ANYTHING, max_size=5))
@example({"guidance_scale": 10**400})
@example({"guidance_scale": 2, "negative_prompt_ids": [float("nan")]})
def test_malformed_fields_give_guidance_error_or_valid_params(fields: dict[str, Any]) -> None:
    try:
        params = GuidanceParams.from_fields(fields)
    except GuidanceError as error:
        _assert_helpful(error)
        return
    if params is None:
        assert all(value is None for name, value in fields.items() if looks_like_guidance(name))
    else:
        assert math.isfinite(params.scale)


@given(ANYTHING, ANYTHING, ANYTHING)
def test_the_constructor_raises_guidance_errors_only(scale: Any, text: Any, ids: Any) -> None:
    try:
        GuidanceParams(scale=scale, negative_prompt=text, negative_prompt_token_ids=ids)
    except GuidanceError as error:
        _assert_helpful(error)


@pytest.mark.parametrize("check", [row.kind.check for row in ROWS])
@given(value=ANYTHING)
def test_the_checks_raise_guidance_errors_only(check: Any, value: Any) -> None:
    try:
        check(value, "negative_prompt")
    except GuidanceError as error:
        _assert_helpful(error)


def _assert_helpful(error: GuidanceError) -> None:
    assert error.param, "the field at fault is not named"
    assert str(error).endswith("."), "not a sentence"


@given(st.text())
def test_every_name_that_looks_like_guidance_is_known_or_refused(name: str) -> None:
    for field in (f"guidance{name}", f"cfg{name}", f"negative{name}"):
        if field not in (*FIELDS, *SYNONYMS):
            with pytest.raises(GuidanceError):
                GuidanceParams.from_fields({field: None})


# ---- importing -----------------------------------------------------------------------------------


def test_importing_cfg_core_imports_no_heavy_library() -> None:
    code = "import sys, cfg_core; print(*sorted({n.partition('.')[0] for n in sys.modules}))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert not {"torch", "numpy", "vllm", "ray", "transformers"} & set(out.split())


def test_weights_of_the_leader_are_the_rest() -> None:
    streams = [{"weight": -6, "prompt": "a"}, {"weight": -2, "prompt": "b"}]
    params = GuidanceParams.from_fields({"guidance_streams": streams})
    assert params is not None
    assert params.weights == (9.0, -6.0, -2.0)
    schedule = GuidanceParams.from_fields({"guidance_schedule": [[0, 3], [5, 1]]})
    assert schedule is not None
    assert schedule.weights == (3.0, -2.0)


def test_a_suffix_needs_no_stream_of_its_own() -> None:
    params = GuidanceParams(scale=2.0, negative_suffix_token_ids=[4, 5])
    assert params.weights == (2.0, -1.0)
    assert params.num_streams == 1
    assert params.has_negative
    guidance = ResolvedGuidance.of(params, (), suffix=TokenIds.of([4, 5]))
    sent = json.loads(json.dumps(guidance.to_extra_args(), default=lambda packed: packed.hex()))
    assert next(iter(sent.values()))["suffix"] == TokenIds.of([4, 5]).packed.hex()
    assert ResolvedGuidance.from_extra_args(guidance.to_extra_args()) == guidance

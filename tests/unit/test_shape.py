"""What a body may cost, from its bytes alone."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cfg_core.errors import RequestError
from deployments.config.limits import LimitsArgs
from deployments.requests import shape
from deployments.requests.body import decode_body
from deployments.requests.demand import check_request_id, copies_of
from deployments.requests.shape import READ_ONCE, FieldSize, ShapeBounds, shape_of

MESSAGE = {"role": "user", "content": 'a "word" \\ [{,:'}

TEXTS = st.text(st.sampled_from('ab"\\[]{},:é\n'), max_size=6)
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def sizes(raw):
    return shape_of(raw).fields


def values_in(value):
    """Objects, lists and texts in a JSON value, counted one by one."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values_in, value.values()))
    return 1 + sum(map(values_in, value)) if isinstance(value, list) else isinstance(value, str)


def entries_in(value):
    inner = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(inner)) + sum(map(entries_in, inner)) if isinstance(value, dict | list) else 0


def depth_of(value):
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(depth_of, inner), default=0) if isinstance(value, dict | list) else 0


@given(st.dictionaries(TEXTS, VALUES, max_size=5), st.sampled_from([3, 7, 50, 1 << 20]))
def test_the_shape_is_that_of_the_parsed_body(body, piece_bytes):
    raw = json.dumps(body, ensure_ascii=False).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "_PIECE_BYTES", piece_bytes)
        found = shape_of(raw)
    assert found.size == FieldSize(len(raw), values_in(body), entries_in(body))
    assert found.depth == depth_of(body)


def test_each_field_has_its_own_size():
    body = {"messages": [MESSAGE] * 3, "n": 5, "allowed_token_ids": [7] * 100, "e": []}
    found = sizes(json.dumps(body).encode())
    # the name of the next field is counted with a field
    assert [found[name].values for name in body] == [1 + 3 * 5 + 1, 1, 1 + 1, 1]
    assert [found[name].entries for name in body] == [3 + 3 * 2 + 1, 1, 100 + 1, 1]
    assert found["allowed_token_ids"].num_bytes == pytest.approx(300, abs=10)


@given(st.binary(max_size=60), st.sampled_from([2, 5, 1 << 20]))
def test_malformed_bodies_have_a_shape_not_larger_than_themselves(raw, piece_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shape, "_PIECE_BYTES", piece_bytes)
        found = shape_of(raw)
    assert found.size.num_bytes == len(raw)
    assert found.size.values <= len(raw)
    assert found.size.entries <= len(raw)


@pytest.mark.parametrize(
    ("field", "raw"),
    [
        ("messages", json.dumps({"model": "m", "messages": [MESSAGE] * 20_000}).encode()),
        ("input", json.dumps({"n": 2, "input": [{"type": "x"}] * 30_000}).encode()),
        ("logit_bias", json.dumps({"logit_bias": {str(i): 1 for i in range(150_000)}}).encode()),
        ("a", b'{"prompt": "x", "a": [' + b"[]," * 2_000_000 + b"1]}"),
        ("a", b'{"a": [' + b'"",' * 70_000 + b'""], "b": 2}'),
        ("prompt", b'{"prompt": [' + b"1," * 2_200_000 + b'1], "n": 2}'),
        (None, b"[" + b"{}," * 70_000 + b"1]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(field, raw, monkeypatch):
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(RequestError, match=r"`limits\.max_values`") as caught:
        decode_body(raw)
    assert caught.value.param == field
    assert (field or "The body") in str(caught.value)


def test_what_real_clients_send_is_within_the_bounds():
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    properties = {f"p{i}": {"type": "string", "description": "d"} for i in range(8)}
    tool["function"]["parameters"] = {"type": "object", "properties": properties}
    body = {
        "messages": [MESSAGE] * 400,
        "tools": [tool] * 128,
        "n": 256,
        "logit_bias": {str(i): 1 for i in range(300)},
        "stop": [f"stop {i}" for i in range(128)],
        "guidance_streams": [{"token_ids": [5] * 16_000, "weight": 0.1}] * 8,
        "bad_words": ["word"] * 8,
    }
    assert decode_body(json.dumps(body).encode(), copies=lambda b: copies_of("chat", b)) == body
    body = {"prompt": [1] * 32_000, "allowed_token_ids": [7] * 200_000, "bad_words": ["x"] * 100}
    raw = json.dumps(body).encode()
    assert decode_body(raw, copies=lambda b: copies_of("completion", b)) == body


@pytest.mark.parametrize(
    ("field", "value", "copies", "key"),
    [
        ("allowed_token_ids", [7] * 150_000, {"n": 256}, "max_copied_entries"),
        ("allowed_token_ids", [7] * 150_000, {"prompt": ["a"] * 200}, "max_copied_entries"),
        ("vllm_xargs", {"x": [1] * 100_000}, {"n": 256}, "max_copied_entries"),
        ("user", "u" * 7_000_000, {"n": 128}, "max_copied_bytes"),
        ("stop_token_ids", [7] * 10_000, {"n": 64}, "max_copied_entries"),
        ("bad_words", ["x" * 100_000], {}, "max_copied_bytes"),
        ("bad_words", ["x"] * 100, {"n": 64}, "max_copied_entries"),
        ("no such field", [1] * 1_000_000, {"n": 2}, "max_copied_entries"),
    ],
)
def test_a_field_times_its_copies_is_bounded(field, value, copies, key):
    raw = json.dumps({"prompt": "x", field: value, **copies}).encode()
    with pytest.raises(RequestError, match=rf"(?s){field} has .*`limits\.{key}`") as caught:
        decode_body(raw, copies=lambda body: copies_of("completion", body))
    assert caught.value.param == field


@pytest.mark.parametrize("field", ["prompt", "messages", "tools"])
def test_fields_that_are_read_once_are_not_multiplied(field):
    assert field in READ_ONCE
    body = {field: "x" * 1_000_000, "n": 256}
    assert decode_body(json.dumps(body).encode(), copies=lambda b: copies_of("chat", b)) == body


@pytest.mark.parametrize(
    ("endpoint", "body", "copies"),
    [
        ("chat", {"n": 3}, 3),
        ("chat", {"n": "3"}, 1),
        ("chat", {"n": -3}, 1),
        ("completion", {"n": 3, "prompt": ["a", "b"]}, 6),
        ("completion", {"n": 3, "prompt": [1, 2]}, 3),
        ("completion", {"prompt_embeds": ["a", "b"]}, 2),
        ("completion", {"prompt": "a", "prompt_embeds": ["a", "b"]}, 3),
        ("scoring", {"items": ["a", "b"]}, 2),
        ("batch", {"messages": [[], []], "n": 2}, 4),
        ("messages", {"messages": [{}, {}]}, 1),
    ],
)
def test_copies_are_choices_of_all_prompts(endpoint, body, copies):
    assert copies_of(endpoint, body)[0] == copies


def test_bounds_are_keys_of_the_configuration():
    bounds = LimitsArgs(max_values=2000, max_copied_entries=3000, max_copied_bytes=2**16)
    assert isinstance(bounds, ShapeBounds)
    raw = json.dumps({"messages": [MESSAGE] * 500, "pad": "x" * 2**16}).encode()
    with pytest.raises(RequestError, match="may hold 2000 objects"):
        decode_body(raw, bounds)


def test_other_encodings_are_refused():
    for raw in (
        '{"prompt": "∢"}'.encode("utf-16"),
        '{"prompt": "x"}'.encode("utf-16-le"),
        '{"prompt": "x"}'.encode("utf-32"),
        b'{"prompt": "\xed\xa0\x80"}',
    ):
        with pytest.raises(RequestError, match="not in UTF-8"):
            decode_body(raw)
    assert decode_body('{"prompt": "한국어"}'.encode()) == {"prompt": "한국어"}
    assert decode_body('\ufeff{"prompt": "x"}'.encode()) == {"prompt": "x"}


def test_the_name_of_a_request_is_short():
    check_request_id({"request_id": "x" * 128})
    check_request_id({"request_id": 5})  # vLLM says what is wrong
    with pytest.raises(RequestError, match="has 7000000 characters: send at most 128"):
        check_request_id({"request_id": "x" * 7_000_000})


@pytest.mark.parametrize("raw", [b'"a":' * 2_000_000, b"{" + b":" * 8_000_000, b'"' * 8_000_000])
def test_malformed_bodies_take_linear_time(raw):
    began = time.perf_counter()
    assert shape_of(raw).size.num_bytes == len(raw)
    assert time.perf_counter() - began < 5  # quadratic would be minutes

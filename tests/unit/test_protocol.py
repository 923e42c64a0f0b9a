"""The HTTP fields of guidance without a server: bodies, guidance, and every refusal."""

import base64
import json
import pickle
import random
import time

import pytest

from cfg_core.errors import (
    EngineError,
    GuidanceError,
    RequestError,
)
from deployments.generator.answers import sse
from deployments.generator.answers.report import guidance_report, is_empty_without_system
from deployments.http.errors import http_error
from deployments.http.text_answers import DONE, error_event, is_last
from deployments.requests.body import decode_body
from deployments.requests.demand import demand_of, output_tokens
from deployments.requests.endpoints import follower_body, with_system
from deployments.requests.guidance_fields import read_guidance
from deployments.requests.guidance_streams import check_number
from deployments.requests.streams import streams_of
from tests.support.bad_bodies import GUIDANCE, NOT_JSON, VALUES

USER = {"role": "user", "content": "Tell me a story."}
SYSTEM = {"role": "system", "content": "Be kind."}


# --- what is accepted -----------------------------------------------------------------------------


def test_plain_bodies_give_no_guidance():
    assert read_guidance({"prompt": "x", "guided_choice": ["a"], "n": 2}, "completion") is None
    assert (
        read_guidance({"messages": [USER], "negative_prompt": None, "guidance_scale": None}, "chat")
        is None
    )


def test_scale_one_without_a_negative_is_a_plain_request():
    guidance = read_guidance(
        {"guidance_scale": 1, "use_beam_search": True, "suffix": "y"}, "completion"
    )
    assert not guidance.enabled
    report = guidance_report(guidance, 0, 5)
    assert report == {"scale": 1.0, "streams": 1, "negative_prompt_tokens": 0, "guided_tokens": 0}


@pytest.mark.parametrize(
    ("fields", "report"),
    [
        (
            {"guidance_streams": [{"weight": -0.5, "prompt": "a"}, {"weight": 2, "prompt": "b"}]},
            {"weights": [-0.5, -0.5, 2.0], "streams": 3},
        ),
        (
            {"guidance_schedule": [[0, 3], [8, 1.5]], "negative_prompt": "a"},
            {"schedule": [[0, 3.0], [8, 1.5]], "streams": 2},
        ),
        ({"guidance_scale": 2, "guidance_end": 5}, {"scale": 2.0, "streams": 2}),
        ({"cfg_scale": -1, "negative_prompt_ids": [3]}, {"scale": -1.0, "streams": 2}),
    ],
)
def test_the_report_says_how_the_streams_were_blended(fields, report):
    found = guidance_report(read_guidance(fields, "completion"), 9, 7, "a note")
    counts = {"negative_prompt_tokens": 9, "guided_tokens": 7}
    assert found == {**report, **counts, "note": "a note"}


def test_a_schedule_has_any_of_the_negatives():
    schedule = {"guidance_schedule": [[0, 3], [8, 1]]}
    guidance = read_guidance({**schedule, "negative_messages": [USER]}, "chat")
    assert guidance.enabled
    assert (guidance.streams, guidance.negative_field) == (2, "negative_messages")
    assert read_guidance(schedule, "chat").negative_field is None


def test_streams_of_a_conversation_may_be_conversations():
    streams = [{"weight": -1, "messages": [USER]}, {"weight": 0.5, "lora": "a"}]
    for endpoint in ("chat", "responses", "messages"):
        guidance = read_guidance({"guidance_streams": streams}, endpoint)
        assert (guidance.streams, guidance.negative_field) == (3, None)
        assert guidance.params.streams[0].messages == (USER,)


def test_adapters_are_names_and_false():
    loras = ["a", False, None, "b"]
    streams = [{"weight": 1, "prompt": "x", "lora": lora} for lora in loras]
    assert read_guidance({"guidance_streams": streams}, "chat").adapters == ("a", False, "b")
    assert read_guidance({"guidance_scale": 2}, "chat").adapters == ()


def test_guidance_survives_pickling():
    guidance = read_guidance({"guidance_scale": 2, "negative_messages": [USER]}, "chat")
    assert pickle.loads(pickle.dumps(guidance)) == guidance


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [*VALUES, *GUIDANCE], ids=str)
def test_refusals(bad):
    with pytest.raises(RequestError) as refusal:
        read_guidance(bad.fields, bad.endpoint)
    assert bad.words in str(refusal.value)
    assert refusal.value.param == bad.param
    assert http_error(refusal.value).status == 400


def test_the_number_of_followers_has_a_bound():
    check_number(9, 8)
    with pytest.raises(GuidanceError, match="has 10 streams, and this server takes 9") as refusal:
        check_number(10, 8)
    assert refusal.value.param == "guidance_streams"


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("raw", "words"), NOT_JSON, ids=lambda value: str(value)[:30])
def test_bad_bodies(raw, words):
    with pytest.raises(RequestError) as refusal:
        decode_body(raw)
    assert words in str(refusal.value)


@pytest.mark.parametrize("at", range(2**20 - 40, 2**20 + 2))
def test_a_huge_integer_is_found_wherever_it_is(at):
    raw = b'{"a": "' + b"x" * (at - 14) + b'", "b": 9223372036854775808}'
    with pytest.raises(RequestError, match="64 bits"):
        decode_body(raw)


def test_the_checks_of_a_large_body_take_about_as_long_as_parsing_it():
    """They hold the interpreter, so the event loop waits, although they run in a thread."""
    text = base64.b64encode(random.Random(0).randbytes(3 << 20)).decode()
    content = [text] * 4 + [{"type": "text"}] * 100
    raw = json.dumps({"messages": [{"role": "user", "content": content}]}).encode()

    def took(function):
        start = time.thread_time()
        function(raw)
        return time.thread_time() - start

    ratios = [took(decode_body) / took(json.loads) for _ in range(5)]
    assert min(ratios) < 5, ratios


def test_good_bodies():
    assert decode_body('{"prompt": "é\\ud83d\\ude00", "temperature": 1e3}'.encode()) == {
        "prompt": "é😀",
        "temperature": 1000.0,
    }
    assert decode_body(
        b'{"seed": 9223372036854775807, "user": "99999999999999999999", "cfg_scale":'
        b" 10000000000000000000}"
    )


# --- the negative stream --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], [{"role": "system", "content": "N"}, USER]),
        ([SYSTEM, USER], [{"role": "system", "content": "N"}, USER]),
        ([USER, SYSTEM, USER], [USER, {"role": "system", "content": "N"}, USER]),
        ([SYSTEM, USER, SYSTEM], [{"role": "system", "content": "N"}, USER, SYSTEM]),
        ([{"role": "developer", "content": "x"}], [{"role": "developer", "content": "N"}]),
        ([], [{"role": "system", "content": "N"}]),
        (["odd", 3], [{"role": "system", "content": "N"}, "odd", 3]),
    ],
)
def test_a_negative_prompt_is_the_system_message_of_a_chat(messages, expected):
    before = json.dumps(messages)
    assert with_system("chat", {"messages": messages}, "N")["messages"] == expected
    assert json.dumps(messages) == before


def test_a_chat_needs_a_list_of_messages():
    with pytest.raises(RequestError, match="messages must be a list, not a string"):
        with_system("chat", {"messages": "hello"}, "N")


@pytest.mark.parametrize(
    ("endpoint", "body", "text", "messages", "expected"),
    [
        ("completion", {"prompt": ["a", "b"]}, "N", None, {"prompt": "N"}),
        (
            "chat",
            {"messages": [SYSTEM, USER]},
            "N",
            None,
            {"messages": [{**SYSTEM, "content": "N"}, USER]},
        ),
        ("chat", {"messages": [SYSTEM, USER]}, "", None, {"messages": [USER]}),
        ("chat", {"messages": [SYSTEM, USER]}, None, (USER,), {"messages": [USER]}),
        ("messages", {"messages": [USER], "system": "I"}, None, (USER,), {"messages": [USER]}),
    ],
)
def test_the_body_of_a_follower(endpoint, body, text, messages, expected):
    body = {**body, "kv_transfer_params": {}, "temperature": 0}
    assert follower_body(endpoint, body, text, messages) == {**expected, "temperature": 0}


TEXT, MESSAGES = {"negative_prompt": "N"}, {"negative_messages": [USER]}


@pytest.mark.parametrize(
    ("endpoint", "body", "negative", "changed"),
    [
        ("completion", {"prompt": ["a", "b"], "n": 3}, TEXT, {"prompt": "N"}),
        ("chat", {"messages": [SYSTEM]}, MESSAGES, {"messages": [USER]}),
        ("responses", {"input": "x"}, TEXT, {"instructions": "N"}),
        ("responses", {"input": "x", "instructions": "I"}, TEXT, {"instructions": "N"}),
        (
            "responses",
            {"input": [SYSTEM, USER]},
            TEXT,
            {"input": [{**SYSTEM, "content": "N"}, USER]},
        ),
        ("responses", {"input": [SYSTEM], "instructions": "I"}, TEXT, {"instructions": "N"}),
        ("messages", {"messages": [USER]}, TEXT, {"system": "N"}),
        ("messages", {"messages": [USER], "system": [{"text": "I"}]}, TEXT, {"system": "N"}),
        (
            "responses",
            {"input": [SYSTEM], "instructions": "I"},
            MESSAGES,
            {"input": [USER], "instructions": None},
        ),
        (
            "messages",
            {"messages": [SYSTEM], "system": "I"},
            MESSAGES,
            {"messages": [USER], "system": None},
        ),
    ],
)
def test_the_body_of_the_negative(endpoint, body, negative, changed):
    """Everything but the prompt, the conversation and the system message stays."""
    body |= {"temperature": 0, "chat_template_kwargs": {"a": 1}}
    guidance = read_guidance({"guidance_scale": 2, **negative}, endpoint)
    expected = {name: x for name, x in {**body, **changed}.items() if x is not None}
    assert guidance.negative_body(endpoint, body) == expected


@pytest.mark.parametrize(
    ("endpoint", "body", "left", "is_noted"),
    [
        ("chat", {"messages": [SYSTEM, USER]}, {"messages": [USER]}, False),
        ("chat", {"messages": [USER, SYSTEM, USER]}, {"messages": [USER, USER]}, False),
        ("chat", {"messages": [USER]}, {"messages": [USER]}, True),
        ("responses", {"input": "x", "instructions": "I"}, {"input": "x"}, False),
        ("responses", {"input": [SYSTEM, USER]}, {"input": [USER]}, False),
        ("responses", {"input": "x"}, {"input": "x"}, True),
        ("messages", {"messages": [USER], "system": "I"}, {"messages": [USER]}, False),
        ("messages", {"messages": [USER]}, {"messages": [USER]}, True),
    ],
)
def test_an_empty_negative_removes_the_system_message(endpoint, body, left, is_noted):
    guidance = read_guidance({"guidance_scale": 2, "negative_prompt": ""}, endpoint)
    negative = guidance.negative_body(endpoint, body)
    assert {name: value for name, value in negative.items() if value is not None} == left
    assert is_empty_without_system(endpoint, body, guidance) == is_noted


@pytest.mark.parametrize(
    ("endpoint", "body", "tokens"),
    [
        ("responses", {"input": "x" * 400, "instructions": "y" * 400, "max_output_tokens": 7}, 7),
        ("messages", {"messages": [USER], "system": "y" * 4000, "max_tokens": 9}, 9),
    ],
)
def test_the_demand_of_a_conversation_counts_its_system_message(endpoint, body, tokens):
    assert output_tokens(endpoint, body) == tokens
    guidance = read_guidance({"guidance_scale": 2}, endpoint)
    demand = demand_of(endpoint, body, guidance, streams_of(endpoint, body, guidance))
    assert demand.streams == 2
    assert demand.tokens >= 200 + 2 * tokens


# --- streams --------------------------------------------------------------------------------------


def chunk(finish_reason=None, **fields):
    choices = [{"index": 0, "text": "x", "finish_reason": finish_reason}]
    return (
        f"data: {json.dumps({'id': 'i', 'choices': choices, **fields}, separators=(',', ':'))}\n\n"
    )


async def through(chunks, endpoint="completion"):
    async def source():
        for item in chunks:
            yield item

    stream = sse.chunks(endpoint, source(), lambda: {"scale": 2.0}, lambda: None)
    return [item async for item in stream]


async def test_the_last_chunk_gets_the_guidance_object():
    head, last = [chunk(), chunk()], chunk("length")
    out = await through([*head, last, DONE])
    assert out[:2] == head
    assert out[2].endswith(DONE)
    ended = out[2].removesuffix(DONE)
    assert json.loads(ended[6:]) == {**json.loads(last[6:]), "guidance": {"scale": 2.0}}
    assert len(out) == 3


async def test_only_the_last_of_several_finished_choices_gets_it():
    out = await through([chunk("stop"), chunk(), chunk("stop"), DONE])
    assert ["guidance" in item for item in out] == [False, False, True]


async def test_the_usage_chunk_gets_it_if_there_is_one():
    usage = 'data: {"id":"i","choices":[],"usage":{"completion_tokens":2}}\n\n'
    out = await through([chunk(), chunk("stop"), usage, DONE])
    assert ["guidance" in item for item in out] == [False, False, True]
    assert json.loads(out[2].removesuffix(DONE)[6:])["usage"] == {"completion_tokens": 2}


async def test_text_that_looks_like_a_finish_reason_is_text():
    text = '"finish_reason":"abort" "choices":[]'
    tricky = f"data: {json.dumps({'choices': [{'text': text}]}, separators=(',', ':'))}\n\n"
    assert not sse.may_be_last(tricky)
    assert (await through([tricky, chunk("stop"), DONE]))[0] == tricky


async def test_done_without_a_last_chunk_passes():
    assert await through([chunk(), DONE]) == [chunk(), DONE]


async def test_a_text_that_says_done_is_not_last():
    """Generated text cannot end an event, because its quotes and line ends are escaped."""
    assert not is_last(f"data: {json.dumps({'text': DONE})}\n\n")


@pytest.mark.parametrize(
    ("bad", "cls"),
    [
        (
            'data: {"error": {"message": "boom", "type": "x", "param": null, "code": 500}}\n\n',
            EngineError,
        ),
        (
            (
                'data: {"error": {"message": "boom", "type": "x", "param": "max_tokens", "code":'
                " 400}}\n\n"
            ),
            RequestError,
        ),
    ],
)
async def test_a_failure_ends_the_stream_without_done(bad, cls):
    with pytest.raises(cls):
        await through([chunk(), bad, DONE])


async def test_the_usage_of_a_message_gets_the_guidance_object():
    usage = 'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":2}}\n\n'
    last = 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    out = await through([usage, last], "messages")
    assert json.loads(out[0].partition("data: ")[2])["guidance"] == {"scale": 2.0}
    assert out[1] == last
    assert is_last(last)


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete"])
async def test_the_last_event_of_a_response_gets_the_guidance_object(kind):
    made = {"type": kind, "response": {"id": "r", "output": ["}"]}}
    event = f"event: {kind}\ndata: {json.dumps(made)}\n\n"
    (out,) = await through([event], "responses")
    assert is_last(event)
    assert is_last(out)
    assert json.loads(out.partition("data: ")[2])["response"] == {
        **made["response"],
        "guidance": {"scale": 2.0},
    }


@pytest.mark.parametrize(
    ("endpoint", "data"),
    [
        ("messages", {"type": "error", "error": {"type": "internal_error", "message": "boom"}}),
        ("responses", {"type": "error", "code": "server_error", "message": "boom"}),
    ],
)
async def test_an_error_event_ends_a_stream(endpoint, data):
    with pytest.raises(EngineError, match="boom"):
        await through([f"event: error\ndata: {json.dumps(data)}\n\n"], endpoint)


async def test_the_known_reason_of_a_failure_counts():
    """vLLM's event may say less."""

    async def source():
        yield 'event: error\ndata: {"type":"error","error":{"message":"?"}}\n\n'

    reason = RequestError("the grammar allows no token", "structured_outputs")
    with pytest.raises(RequestError, match="allows no token"):
        [c async for c in sse.chunks("messages", source(), lambda: None, lambda: reason)]


def test_error_event():
    event = error_event(EngineError("boom"))
    assert event.startswith("event: error\ndata: ")
    assert event.endswith("\n\n")
    assert json.loads(event.split("data: ")[1])["error"]["message"] == "boom"


def test_guidance_in_a_bare_json_text():
    text = '{"id":"i","choices":[{"text":"}"}],"usage":null}'
    assert json.loads(sse.with_guidance(text, {"scale": 2.0})) == {
        **json.loads(text),
        "guidance": {"scale": 2.0},
    }


@pytest.mark.parametrize(
    "raw", [b'{"prompt": "' + b"[" * 5000 + b'"}', b'{"prompt": "' + b'\\"[' * 5000 + b'"}']
)
def test_brackets_in_text_do_not_count_as_nesting(raw):
    assert decode_body(raw)["prompt"].count("[") == 5000


@pytest.mark.parametrize(
    "raw", [b'{"prompt":"' + b'\\"[' * 700_000, b'{"prompt":' + b'"[' * 1_000_000, b"[{" * 10**6]
)
def test_malformed_bodies_are_refused_in_linear_time(raw):
    began = time.perf_counter()
    with pytest.raises(RequestError):
        decode_body(raw)
    assert time.perf_counter() - began < 5  # quadratic would be minutes


def test_long_names_are_not_compared():
    began = time.perf_counter()
    with pytest.raises(RequestError):
        read_guidance({"guidance_" + "x" * 10**6: 1}, "completion")
    read_guidance({"x" * 10**6: 1, "prompt": "x"}, "completion")
    assert time.perf_counter() - began < 2

"""The HTTP fields of guidance without a server: bodies, guidance, and every refusal."""

import base64
import json
import math
import pickle
import random
import time

import pytest

from cfg_core.errors import (
    CfgServeError,
    EngineDeadError,
    EngineError,
    GuidanceError,
    NotFoundError,
    OverloadedError,
    RequestError,
    UnknownModelError,
)
from deployments.generator import sse
from deployments.http.errors import error_of, http_error
from deployments.http.events import DONE, error_event, is_last
from deployments.requests.body import decode_body
from deployments.requests.demand import demand_of, output_tokens
from deployments.requests.endpoints import follower_body, with_system
from deployments.requests.followers import check_number
from deployments.requests.guidance import read_guidance
from deployments.requests.report import (
    Outcome,
    guidance_report,
    is_empty_without_system,
    note_of,
)
from deployments.requests.streams import streams_of

USER = {"role": "user", "content": "Tell me a story."}
SYSTEM = {"role": "system", "content": "Be kind."}


# --- what is accepted -----------------------------------------------------------------------------


def test_plain_bodies_give_no_guidance():
    assert read_guidance({"prompt": "x", "guided_choice": ["a"], "n": 2}, "completion") is None
    assert (
        read_guidance({"messages": [USER], "negative_prompt": None, "guidance_scale": None}, "chat")
        is None
    )


@pytest.mark.parametrize("scale", [-1, 0, 0.5, 1.5, 7, 1e-300, -3.25])
def test_any_finite_scale_is_accepted(scale):
    guidance = read_guidance({"prompt": "x", "guidance_scale": scale}, "completion")
    assert guidance.params.scale == scale
    assert guidance.enabled
    assert guidance.negative_field is None


def test_synonyms():
    guidance = read_guidance({"cfg_scale": 2, "negative_prompt_ids": [3, 4]}, "completion")
    assert guidance.params.scale == 2
    assert guidance.params.negative_prompt_token_ids == (3, 4)
    assert guidance.negative_field == "negative_prompt_token_ids"


def test_scale_one_without_a_negative_is_a_plain_request():
    guidance = read_guidance(
        {"guidance_scale": 1, "use_beam_search": True, "suffix": "y"}, "completion"
    )
    assert not guidance.enabled
    report = guidance_report(guidance, 0, 5)
    assert report == {"scale": 1.0, "streams": 1, "negative_prompt_tokens": 0, "guided_tokens": 0}


@pytest.mark.parametrize(
    ("endpoint", "fields", "field"),
    [
        ("completion", {"guidance_scale": 1, "negative_prompt": ""}, "negative_prompt"),
        ("completion", {"negative_prompt": "a"}, "negative_prompt"),
        ("completion", {"negative_prompt_ids": [1]}, "negative_prompt_token_ids"),
        ("chat", {"guidance_scale": 1.0, "negative_messages": [USER]}, "negative_messages"),
    ],
)
def test_a_negative_at_scale_one_is_served_and_noted(endpoint, fields, field):
    guidance = read_guidance(fields, endpoint)
    assert not guidance.enabled
    note = note_of(endpoint, {}, guidance, Outcome())
    assert note == f"guidance_scale is 1 (off), so {field} had no effect."
    assert guidance_report(guidance, 0, 5, note)["note"] == note


def test_a_negative_beside_a_schedule_of_ones_is_noted():
    guidance = read_guidance({"guidance_schedule": [[0, 1]], "negative_prompt": "a"}, "completion")
    assert not guidance.enabled
    note = note_of("completion", {}, guidance, Outcome())
    assert note == "guidance_schedule is 1 (off), so negative_prompt had no effect."


@pytest.mark.parametrize("fields", [{"guidance_scale": 1}, {"guidance_scale": 2}])
def test_no_note_where_nothing_was_in_vain(fields):
    assert note_of("chat", {}, read_guidance(fields, "chat"), Outcome(longest=9)) is None


@pytest.mark.parametrize(
    ("messages", "left", "is_noted"),
    [
        ([SYSTEM, USER], [USER], False),
        ([USER, SYSTEM, USER], [USER, USER], False),
        ([USER], [USER], True),
    ],
)
def test_an_empty_negative_of_a_chat_is_the_conversation_without_its_system_message(
    messages, left, is_noted
):
    guidance = read_guidance({"guidance_scale": 2, "negative_prompt": ""}, "chat")
    assert guidance.negative_body("chat", {"messages": messages})["messages"] == left
    assert is_empty_without_system("chat", {"messages": messages}, guidance) == is_noted


def test_report_of_a_guided_request():
    guidance = read_guidance({"guidance_scale": 1.5}, "completion")
    assert guidance_report(guidance, 1, 7) == {
        "scale": 1.5,
        "streams": 2,
        "negative_prompt_tokens": 1,
        "guided_tokens": 7,
    }


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
    ],
)
def test_the_report_says_how_the_streams_were_blended(fields, report):
    found = guidance_report(read_guidance(fields, "completion"), 9, 7)
    assert found == {**report, "negative_prompt_tokens": 9, "guided_tokens": 7}


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

REFUSED = [
    # endpoint, fields, parameter at fault, words of the sentence
    (
        "completion",
        {"guidance_scale": 1, "negative_prompt": "a", "negative_prompt_token_ids": [1]},
        "negative_prompt_token_ids",
        "send only one",
    ),
    ("chat", {"guidance_scale": 1, "negative_messages": []}, "negative_messages", "is empty"),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt": "a", "negative_prompt_token_ids": [1]},
        "negative_prompt_token_ids",
        "send only one",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_ids": [1], "negative_prompt_token_ids": [1]},
        "negative_prompt_token_ids",
        "send only one",
    ),
    (
        "chat",
        {"guidance_scale": 2, "negative_prompt": "a", "negative_messages": [USER]},
        "negative_messages",
        "send only one",
    ),
    (
        "chat",
        {"guidance_scale": 2, "negative_prompt_ids": [1], "negative_messages": [USER]},
        "negative_messages",
        "send only one",
    ),
    ("completion", {"guidance_scale": 2, "cfg_scale": 2}, "cfg_scale", "send only one"),
    ("completion", {"cfg_weight": 2}, "cfg_weight", "guidance_scale = 1 + cfg_weight"),
    ("completion", {"cfg_coef": 2}, "cfg_coef", "guidance_scale = cfg_coef"),
    ("completion", {"guidance_scal": 2}, "guidance_scal", "Did you mean guidance_scale?"),
    ("completion", {"Guidance_Scale": 2}, "Guidance_Scale", "Did you mean guidance_scale?"),
    ("completion", {"negative_promt": "a"}, "negative_promt", "Did you mean negative_prompt?"),
    ("completion", {"guidence_scale": 2}, "guidence_scale", "Did you mean guidance_scale?"),
    ("chat", {"negativ_prompt": "a"}, "negativ_prompt", "Did you mean negative_prompt?"),
    ("completion", {"cfg": 2}, "cfg", "Known: guidance_scale"),
    ("completion", {"negative_prompts": None}, "negative_prompts", "Did you mean negative_prompt?"),
    ("chat", {"negative_message": [USER]}, "negative_message", "Did you mean negative_messages?"),
    ("completion", {"guidance_between": {}}, "guidance_between", "not supported yet"),
    ("completion", {"guidance_min_entropy": 1}, "guidance_min_entropy", "not supported yet"),
    ("chat", {"guidance_score_tokens": 3}, "guidance_score_tokens", "is for /v1/completions"),
    ("completion", {"guidance_score_tokens": 3}, "guidance_score_tokens", "send echo and logprobs"),
    (
        "completion",
        {"guidance_scale": 2, "guidance_score_tokens": 3, "logprobs": 1},
        "guidance_score_tokens",
        "send echo and logprobs",
    ),
    ("completion", {"guidance_start": 3}, "guidance_start", "guidance_scale is 1 (off)"),
    ("completion", {"guidance_end": 3}, "guidance_end", "guidance_scale is 1 (off)"),
    ("chat", {"guidance_top_k": 3}, "guidance_top_k", "guidance_scale is 1 (off)"),
    ("chat", {"guidance_streams": []}, "guidance_streams", "leave it out for a plain request"),
    (
        "completion",
        {"guidance_streams": [{"weight": 1, "messages": [USER]}]},
        "guidance_streams[0]",
        "send prompt or token_ids here",
    ),
    (
        "chat",
        {"guidance_streams": [{"weight": 1, "prompt": "a"}], "negative_messages": [USER]},
        "negative_messages",
        "move the conversation into a stream's messages",
    ),
    (
        "chat",
        {"guidance_streams": [{"weight": 1, "prompt": "a"}], "guidance_scale": 2},
        "guidance_streams",
        "leave out guidance_scale",
    ),
    *(
        (
            "completion",
            {"guidance_streams": [{"weight": 1, "prompt": "a"}, {"weight": 1, "lora": lora}]},
            "guidance_streams[1].lora",
            "the name of an adapter, or false",
        )
        for lora in (True, 0, 3, ["a", 1, "/a"], {"name": "a"})
    ),
    (
        "completion",
        {"guidance_streams": '[{"weight": 1, "prompt": "a"}]'},
        "guidance_streams",
        "is a string: send a JSON list",
    ),
    (
        "chat",
        {"guidance_schedule": "[[0, 2]]"},
        "guidance_schedule",
        "is a string: send a JSON list",
    ),
    (
        "messages",
        {"guidance_streams": [{"weight": 1, "prompt": "a"}], "guidance_logprobs": True},
        "guidance_logprobs",
        "use /v1/completions or /v1/chat/completions",
    ),
    (
        "completion",
        {"vllm_xargs": {"guidance_streams": "[]"}},
        "vllm_xargs",
        "move it to the top level",
    ),
    (
        "completion",
        {"guidance_schedule": [[0, 2]], "use_beam_search": True},
        "use_beam_search",
        "Beam search cannot be guided",
    ),
    (
        "batch",
        {"guidance_streams": [{"weight": 1, "prompt": "a"}]},
        "guidance_scale",
        "cannot be guided",
    ),
    ("chat", {"guidance_logprobs": True}, "guidance_logprobs", "guidance_scale is 1 (off)"),
    (
        "messages",
        {"guidance_scale": 2, "guidance_logprobs": True},
        "guidance_logprobs",
        "use /v1/completions or /v1/chat/completions",
    ),
    (
        "responses",
        {"guidance_scale": 2, "guidance_logprobs": True},
        "guidance_logprobs",
        "use /v1/completions or /v1/chat/completions",
    ),
    (
        "completion",
        {"extra_body": {"logits_processors": []}},
        "extra_body",
        "move it to the top level",
    ),
    (
        "completion",
        {"logits_processors": [], "use_beam_search": True},
        "logits_processors",
        "Beam search does not support",
    ),
    ("completion", {"logit_processors": []}, "logit_processors", "Did you mean logits_processors?"),
    ("completion", {"guidance_scale": "2"}, "guidance_scale", "must be a number, not str"),
    ("completion", {"guidance_scale": True}, "guidance_scale", "must be a number, not bool"),
    ("completion", {"guidance_scale": [2]}, "guidance_scale", "must be a number, not list"),
    ("completion", {"guidance_scale": math.nan}, "guidance_scale", "must be finite"),
    ("completion", {"guidance_scale": math.inf}, "guidance_scale", "must be finite"),
    ("completion", {"guidance_scale": 10**400}, "guidance_scale", "must be finite"),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt": 3},
        "negative_prompt",
        "must be a string, not int",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt": ["a"]},
        "negative_prompt",
        "must be a string, not list",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_ids": []},
        "negative_prompt_token_ids",
        "is empty",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_ids": "12"},
        "negative_prompt_token_ids",
        "must be a list",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_ids": [1.0]},
        "negative_prompt_token_ids",
        "[0] must be an",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_ids": [True]},
        "negative_prompt_token_ids",
        "[0] must be an",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_ids": [3, -1]},
        "negative_prompt_token_ids",
        "[1] is -1",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_messages": [USER]},
        "negative_messages",
        "send negative_prompt here",
    ),
    (
        "chat",
        {"guidance_scale": 2, "negative_messages": []},
        "negative_messages",
        "is empty: leave the field out",
    ),
    (
        "chat",
        {"guidance_scale": 2, "negative_messages": "a"},
        "negative_messages",
        "a list of messages, not a string",
    ),
    ("completion", {"vllm_xargs": {"guidance_scale": 2}}, "vllm_xargs", "move it to the top level"),
    ("chat", {"extra_body": {"negative_prompt": "a"}}, "extra_body", "move it to the top level"),
    ("chat", {"extra_args": {"cfg_scale": 2}}, "extra_args", "move it to the top level"),
    ("chat", {"parameters": {"guidance_scale": 2}}, "parameters", "move it to the top level"),
    ("chat", {"options": {"negative_prompt": "a"}}, "options", "move it to the top level"),
    (
        "chat",
        {"chat_template_kwargs": {"cfg_scale": 2}},
        "chat_template_kwargs",
        "move it to the top level",
    ),
    ("batch", {"guidance_scale": 2}, "guidance_scale", "This endpoint cannot be guided"),
    ("scoring", {"guidance_scale": 2}, "guidance_scale", "This endpoint cannot be guided"),
    (
        "completion",
        {"guidance_scale": 2, "use_beam_search": True},
        "use_beam_search",
        "Beam search cannot be guided",
    ),
    ("completion", {"guidance_scale": 2, "suffix": "z"}, "suffix", "cannot be guided"),
    (
        "chat",
        {"guidance_scale": 2, "negative_prompt_embeds": "AAAA"},
        "negative_prompt_embeds",
        "send negative_messages with parts of the type prompt_embeds",
    ),
    (
        "chat",
        {"guidance_streams": [{"weight": 1, "prompt_embeds": "AAAA"}]},
        "guidance_streams[0].prompt_embeds",
        "send guidance_streams[0].messages with parts",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_embeds": {"shape": [1, 2]}},
        "negative_prompt_embeds",
        "must be a string",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_embeds": {"shape": 5}},
        "negative_prompt_embeds",
        "must be a tensor of shape",
    ),
    (
        "completion",
        {"guidance_streams": [{"weight": 1, "prompt_embeds": {"shape": "ab"}}]},
        "guidance_streams[0].prompt_embeds",
        "must be a tensor of shape",
    ),
    (
        "completion",
        {"guidance_scale": 2, "negative_prompt_embeds": [[1.0]]},
        "negative_prompt_embeds",
        "must be a tensor of shape",
    ),
]


@pytest.mark.parametrize(
    ("endpoint", "fields", "param", "words"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_refusals(endpoint, fields, param, words):
    with pytest.raises(RequestError) as refusal:
        read_guidance(fields, endpoint)
    assert words in str(refusal.value)
    assert refusal.value.param == param
    assert http_error(refusal.value).status == 400


def test_the_number_of_followers_has_a_bound():
    check_number(9, 8)
    with pytest.raises(GuidanceError, match="has 10 streams, and this server takes 9") as refusal:
        check_number(10, 8)
    assert refusal.value.param == "guidance_streams"


def test_no_field_that_looks_like_guidance_passes_unread():
    """1000 seeded field names that look like guidance: each is known, or refused."""
    rng = random.Random(0)
    known = {
        "guidance_scale",
        "cfg_scale",
        "negative_prompt",
        "negative_prompt_ids",
        "negative_prompt_token_ids",
    }
    for _ in range(1000):
        name = rng.choice(["guidance", "cfg", "negative"]) + "".join(
            rng.choices("_abcprompt", k=rng.randrange(9))
        )
        if name not in known:
            with pytest.raises(GuidanceError):
                read_guidance(
                    {name: rng.choice([None, 1, "x", []])}, rng.choice(["completion", "chat"])
                )


# --- bodies ---------------------------------------------------------------------------------------

BAD_BODIES = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b"\xff\xfe", "not valid JSON"),
    (b"[1]", "must be a JSON object, not a list"),
    (b"null", "must be a JSON object, not null"),
    (b"3", "must be a JSON object, not a number"),
    (b'"x"', "must be a JSON object, not a string"),
    (b"[" * 100_000, "nested more than 100 deep"),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "nested more than 100 deep"),
    (json.dumps({f"guidance_{i}": 1 for i in range(300)}).encode(), "300 fields"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b'{"temperature": NaN}', "NaN is not a finite number"),
    (b'{"temperature": [-Infinity]}', "-Infinity is not a finite number"),
    (b'{"top_p": 1e999}', "1e999 is not a finite number"),
    (b'{"guidance_scale": NaN}', "guidance_scale must be finite"),
    (b'{"guidance_scale": 1e999}', "guidance_scale must be finite"),
    (b'{"cfg_scale": -Infinity}', "guidance_scale must be finite"),
    (b'{"top_k": 9223372036854775808}', "too large: integers must fit 64 bits"),
    (b'{"stop": [{"a": -1000000000000000000000}]}', "too large: integers must fit 64 bits"),
    (b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
]


@pytest.mark.parametrize(("raw", "words"), BAD_BODIES, ids=lambda value: str(value)[:30])
def test_bad_bodies(raw, words):
    with pytest.raises(RequestError, match=words.replace(".", r"\.")):
        decode_body(raw)


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


def test_negative_body_changes_the_prompt_only():
    body = {
        "prompt": ["a", "b"],
        "guidance_scale": 2,
        "negative_prompt": "N",
        "add_special_tokens": False,
        "n": 3,
    }
    guidance = read_guidance(body, "completion")
    assert guidance.negative_body("completion", body) == {**body, "prompt": "N"}
    chat = {
        "messages": [USER],
        "guidance_scale": 2,
        "negative_messages": [SYSTEM],
        "chat_template_kwargs": {"a": 1},
    }
    guidance = read_guidance(chat, "chat")
    assert guidance.negative_body("chat", chat) == {**chat, "messages": [SYSTEM]}


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


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        ("responses", {"input": "x"}, {"input": "x", "instructions": "N"}),
        ("responses", {"input": "x", "instructions": "I"}, {"input": "x", "instructions": "N"}),
        ("responses", {"input": [SYSTEM, USER]}, {"input": [{**SYSTEM, "content": "N"}, USER]}),
        (
            "responses",
            {"input": [SYSTEM], "instructions": "I"},
            {"input": [SYSTEM], "instructions": "N"},
        ),
        ("messages", {"messages": [USER]}, {"messages": [USER], "system": "N"}),
        (
            "messages",
            {"messages": [USER], "system": [{"type": "text", "text": "I"}]},
            {"messages": [USER], "system": "N"},
        ),
    ],
)
def test_a_negative_prompt_replaces_the_system_message_beside_the_conversation(
    endpoint, body, expected
):
    guidance = read_guidance({"guidance_scale": 2, "negative_prompt": "N"}, endpoint)
    assert guidance.negative_body(endpoint, body) == expected


@pytest.mark.parametrize(
    ("endpoint", "body", "left", "is_noted"),
    [
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
    ("endpoint", "field", "system"),
    [("responses", "input", "instructions"), ("messages", "messages", "system")],
)
def test_negative_messages_are_the_whole_conversation(endpoint, field, system):
    guidance = read_guidance({"guidance_scale": 2, "negative_messages": [USER]}, endpoint)
    body = {field: [SYSTEM], system: "I", "temperature": 0}
    assert guidance.negative_body(endpoint, body) == {field: [USER], "temperature": 0}


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


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (RequestError("m", "p"), 400, None),
        (GuidanceError("m", "p"), 400, None),
        (UnknownModelError("m", "model"), 404, None),
        (OverloadedError("m", 2.2), 429, "3"),
        (EngineError("m"), 500, None),
        (EngineDeadError("m"), 503, "1"),
        (CfgServeError("m"), 500, None),
    ],
)
def test_http_table(error, status, retry_after):
    answer = http_error(pickle.loads(pickle.dumps(error)))
    assert answer.status == status
    assert answer.headers.get("Retry-After") == retry_after
    assert answer.body["error"].keys() == {"message", "type", "param", "code"}
    assert answer.body["error"]["message"] == "m"
    assert answer.body["error"]["code"] == status


def test_messages_that_json_cannot_encode_are_repaired():
    body = http_error(RequestError("bad \ud800 text", "prompt")).body
    assert json.dumps(body, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("status", "cls"),
    [
        (400, RequestError),
        (404, NotFoundError),
        (422, RequestError),
        (429, OverloadedError),
        (500, EngineError),
        (501, RequestError),
        (503, OverloadedError),
    ],
)
def test_errors_of_vllm(status, cls):
    assert type(error_of(status, "m", "p")) is cls


def test_only_a_model_that_is_not_found_is_an_unknown_model():
    assert type(error_of(404, "m", "model")) is UnknownModelError


def test_errors_of_messages_have_anthropics_shape_too():
    body = http_error(RequestError("m", "p"), "/v1/messages").body
    assert body == {"type": "error", **http_error(RequestError("m", "p"), "/v1/completions").body}


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

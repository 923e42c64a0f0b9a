"""The OpenAI API over HTTP, with an unmodified openai client.

Requests are plain and guided, streamed and not.
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tools.serving.process import Json, ServeProcess

PROMPT = "Once upon a time there was a"
NEGATIVE = "A story about the sea."
MESSAGES = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me one."},
]
GREEDY = {"max_tokens": 12, "temperature": 0}


def complete(client: openai.OpenAI, model: str, extra: Json | None = None, **fields: Any) -> Any:
    """Return a completion, or an iterator over its chunks if `stream=True`.

    It is Any, because the client's types do not have the fields that this server adds.
    """
    return client.completions.create(
        **{"model": model, "prompt": PROMPT, **GREEDY, "extra_body": extra, **fields}
    )


def chat(client: openai.OpenAI, model: str, extra: Json | None = None, **fields: Any) -> Any:
    """Return a chat completion, as `complete` does."""
    fields = {"model": model, "messages": MESSAGES, **GREEDY, "extra_body": extra, **fields}
    return client.chat.completions.create(**fields)


def num_tokens(http: httpx.Client, **body: Any) -> int:
    return int(http.post("/tokenize", json=body).json()["count"])


# --- around generation ----------------------------------------------------------------------------


def test_models(client: openai.OpenAI, model: str) -> None:
    """The list has the generator first, then the encoders."""
    assert next(card.id for card in client.models.list().data) == model


def test_tokenize_and_back(http: httpx.Client, model: str) -> None:
    answer = http.post("/tokenize", json={"model": model, "prompt": PROMPT}).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    text = http.post("/detokenize", json={"model": model, "tokens": answer["tokens"]}).json()[
        "prompt"
    ]
    assert PROMPT in text


def test_one_model(client: openai.OpenAI, http: httpx.Client, model: str) -> None:
    for card in client.models.list().data:
        assert client.models.retrieve(card.id).id == card.id
    for name in ("nobody", "some/one/else", f"{model}/x"):
        answer = http.get(f"/v1/models/{name}")
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert name in answer.json()["error"]["message"]


def test_health_and_ready(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "live"}
    ready = http.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["engine"]["total_blocks"] > 0


@pytest.mark.skipif("CFG_SERVE_URL" in os.environ, reason="not a server of ours")
def test_the_whole_server_is_small(server: ServeProcess) -> None:
    """Ray, Serve, the replica and its engine together used 2.6 GiB when it was measured.

    Shared pages are counted once.
    """
    assert server.memory_bytes() < 3.2 * 2**30


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405)],
)
def test_unknown_paths_have_openai_shape(
    http: httpx.Client, method: str, path: str, status: int
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


# --- plain requests -------------------------------------------------------------------------------


def test_plain_requests_carry_no_guidance_object(client: openai.OpenAI, model: str) -> None:
    for answer in (complete(client, model), chat(client, model)):
        assert (
            answer.usage.completion_tokens == GREEDY["max_tokens"]
            or answer.choices[0].finish_reason == "stop"
        )
        assert "guidance" not in answer.model_extra


def test_plain_streams_carry_no_guidance_object(client: openai.OpenAI, model: str) -> None:
    chunks = list(complete(client, model, stream=True))
    assert (
        "".join(chunk.choices[0].text for chunk in chunks)
        == complete(client, model).choices[0].text
    )
    assert not any("guidance" in chunk.model_extra for chunk in chunks)


# --- guided requests ------------------------------------------------------------------------------


def test_guided_completion(client: openai.OpenAI, http: httpx.Client, model: str) -> None:
    answer = complete(client, model, {"guidance_scale": 3.0, "negative_prompt": NEGATIVE})
    assert answer.guidance == {
        "scale": 3.0,
        "streams": 2,
        "negative_prompt_tokens": num_tokens(http, model=model, prompt=NEGATIVE),
        "guided_tokens": answer.usage.completion_tokens,
    }
    assert answer.usage.prompt_tokens == num_tokens(http, model=model, prompt=PROMPT)


def test_guidance_changes_the_text_and_scale_one_does_not(
    client: openai.OpenAI, model: str
) -> None:
    plain = complete(client, model)
    same = complete(client, model, {"guidance_scale": 1.0})
    other = complete(client, model, {"guidance_scale": 8.0, "negative_prompt": PROMPT + " very"})
    assert same.choices[0].text == plain.choices[0].text != other.choices[0].text
    assert same.guidance == {
        "scale": 1.0,
        "streams": 1,
        "negative_prompt_tokens": 0,
        "guided_tokens": 0,
    }


def test_the_default_negative_is_the_last_token(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    tokens = http.post("/tokenize", json={"model": model, "prompt": PROMPT}).json()["tokens"]
    default = complete(client, model, {"guidance_scale": 2.0})
    explicit = complete(
        client, model, {"guidance_scale": 2.0, "negative_prompt_token_ids": tokens[-1:]}
    )
    assert default.guidance["negative_prompt_tokens"] == 1
    assert default.choices[0].text == explicit.choices[0].text


def test_synonyms(client: openai.OpenAI, http: httpx.Client, model: str) -> None:
    tokens = http.post("/tokenize", json={"model": model, "prompt": NEGATIVE}).json()["tokens"]
    text = complete(client, model, {"guidance_scale": 3.0, "negative_prompt": NEGATIVE})
    ids = complete(client, model, {"cfg_scale": 3.0, "negative_prompt_ids": tokens})
    assert ids.choices[0].text == text.choices[0].text
    assert ids.guidance == text.guidance


def test_special_tokens_follow_the_prompt(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    """`add_special_tokens` applies to both streams."""
    for special in (True, False):
        extra = {"guidance_scale": 2.0, "negative_prompt": NEGATIVE, "add_special_tokens": special}
        count = num_tokens(http, model=model, prompt=NEGATIVE, add_special_tokens=special)
        assert complete(client, model, extra).guidance["negative_prompt_tokens"] == count


def test_the_three_negatives_of_a_chat_agree(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    """A negative can be a system message, a conversation, or token ids.

    If they render to the same tokens, the output is the same.
    """
    negative = [{"role": "system", "content": NEGATIVE}, *MESSAGES[1:]]
    tokens = http.post("/tokenize", json={"model": model, "messages": negative}).json()["tokens"]
    extras: list[Json] = [
        {"negative_prompt": NEGATIVE},
        {"negative_messages": negative},
        {"negative_prompt_token_ids": tokens},
    ]
    answers = [chat(client, model, {"guidance_scale": 4.0, **extra}) for extra in extras]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert {answer.guidance["negative_prompt_tokens"] for answer in answers} == {len(tokens)}


def test_a_chat_without_system_message_gets_a_negative_one(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    user = MESSAGES[1:]
    answer = chat(
        client, model, {"guidance_scale": 4.0, "negative_prompt": NEGATIVE}, messages=user
    )
    negative = [{"role": "system", "content": NEGATIVE}, *user]
    assert answer.guidance["negative_prompt_tokens"] == num_tokens(
        http, model=model, messages=negative
    )


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("create", [complete, chat])
def test_guided_streams(
    client: openai.OpenAI, model: str, create: Callable[..., Any], usage: bool
) -> None:
    """A stream has the same text as a whole answer.

    The guidance object is in the last chunk, and only there.
    """
    extra = {"guidance_scale": 3.0, "negative_prompt": NEGATIVE}
    whole = create(client, model, extra)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = list(create(client, model, extra, stream=True, **options))
    assert [chunk.model_extra.get("guidance") for chunk in chunks] == [None] * (len(chunks) - 1) + [
        whole.guidance
    ]
    assert (chunks[-1].usage == whole.usage) if usage else chunks[-1].choices[0].finish_reason
    assert all(chunk.choices for chunk in (chunks[:-1] if usage else chunks))
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(part.text if create is complete else part.delta.content or "" for part in parts)
    assert text == (
        whole.choices[0].text if create is complete else whole.choices[0].message.content
    )


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices(client: openai.OpenAI, model: str, stream: bool) -> None:
    """One negative applies to all prompts, and guided_tokens counts all choices."""
    fields = {"prompt": [PROMPT, "Two", "The third prompt"], "n": 2, "temperature": 1.0, "seed": 1}
    extra = {"guidance_scale": 1.5, "negative_prompt": NEGATIVE}
    answer = complete(
        client,
        model,
        extra,
        stream=stream,
        **fields,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        chunks = list(answer)
        indices, answer = {c.index for chunk in chunks for c in chunk.choices}, chunks[-1]
    else:
        indices = {choice.index for choice in answer.choices}
    assert indices == set(range(6))
    assert answer.guidance["guided_tokens"] == answer.usage.completion_tokens > 0


def test_each_prompt_of_a_list_is_guided_as_if_alone(client: openai.OpenAI, model: str) -> None:
    prompts = [PROMPT, "Two", "The third prompt"]
    extra = {"guidance_scale": 2.5, "negative_prompt": NEGATIVE}
    together = [choice.text for choice in complete(client, model, extra, prompt=prompts).choices]
    alone = [complete(client, model, extra, prompt=prompt).choices[0].text for prompt in prompts]
    assert together == alone


def test_plain_requests_do_not_notice_guided_neighbours(client: openai.OpenAI, model: str) -> None:
    alone = complete(client, model, max_tokens=24).choices[0].text
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        extra = {"guidance_scale": 5.0, "negative_prompt": NEGATIVE}
        guided = [
            pool.submit(complete, client, model, extra, max_tokens=40, seed=i) for i in range(8)
        ]
        plain = [pool.submit(complete, client, model, max_tokens=24) for _ in range(4)]
        assert {future.result().choices[0].text for future in plain} == {alone}
        assert len({future.result().choices[0].text for future in guided}) == 1


# --- what each stream says ------------------------------------------------------------------------

ASKED = {"guidance_scale": 2.0, "negative_prompt": NEGATIVE, "guidance_logprobs": True}


def test_a_completion_tells_what_each_stream_said(client: openai.OpenAI, model: str) -> None:
    """Each stream's logprobs have one entry per token, and are the same when streamed."""
    said = complete(client, model, ASKED, logprobs=3).choices[0].logprobs
    extra = said.model_extra
    assert (
        len(extra["conditional_logprobs"])
        == len(extra["negative_logprobs"])
        == len(said.tokens)
        > 0
    )
    negatives = [ranking for rankings in extra["negative_top_logprobs"] for ranking in rankings]
    assert len(negatives) == len(said.tokens)
    for ranking in [*extra["conditional_top_logprobs"], *negatives]:
        assert len(ranking) == 3
        assert list(ranking.values()) == sorted(ranking.values(), reverse=True)
    streamed = [c.choices[0] for c in complete(client, model, ASKED, logprobs=3, stream=True)]
    parts = [part.logprobs.model_extra for part in streamed if part.logprobs is not None]
    for name in ("conditional_logprobs", "negative_logprobs"):
        whole = np.array(extra[name])
        assert np.allclose(np.concatenate([part[name] for part in parts]), whole, atol=1e-4)


def test_a_chat_tells_what_each_stream_said(client: openai.OpenAI, model: str) -> None:
    """The conditional logprobs are those of the plain request, as long as the texts are equal."""
    tokens = chat(client, model, ASKED, logprobs=True).choices[0].logprobs.content
    plain = chat(client, model, logprobs=True).choices[0].logprobs.content
    assert tokens[0].model_extra.keys() == {
        "conditional_logprob",
        "negative_logprobs",
        "guidance_kl",
        "guidance_strength",
    }
    assert all(len(token.model_extra["negative_logprobs"]) == 1 for token in tokens)
    assert not any(token.model_extra for token in plain)
    ranked = chat(client, model, ASKED, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    for token in ranked:
        own = [token.top_logprobs[0].model_dump().keys()] * 2
        conditional = token.model_extra["conditional_top_logprobs"]
        (negative,) = token.model_extra["negative_top_logprobs"]
        assert [entry.keys() for entry in conditional] == own
        assert [entry.keys() for entry in negative] == own
        known = {entry["token"]: entry["logprob"] for entry in conditional}
        if token.token in known:
            assert known[token.token] == token.model_extra["conditional_logprob"]
    same = [(a, b) for a, b in zip(tokens, plain, strict=False) if a.token == b.token]
    if tokens[0].token == plain[0].token:
        assert same[0][0].model_extra["conditional_logprob"] == pytest.approx(
            same[0][1].logprob, abs=1e-4
        )


def test_an_echo_is_the_prompt_before_the_guided_text(client: openai.OpenAI, model: str) -> None:
    """Its logprobs would be the conditional stream's, so they are refused (test_refusals.py)."""
    guidance = {"guidance_scale": 3.0, "negative_prompt": NEGATIVE}
    echoed, text = (
        complete(client, model, guidance, echo=echo).choices[0].text for echo in (True, False)
    )
    assert echoed == PROMPT + text


# --- fields that clients send with every request --------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("create", [complete, chat])
@pytest.mark.parametrize("negative", ["", NEGATIVE])
def test_a_negative_at_scale_one_is_served_plain_with_a_note(
    client: openai.OpenAI, model: str, create: Callable[..., Any], negative: str, stream: bool
) -> None:
    fields = {"guidance_scale": 1, "negative_prompt": negative}
    answer = create(client, model, fields, stream=stream)
    report = (list(answer)[-1] if stream else answer).model_extra["guidance"]
    assert report == {
        "scale": 1.0,
        "streams": 1,
        "negative_prompt_tokens": 0,
        "guided_tokens": 0,
        "note": "guidance_scale is 1 (off), so negative_prompt had no effect.",
    }


def test_an_empty_negative_is_the_token_that_begins_a_text(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    begin = http.post("/tokenize", json={"model": model, "prompt": PROMPT}).json()["tokens"][:1]
    empty, explicit = (
        complete(client, model, {"guidance_scale": 2.0, **negative})
        for negative in ({"negative_prompt": ""}, {"negative_prompt_token_ids": begin})
    )
    assert empty.choices[0].text == explicit.choices[0].text
    assert empty.model_extra["guidance"] == explicit.model_extra["guidance"]


def test_an_empty_negative_without_tokens_is_as_if_left_out(
    client: openai.OpenAI, model: str
) -> None:
    empty, left_out = (
        complete(client, model, {"guidance_scale": 2.0, "add_special_tokens": False, **more})
        for more in ({"negative_prompt": ""}, {})
    )
    assert empty.choices[0].text == left_out.choices[0].text
    assert empty.model_extra["guidance"]["negative_prompt_tokens"] == 1
    assert "prompt's last token" in empty.model_extra["guidance"]["note"]
    assert "note" not in left_out.model_extra["guidance"]


def test_an_empty_negative_of_a_chat_leaves_out_the_system_message(
    client: openai.OpenAI, model: str
) -> None:
    rest = MESSAGES[1:]
    empty, explicit = (
        chat(client, model, {"guidance_scale": 2.0, **negative})
        for negative in ({"negative_prompt": ""}, {"negative_messages": rest})
    )
    assert empty.choices[0].message.content == explicit.choices[0].message.content
    assert empty.model_extra["guidance"] == explicit.model_extra["guidance"]
    guided = {"guidance_scale": 2.0, "negative_prompt": ""}
    same, plain = (chat(client, model, extra, messages=rest) for extra in (guided, None))
    assert same.choices[0].message.content == plain.choices[0].message.content
    assert "no system message" in same.model_extra["guidance"]["note"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("create", "fields", "words"),
    [
        (complete, {"negative_prompt": NEGATIVE, "guidance_start": 500}, "no token was guided"),
        (complete, {"negative_prompt": PROMPT}, "negative_prompt has the tokens of the prompt"),
        (chat, {"negative_messages": MESSAGES}, "negative_messages has the tokens of the prompt"),
        (
            complete,
            {"guidance_scale": 1, "guidance_streams": [{"weight": 0, "prompt": NEGATIVE}]},
            "guidance_streams[0].weight is 0",
        ),
    ],
)
def test_a_field_without_an_effect_is_noted(
    client: openai.OpenAI,
    model: str,
    create: Callable[..., Any],
    fields: Json,
    words: str,
    stream: bool,
) -> None:
    answer = create(client, model, {"guidance_scale": 2.0, **fields}, stream=stream)
    report = (list(answer)[-1] if stream else answer).model_extra["guidance"]
    assert words in report["note"]


# --- logits processors ----------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [None, {"guidance_scale": 2.0, "negative_prompt": NEGATIVE}])
@pytest.mark.parametrize("create", [complete, chat])
def test_logits_processors_by_name(
    client: openai.OpenAI,
    model: str,
    http: httpx.Client,
    create: Callable[..., Any],
    guidance: Json | None,
) -> None:
    fields = {
        **(guidance or {}),
        "logits_processors": [{"name": "no_repeat_ngram", "n": 1}],
        "ignore_eos": True,
    }
    answer = create(client, model, {**fields, "return_token_ids": True}, max_tokens=30)
    ids = answer.choices[0].model_extra["token_ids"]
    assert len(set(ids)) == len(ids) == 30


def test_each_choice_has_its_own_processor(client: openai.OpenAI, model: str) -> None:
    extra = {
        "logits_processors": [{"name": "no_repeat_ngram", "n": 1}],
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = complete(client, model, extra, n=4, temperature=1.0, seed=1, max_tokens=20)
    texts = [choice.model_extra["token_ids"] for choice in answer.choices]
    assert all(len(set(ids)) == len(ids) == 20 for ids in texts)
    assert len({tuple(ids) for ids in texts}) > 1


# --- terms, ids, metrics --------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [{}, {"guidance_scale": 2.0, "negative_prompt": "A story."}])
def test_time_runs_out(http: httpx.Client, guidance: Json) -> None:
    """A timeout before the first byte is a status, and later it is an error event.

    The group leaves the engine in both cases.
    """
    body = {"prompt": "Once", "max_tokens": 480, "ignore_eos": True, **guidance}
    late = http.post("/v1/completions", json={**body, "timeout": 0.3})
    assert late.status_code == 504
    assert late.headers["x-should-retry"] == "false"
    assert late.json()["error"]["type"] == "timeout_error"
    streamed = http.post(
        "/v1/completions", json={**body, "stream": True}, headers={"X-Request-Timeout": "0.6"}
    ).text
    assert "event: error" in streamed
    assert "timeout_error" in streamed
    assert "[DONE]" not in streamed
    deadline = time.monotonic() + 20
    while http.get("/ready").json()["engine"]["running"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert http.get("/ready").json()["engine"]["running"] == 0


def test_a_request_id_is_the_clients_own(http: httpx.Client) -> None:
    mine = http.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"}
    )
    assert mine.headers["x-request-id"] == "mine-1"
    assert mine.json()["id"].endswith("mine-1")


def test_priorities_order_the_queue_and_never_reach_an_engine_without_them(
    http: httpx.Client,
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "priority": -2})
    assert answer.status_code == 200, answer.text


def test_metrics_count_requests_and_see_the_replica(http: httpx.Client) -> None:
    name = (
        'cfg_serve_requests_total{{ingress="{}",path="/v1/completions",status="200",'
        'tenant="anonymous"}}'
    )
    told = http.get("/metrics").text
    (ingress,) = set(re.findall(r'ingress="(\w+)"', told))
    found = re.search(re.escape(name.format(ingress)) + r" (\S+)", told)
    assert found
    before = float(found[1])
    http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    told = http.get("/metrics").text
    found = re.search(re.escape(name.format(ingress)) + r" (\S+)", told)
    assert found
    assert float(found[1]) == before + 1
    gauges = dict(re.findall(r"^cfg_serve_(\w+){[^}]*} (\S+)$", told, re.MULTILINE))
    assert float(gauges["replicas"]) == 1
    assert float(gauges["kv_blocks"]) >= float(gauges["kv_blocks_free"]) > 0
    assert float(gauges["admission_running_streams"]) == 0
    assert float(gauges["groups"]) >= 0


def test_metrics_count_guided_tokens(http: httpx.Client) -> None:
    def count() -> float:
        told = http.get("/metrics").text
        pattern = r"^cfg_serve_guided_tokens_total{[^}]*} (\S+)$"
        (value,) = re.findall(pattern, told, re.MULTILINE)
        return float(value)

    before = count()
    body = {"prompt": "x", "max_tokens": 7, "ignore_eos": True, "guidance_scale": 2}
    assert http.post("/v1/completions", json=body).status_code == 200
    deadline = time.monotonic() + 20
    while count() < before + 7 and time.monotonic() < deadline:
        time.sleep(0.2)  # replicas report twice a second
    assert count() >= before + 7  # more, if earlier tests were not reported yet


def counted(http: httpx.Client, way: str) -> float:
    told = http.get("/metrics").text
    pattern = rf'^cfg_serve_calls_total{{.*way="{way}".*}} (\S+)$'
    return sum(float(n) for n in re.findall(pattern, told, re.M))


def test_text_does_not_pass_through_serve(
    client: openai.OpenAI, http: httpx.Client, model: str
) -> None:
    ask = {"model": model, "prompt": "Once", "max_tokens": 3}
    http.post("/v1/completions", json=ask)  # the first one may go through Serve
    before = counted(http, "direct"), counted(http, "serve")
    for guidance in ({}, {"guidance_scale": 2.0}):
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**ask, **guidance, "stream": stream})
            assert answer.status_code == 200, answer.text
    assert counted(http, "direct") == before[0] + 4
    assert counted(http, "serve") == before[1]

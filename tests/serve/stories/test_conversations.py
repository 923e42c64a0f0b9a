"""OpenAI's Responses API and Anthropic's Messages API, with their own unmodified clients.

The chat endpoint is the oracle: the same conversation gives the same text there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tools.serving.process import Json

SYSTEM, USER = "You tell stories.", "Tell me one about the sea."
MAX_TOKENS = 24
GUIDED: Json = {"guidance_scale": 2.5, "negative_prompt": "You say little."}
PLAIN: Json = {}
NEGATIVES = [
    {"negative_prompt": "You say little."},
    {"negative_messages": [{"role": "user", "content": "Hello."}]},
    {"negative_prompt": ""},
    {"negative_prompt_token_ids": [5, 6, 7]},
    {},
]


@pytest.fixture(scope="module")
def claude(http: httpx.Client) -> Iterator[anthropic.Anthropic]:
    url = str(http.base_url)
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def body_of(path: str, model: str, system: str | None, user: str) -> Json:
    """A conversation in the format of a path."""
    if path == "/v1/responses":
        return {"model": model, "instructions": system, "input": user}
    messages = [{"role": "user", "content": user}]
    return {"model": model, "system": system, "messages": messages, "max_tokens": MAX_TOKENS}


def oracle(http: httpx.Client, path: str, model: str, negative: Json, scale: float) -> Json:
    """The completion of the token ids that vLLM renders from the conversations of a request."""

    def ids(system: str | None, user: str) -> list[int]:
        rendered = http.post(f"{path}/render", json=body_of(path, model, system, user)).json()
        return list(rendered["token_ids"])

    body: Json = {"model": model, "max_tokens": MAX_TOKENS, "temperature": 0}
    body |= {"prompt": ids(SYSTEM, USER), "guidance_scale": scale}
    if "negative_messages" in negative:
        body["negative_prompt_token_ids"] = ids(None, negative["negative_messages"][0]["content"])
    elif "negative_prompt" in negative:
        body["negative_prompt_token_ids"] = ids(negative["negative_prompt"] or None, USER)
    else:
        body |= negative
    answer: Json = http.post("/v1/completions", json=body).json()
    return answer


def response(client: openai.OpenAI, model: str, extra: Json, **fields: Any) -> Any:
    return client.responses.create(
        **{
            "model": model,
            "instructions": SYSTEM,
            "input": USER,
            "max_output_tokens": MAX_TOKENS,
            "temperature": 0,
            "extra_body": extra,
            **fields,
        }
    )


def message(claude: anthropic.Anthropic, model: str, extra: Json, **fields: Any) -> Any:
    return claude.messages.create(
        **{
            "model": model,
            "system": SYSTEM,
            "messages": [{"role": "user", "content": USER}],
            "max_tokens": MAX_TOKENS,
            "extra_body": {"temperature": 0, **extra},
            **fields,
        }
    )


@pytest.mark.parametrize("negative", NEGATIVES)
def test_guided_conversations_are_completions_of_what_vllm_renders(
    client: openai.OpenAI,
    claude: anthropic.Anthropic,
    http: httpx.Client,
    model: str,
    negative: Json,
) -> None:
    extra = {"guidance_scale": 2.5, **negative}
    made, said = response(client, model, extra), message(claude, model, extra)
    texts = {"/v1/responses": made.output_text, "/v1/messages": said.content[0].text}
    reports = {"/v1/responses": made.model_extra, "/v1/messages": said.model_extra}
    for path, text in texts.items():
        want = oracle(http, path, model, negative, 2.5)
        assert text == want["choices"][0]["text"]
        assert reports[path]["guidance"] == want["guidance"]
        assert want["guidance"]["streams"] == 2


def test_plain_conversations_are_completions_of_what_vllm_renders(
    client: openai.OpenAI, claude: anthropic.Anthropic, http: httpx.Client, model: str
) -> None:
    made, said = response(client, model, PLAIN), message(claude, model, PLAIN)
    texts = {"/v1/responses": made.output_text, "/v1/messages": said.content[0].text}
    for path, text in texts.items():
        assert text == oracle(http, path, model, {}, 1.0)["choices"][0]["text"]
    assert "guidance" not in {**made.model_extra, **said.model_extra}


def test_tokens_of_every_format_are_counted(
    client: openai.OpenAI, claude: anthropic.Anthropic, model: str
) -> None:
    """Streams of the Responses API reach the engine only when they are read."""
    extras, streams = (PLAIN, GUIDED), (False, True)
    for extra, stream in itertools.product(extras, streams):
        made = response(client, model, extra, stream=stream)
        if stream:
            made = list(made)[-1].response
        assert made.usage.output_tokens == MAX_TOKENS
        told = made.model_extra.get("guidance")
        assert told is None if extra is PLAIN else told["guided_tokens"] == MAX_TOKENS


@pytest.mark.parametrize("extra", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_a_streamed_response_is_the_whole_one(
    client: openai.OpenAI, model: str, extra: Json
) -> None:
    whole = response(client, model, extra)
    events = list(response(client, model, extra, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"  # by its limit of tokens
    assert last.response.output_text == text
    assert last.response.usage == whole.usage
    assert last.response.model_extra.get("guidance") == whole.model_extra.get("guidance")


@pytest.mark.parametrize("extra", [PLAIN, GUIDED], ids=["plain", "guided"])
def test_a_streamed_message_is_the_whole_one(
    claude: anthropic.Anthropic, model: str, extra: Json
) -> None:
    whole = message(claude, model, extra)
    events = list(message(claude, model, extra, stream=True))
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    assert text == whole.content[0].text
    assert [event.type for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2].usage.output_tokens == whole.usage.output_tokens
    assert events[-2].model_extra.get("guidance") == whole.model_extra.get("guidance")


def test_a_schema_holds_in_each_format(
    client: openai.OpenAI, claude: anthropic.Anthropic, model: str
) -> None:
    schema = {"enum": ["sea", "shore"]}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    made = response(client, model, GUIDED, text=text)
    said = message(
        claude,
        model,
        {**GUIDED, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    for answer in (made.output_text, said.content[0].text):
        assert json.loads(answer) in schema["enum"]


def test_count_tokens_is_what_a_message_uses(claude: anthropic.Anthropic, model: str) -> None:
    messages: Any = [{"role": "user", "content": USER}]
    count = claude.messages.count_tokens(model=model, system=SYSTEM, messages=messages)
    assert count.input_tokens == message(claude, model, PLAIN).usage.input_tokens


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"guidance_scal": 2}, "guidance_scal", "Did you mean guidance_scale?"),
        ({**GUIDED, "negative_messages": []}, "negative_messages", "is empty"),
        ({"guidance_scale": "2"}, "guidance_scale", "must be a number"),
    ],
)
def test_refusals_reach_both_clients(
    client: openai.OpenAI,
    claude: anthropic.Anthropic,
    model: str,
    extra: Json,
    param: str,
    words: str,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        response(client, model, extra)
    assert refused.value.param == param
    assert words in str(refused.value)
    with pytest.raises(anthropic.BadRequestError) as declined:
        message(claude, model, extra)
    body: Any = declined.value.body
    assert body["type"] == "error"
    assert words in body["error"]["message"]


def test_what_needs_a_store_is_refused(client: openai.OpenAI, model: str) -> None:
    """A response is not kept: the next request may reach another replica."""
    with pytest.raises(openai.BadRequestError, match="background"):
        response(client, model, PLAIN, background=True)
    with pytest.raises(openai.NotFoundError, match="resp_none"):
        response(client, model, PLAIN, previous_response_id="resp_none")


def test_an_unknown_model_is_not_found(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        message(claude, "none", PLAIN)

"""Invalid input over HTTP: refusals with their status, field and sentence.

REFUSED has what the engine refuses, vLLM, or a bound of the YAML. What is refused by reading it is
in tests/support/bad_bodies.py. Malformed bodies are those of the attack `fuzzed` (test_hostile.py).
"""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import openai
import pytest

from tests.support.bad_bodies import GUIDANCE, NOT_JSON, VALUES, Bad
from tools.serving.process import Json, ServeProcess

MARK = "quinceharpsichord"
"""In all texts of this module, so that logs can be searched for it."""

USER = {"role": "user", "content": f"Tell me a story of a {MARK}."}
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
GUIDED: Json = {"guidance_scale": 2.0, "max_tokens": 4}

REFUSED = [
    # path, fields besides prompt or messages, parameter at fault, words of the message
    (
        COMPLETION,
        GUIDED | {"guidance_score_tokens": 99, "echo": True, "logprobs": 0},
        "guidance_score_tokens",
        "must come before",
    ),
    (
        COMPLETION,
        {"guidance_score_tokens": 99, "echo": True, "logprobs": 0},
        "guidance_score_tokens",
        "must come before",
    ),
    (
        COMPLETION,
        {"allowed_token_ids": [300] * 150_000, "n": 256},
        "allowed_token_ids",
        "copies them to 256 choices: at most 1000000 are allowed",
    ),
    (
        CHAT,
        GUIDED | {"negative_messages": [USER] * 20_000},
        "negative_messages",
        "The operator can raise `limits.max_values`",
    ),
    (COMPLETION, {"request_id": "x" * 129}, "request_id", "send at most 128"),
    (
        CHAT,
        {"guidance_streams": [{"weight": 1, "prompt": "a"}] * 9},
        "guidance_streams",
        "takes 9 with the conditional one",
    ),
    (COMPLETION, GUIDED | {"prompt_logprobs": 0}, "prompt_logprobs", "would be the conditional"),
    (
        COMPLETION,
        GUIDED | {"echo": True, "logprobs": 0},
        "prompt_logprobs",
        "would be the conditional",
    ),
    (CHAT, GUIDED | {"prompt_logprobs": 0}, "prompt_logprobs", "would be the conditional"),
    (CHAT, GUIDED | {"negative_messages": [{"role": 3}]}, "negative_messages", "messages[0]"),
    (
        COMPLETION,
        GUIDED | {"negative_prompt": "word " * 3000},
        "negative_prompt",
        "maximum context length",
    ),
    (
        COMPLETION,
        GUIDED | {"negative_prompt_token_ids": [5] * 3000},
        "negative_prompt_token_ids",
        "has 3000 tokens",
    ),
    (
        CHAT,
        GUIDED | {"negative_prompt": "word " * 3000},
        "negative_prompt",
        "maximum context length",
    ),
    (
        COMPLETION,
        GUIDED | {"negative_prompt_token_ids": [10**7]},
        "negative_prompt_token_ids",
        "out of vocabulary",
    ),
    (COMPLETION, GUIDED | {"guidance_logprobs": True}, "guidance_logprobs", "needs logprobs"),
    (COMPLETION, {"logits_processors": "x"}, "logits_processors", "must be a list"),
    (
        COMPLETION,
        {"logits_processors": [{"name": "no_such"}]},
        "logits_processors",
        "known logits processors: no_repeat_ngram",
    ),
    (CHAT, {"logits_processors": [{"name": "no_repeat_ngram"}]}, "logits_processors", "'n'"),
    (
        CHAT,
        GUIDED | {"logits_processors": [{"name": "no_repeat_ngram", "n": 0}]},
        "logits_processors",
        "at least 1",
    ),
    (COMPLETION, {"logits_processor": []}, "logits_processor", "Did you mean logits_processors?"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "not null"),
    (CHAT, {"messages": [{"role": "user", "content": [MARK]}]}, "messages[0].content[0]", "object"),
    (CHAT, {"response_format": {"type": MARK}}, "response_format.type", "'json_object'"),
    (
        CHAT,
        {"tools": [{"type": "function", "function": {"name": 5}}]},
        "tools[0].function.name",
        "",
    ),
    (
        CHAT,
        {"chat_template": "{{ raise_exception('" + MARK + "') }}"},
        "chat_template",
        "chat template",
    ),
    (
        CHAT,
        {"chat_template_kwargs": {"conversation": MARK}},
        "chat_template_kwargs.conversation",
        "leave it out",
    ),
    (CHAT, {"structured_outputs": {"regex": MARK + "("}}, "structured_outputs", ""),
    (CHAT, {"structured_outputs": {MARK: 1}}, "structured_outputs", "are specified"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "max allowed: 20"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be"),
    (CHAT, {"n": 0}, "n", "at least 1"),
    (CHAT, {"stop": ""}, "stop", "empty string"),
    (COMPLETION, {"logit_bias": {MARK: 1}}, "logit_bias", ""),
]


def start(path: str) -> Json:
    return {"prompt": f"Once a {MARK}"} if path == COMPLETION else {"messages": [USER]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param", "words"), REFUSED, ids=lambda value: str(value)[:50]
)
def test_refusals(
    http: httpx.Client,
    model: str,
    path: str,
    fields: Json,
    param: str | None,
    words: str,
    stream: bool,
) -> None:
    answer = http.post(path, json={"model": model, **start(path), **fields, "stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param


PATHS: dict[str, tuple[str, Json]] = {
    "completion": (COMPLETION, {"prompt": "Once"}),
    "chat": (CHAT, {"messages": [USER]}),
    "batch": ("/v1/chat/completions/batch", {"messages": [[USER]]}),
    "scoring": ("/generative_scoring", {"query": "a", "items": ["b"], "label_token_ids": [5, 6]}),
    "responses": ("/v1/responses", {"input": "Once"}),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 4}),
}
BAD = [bad for bad in (*VALUES, *GUIDANCE) if bad.is_json and "finite" not in bad.words]
"""Numbers that are not finite are in NOT_JSON."""


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_fields_of_guidance(http: httpx.Client, model: str, bad: Bad) -> None:
    path, start = PATHS[bad.endpoint]
    answer = http.post(path, json={"model": model, **start, **bad.fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert bad.words in error["message"]
    if path != "/v1/messages":  # Anthropic's errors name no field
        assert error["param"] == bad.param


NO_REQUEST = [
    *NOT_JSON,
    (b'{"prompt": 7}', "prompt: must be a list or a string"),
    (b"{}", "prompt"),
]


@pytest.mark.parametrize(("raw", "words"), NO_REQUEST, ids=lambda value: str(value)[:30])
def test_bodies_that_are_no_requests(http: httpx.Client, raw: bytes, words: str) -> None:
    answer = http.post(COMPLETION, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_models(http: httpx.Client, stream: bool) -> None:
    answer = http.post(COMPLETION, json={"model": "nope", "prompt": "x", "stream": stream})
    assert answer.status_code == 404
    assert answer.json()["error"]["param"] == "model"


def test_the_openai_client_raises_its_own_error(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="must be a number"):
        client.completions.create(model=model, prompt="x", extra_body={"guidance_scale": "a"})


# --- logs -----------------------------------------------------------------------------------------


def test_no_log_has_a_text_of_a_client(
    server: ServeProcess | SimpleNamespace, http: httpx.Client, model: str
) -> None:
    """After all refusals of this module, and of models and texts that other routes refuse."""
    if not isinstance(server, ServeProcess):
        pytest.skip("the logs of a server elsewhere cannot be read")
    others: list[tuple[str, Json]] = [
        (CHAT, {"model": MARK, "messages": [USER]}),
        ("/v1/responses", {"model": MARK, "input": MARK}),
        ("/v1/responses", {"model": model, "input": [{"type": MARK}]}),
        ("/v1/messages", {"model": MARK, "max_tokens": 4, "messages": [USER]}),
        ("/v1/messages", {"model": model, "max_tokens": 4, "messages": [MARK]}),
        ("/tokenize", {"model": model, "messages": [MARK]}),
        ("/v1/embeddings", {"model": MARK, "input": MARK}),
        ("/generative_scoring", {"model": model, "query": MARK, "items": [MARK]}),
    ]
    for path, body in others:
        assert 400 <= http.post(path, json=body).status_code < 500, path
    logs = {**server.ray_logs(), "output": server.log.read_text(errors="replace").splitlines()}
    found = [
        f"{path}: {line[:300]}" for path, lines in logs.items() for line in lines if MARK in line
    ]
    assert found == []

"""Real answers of every route have the form that /openapi.json says."""

from __future__ import annotations

import json
import warnings
from typing import Any

import httpx
import pytest

from deployments.ingress.openapi.answer_schemas import OF_STREAMS
from tools.serving.process import Json

NOT_BY_MINILM = ("/classify", "/v1/classify", "/embed_sparse", "/predict")
"""Routes of tasks that MiniLM does not have. Their answers: tests/unit/test_answer_schemas.py."""

NOT_ALLOWED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Routes that need a key with a right, which this server has none of."""

STREAMS: dict[str, Json] = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 6},
    "/v1/responses": {"input": "Hi.", "max_output_tokens": 6},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 6},
}


class Document:
    """The server's OpenAPI document, and checks against it."""

    def __init__(self, document: Json) -> None:
        self.document = document

    @property
    def routes(self) -> list[tuple[str, str]]:
        paths = self.document["paths"]
        return [(method, path) for path, ways in paths.items() for method in ways]

    def operation(self, method: str, path: str) -> Json:
        found: Json = self.document["paths"][path][method]
        return found

    def content(self, method: str, path: str, status: str) -> Json:
        found: Json = self.operation(method, path)["responses"][status].get("content", {})
        return found

    def mistakes(self, schema: Json, value: Any) -> list[str]:
        """What is wrong about a value."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from jsonschema import Draft202012Validator

            whole = {**schema, "components": self.document["components"]}
            found = Draft202012Validator(whole).iter_errors(value)
            return [f"{error.json_path}: {error.message[:200]}" for error in found]

    def check(self, method: str, path: str, answer: httpx.Response) -> None:
        """Raise AssertionError if an answer is not of the form that the document has for it."""
        status = "200" if answer.status_code == 200 else "default"
        content = self.content(method, path, status)
        if not content:
            assert answer.content == b"", path
            return
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in content, (path, kind)
        value = answer.json() if kind == "application/json" else answer.text
        assert self.mistakes(content[kind]["schema"], value) == [], path


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> Document:
    return Document(http.get("/openapi.json").json())


def test_every_route_says_what_it_answers(document: Document) -> None:
    assert len(document.routes) >= 30
    for method, path in document.routes:
        content = document.content(method, path, "200")
        assert path == "/ping" or content, path
        for kind, made in content.items():
            assert made["schema"], (path, kind)
        error = document.content(method, path, "default")["application/json"]["schema"]
        assert error == {"$ref": "#/components/schemas/Error"}


def test_the_answers_of_every_route_have_that_form(
    http: httpx.Client, document: Document, model: str
) -> None:
    answered = 0
    for method, path in document.routes:
        body = document.operation(method, path).get("requestBody")
        example = body["content"]["application/json"]["example"] if body else None
        answer = http.request(method, path.replace("{model}", model), json=example)
        document.check(method, path, answer)
        if path in NOT_BY_MINILM:
            assert answer.status_code == 400
        elif path in NOT_ALLOWED:
            assert answer.status_code == 403
        else:
            assert answer.status_code == 200, (path, answer.text)
            answered += 1
    assert answered == len(document.routes) - len(NOT_BY_MINILM) - len(NOT_ALLOWED)


@pytest.mark.parametrize("path", STREAMS)
def test_the_events_of_streams_have_that_form(
    http: httpx.Client, document: Document, model: str, path: str
) -> None:
    body = {"model": model, **STREAMS[path], "stream": True, "guidance_scale": 2}
    if path in ("/v1/completions", "/v1/chat/completions"):
        body |= {"logprobs": 1 if "prompt" in body else True, "guidance_logprobs": True}
    schema = document.content("post", path, "200")["text/event-stream"]["schema"]
    events = [
        json.loads(line[6:])
        for line in http.post(path, json=body).text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]
    assert len(events) > 2
    for event in events:
        assert document.mistakes(schema, event) == [], event
    assert '"guided_tokens": 6' in json.dumps(events)


def test_log_probabilities_of_streams_are_in_the_schemas(
    http: httpx.Client, document: Document, model: str
) -> None:
    more = {"model": model, "guidance_scale": 2, "guidance_logprobs": True}
    asked: dict[str, Json] = {
        "/v1/completions": {"logprobs": 2},
        "/v1/chat/completions": {"logprobs": True, "top_logprobs": 2},
    }
    found: dict[str, Json] = {}
    for path, fields in asked.items():
        answer = http.post(path, json={**STREAMS[path], **more, **fields})
        document.check("post", path, answer)
        found[path] = answer.json()["choices"][0]["logprobs"]
    said = {
        "CompletionLogProbs": found["/v1/completions"],
        "ChatCompletionLogProbsContent": found["/v1/chat/completions"]["content"][0],
    }
    schemas = document.document["components"]["schemas"]
    for name, added in OF_STREAMS.items():
        assert added.keys() <= said[name].keys() <= schemas[name]["properties"].keys()


def test_vectors_in_base64_and_errors_have_that_form(
    http: httpx.Client, document: Document, model: str
) -> None:
    encoded = {"input": "The sea.", "model": "all-MiniLM-L6-v2", "encoding_format": "base64"}
    document.check("post", "/v1/embeddings", http.post("/v1/embeddings", json=encoded))
    tei = http.post("/rerank", json={"query": "a", "texts": ["a", "b"], "return_text": True})
    assert "text" in tei.json()[0]
    document.check("post", "/rerank", tei)
    for path, body, status in (
        ("/v1/completions", {"model": model, "prompt": "a", "guidence_scale": 2}, 400),
        ("/v1/chat/completions", {"model": "nobody", "messages": []}, 404),
        ("/v1/messages", {"model": model, "messages": []}, 400),
        ("/v1/embeddings", {}, 400),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code in (status, 400), answer.text
        document.check("post", path, answer)


def test_a_wrong_answer_is_found(document: Document) -> None:
    schema = document.content("post", "/v1/chat/completions", "200")["application/json"]["schema"]
    assert document.mistakes(schema, {"choices": "none"})
    schema = document.content("get", "/health", "200")["application/json"]["schema"]
    assert document.mistakes(schema, {"status": "live", "more": 1})

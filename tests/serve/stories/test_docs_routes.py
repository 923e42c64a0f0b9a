"""/openapi.json and /docs: schemas of every body, and examples that run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect

from tests.serve.browser import chromium
from tools.serving.process import Json

NOT_BY_MINILM = ("/classify", "/v1/classify", "/embed_sparse", "/predict")


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> Json:
    answer: Json = http.get("/openapi.json").json()
    return answer


def refs(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from refs(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from refs(inner)


def posts(document: Json) -> dict[str, Json]:
    return {path: ways["post"] for path, ways in document["paths"].items() if "post" in ways}


def test_every_reference_leads_to_a_schema(document: Json) -> None:
    schemas = document["components"]["schemas"]
    found = set(refs(document))
    assert "#/components/schemas/GuidanceReport" in found
    assert {ref.removeprefix("#/components/schemas/") for ref in found} <= set(schemas)


def test_every_body_has_a_schema_and_an_example(document: Json) -> None:
    for path, operation in posts(document).items():
        if path == "/ping":
            continue
        content = operation["requestBody"]["content"]["application/json"]
        assert content["schema"], path
        assert content["example"], path


def test_every_route_is_in_one_described_group(document: Json) -> None:
    described = {tag["name"]: tag["description"] for tag in document["tags"]}
    assert all(len(text) > 40 for text in described.values())
    used = [operation["tags"] for ways in document["paths"].values() for operation in ways.values()]
    assert all(len(tags) == 1 for tags in used)
    assert {tag for tags in used for tag in tags} == set(described)
    assert document["paths"]["/v1/messages/count_tokens"]["post"]["tags"] == ["Tokens and prompts"]
    assert document["paths"]["/v1/messages"]["post"]["tags"] == ["Generate"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
)
def test_guidance_fields_are_beside_vllms(document: Json, path: str) -> None:
    schema = posts(document)[path]["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rsplit("/", 1)[1]
    fields = document["components"]["schemas"][name]["properties"]
    assert {"guidance_scale", "negative_prompt", "timeout", "temperature"} <= set(fields)
    assert ("negative_messages" in fields) == (path != "/v1/completions")


def test_the_examples_run_and_are_guided(http: httpx.Client, document: Json) -> None:
    for path, operation in posts(document).items():
        if path == "/ping":
            continue
        example = operation["requestBody"]["content"]["application/json"]["example"]
        answer = http.post(path, json=example)
        if path.endswith("lora_adapter"):  # tests/serve/limited has a key that may
            assert answer.status_code == 403, path
            continue
        if path in NOT_BY_MINILM:
            assert answer.status_code == 400, path
            assert "cannot serve" in answer.text
            continue
        assert answer.status_code == 200, (path, answer.text)
        if "guidance_scale" in example:
            assert answer.json()["guidance"]["guided_tokens"] > 0


def test_the_page_needs_no_other_host(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.status_code == 200
    assert "https://" not in page.text
    for name, kind in (("swagger-ui-bundle.js", "javascript"), ("swagger-ui.css", "css")):
        assert f"docs/{name}" in page.text
        file = http.get(f"/docs/{name}")
        assert file.status_code == 200
        assert kind in file.headers["content-type"]
    assert http.get("/docs/..%2Fnothing").status_code == 404
    assert http.get("/docs/nothing.js").json()["error"]["type"] == "NotFoundError"


def test_a_request_can_be_tried_on_the_page(http: httpx.Client) -> None:
    """Its policy allows its own script and requests, and nothing else is blocked on it."""
    errors: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.set_default_timeout(120_000)  # drawing all schemas takes long on a busy machine
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.goto(str(http.base_url.join("/docs")))
        page.locator("[data-path='/v1/models']").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        status = page.locator(".live-responses-table .response-col_status").nth(1)
        expect(status).to_contain_text("200")
    assert errors == []


def test_small_routes(http: httpx.Client, model: str) -> None:
    assert http.get("/version").json()["version"].startswith("0.3")
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    assert http.get("/load").json() == {"server_load": 0}
    body = {"model": model, "prompt": "Once", "max_tokens": 2, "guidance_scale": 2}
    invoked = http.post("/invocations", json=body).json()
    assert invoked["guidance"]["guided_tokens"] == 2
    ranked = http.post("/invocations", json={"query": "a", "documents": ["a", "b"]})
    assert len(ranked.json()["results"]) == 2


def test_a_batch_answers_each_conversation(http: httpx.Client, model: str) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("Hello.", "A story.", "Bye.")]
    body = {"model": model, "messages": chats, "max_tokens": 8, "temperature": 0}
    batch = http.post("/v1/chat/completions/batch", json=body).json()
    alone = [
        http.post("/v1/chat/completions", json={**body, "messages": chat}).json() for chat in chats
    ]
    assert [choice["message"]["content"] for choice in batch["choices"]] == [
        one["choices"][0]["message"]["content"] for one in alone
    ]
    refused = http.post("/v1/chat/completions/batch", json={**body, "guidance_scale": 2})
    assert refused.status_code == 400
    assert "cannot be guided" in refused.text


def test_a_body_may_name_its_request(http: httpx.Client, model: str) -> None:
    body = {"model": model, "prompt": "Once", "max_tokens": 2, "request_id": "mine"}
    assert http.post("/v1/completions", json=body).json()["id"] == "cmpl-mine"
    del body["request_id"]
    answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "theirs"})
    assert answer.json()["id"] == "cmpl-theirs"

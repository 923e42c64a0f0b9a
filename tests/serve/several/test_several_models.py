"""Two generators and an encoder in one application, one of them asleep at first.

The tests run in the order of the file: the second generator sleeps, is woken, works, and sleeps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfg_core.reference import guided_generate
from tests.serve.several.conftest import CONTEXTS, ENCODER, STORIES, TINY
from tools.serving.process import REPOSITORY, Json, ServeProcess

NUM_TOKENS, CLIENTS, REQUESTS_OF_EACH = 16, 8, 6
PROMPTS = ["Once upon a time there was a", "The dog", "A king and his", "In the sea lived a"]
NEGATIVE = "A story about the sea."
SCALES = [None, 1.5, 3.0]
"""None: without guidance."""
SLEEPS_AFTER_S = 90.0

Case = tuple[str, str, float | None]
"""Model, prompt, scale."""
CASES: list[Case] = [(m, p, s) for p in PROMPTS for s in SCALES for m in (STORIES, TINY)]


def metrics(http: httpx.Client, name: str) -> dict[str, float]:
    """The values of one metric by their label `model`."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {sample.labels.get("model", ""): sample.value for sample in samples}


# --- while the second one sleeps ------------------------------------------------------------------


def test_it_is_ready_and_lists_all_models_without_waking_one(http: httpx.Client) -> None:
    ready = http.get("/ready").json()
    assert ready["engines"][TINY] == {"replicas": 0}
    assert ready["engines"][STORIES]["total_blocks"] > 0
    assert list(ready["encoders"]) == [ENCODER]
    listed = http.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == [STORIES, TINY, ENCODER]
    assert http.get(f"/v1/models/{TINY}").json()["object"] == "model"
    assert metrics(http, "cfg_serve_replicas") == {STORIES: 1}
    assert "GuidanceReport" in http.get("/openapi.json").json()["components"]["schemas"]
    assert http.get("/ready").json()["engines"][TINY] == {"replicas": 0}


# the ingress refuses them all: a request that it sends on would wake the second model
REFUSED: list[tuple[str, Json, int, str]] = [
    # path, body, status, words
    ("/v1/completions", {"model": "gpt-4", "prompt": "x"}, 404, "The model `gpt-4` does not exist"),
    ("/v1/completions", {"model": 7, "prompt": "x"}, 400, "model is a number: send the name"),
    ("/v1/completions", {"prompt": "x"}, 400, "model is missing: name one of stories, tiny."),
    (
        "/v1/completions",
        {"model": ENCODER, "prompt": "x"},
        400,
        f"{ENCODER} is an encoder: use it with",
    ),
    ("/v1/chat/completions", {"model": "x", "messages": []}, 404, "use stories, tiny, all-MiniLM"),
    ("/tokenize", {"model": "gpt-4", "prompt": "x"}, 404, "The model `gpt-4` does not exist"),
    ("/tokenize", {"prompt": "x"}, 400, "model is missing: name one of stories, tiny."),
    ("/detokenize", {"model": "gpt-4", "tokens": [5]}, 404, "The model `gpt-4` does not exist"),
    ("/v1/messages/count_tokens", {"model": "y", "messages": []}, 404, "The model `y` does not"),
    ("/v1/completions/render", {"model": "y", "prompt": "x"}, 404, "The model `y` does not exist"),
    (
        "/v1/embeddings",
        {"model": TINY, "input": "x"},
        400,
        f"{TINY} generates text: use it with",
    ),
    (
        "/v1/completions",
        {"model": TINY, "prompt": [5] * (CONTEXTS[TINY] + 1)},
        400,
        "this model's maximum context length is 256",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED, ids=str)
def test_requests_that_mean_no_generator_are_refused(
    http: httpx.Client, path: str, body: Json, status: int, words: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["code"] == status
    if status == 404:
        assert (error["type"], error["param"]) == ("NotFoundError", "model")


def test_an_openai_client_learns_that_there_is_no_such_model(server: ServeProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
        pytest.raises(openai.NotFoundError, match="use stories, tiny, all-MiniLM-L6-v2"),
    ):
        client.completions.create(model="gpt-4", prompt="x")


# --- both -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> Iterator[dict[Case, list[int]]]:
    """What the reference says: tokens up to the first tie, which is late."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = {}
    for name, folder in ((STORIES, REPOSITORY / "models" / "stories"), (TINY, tiny_folder)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(folder)
        for case in (case for case in CASES if case[0] == name):
            _, prompt, scale = case
            made = guided_generate(
                model,
                ids(prompt).input_ids,
                ids(NEGATIVE).input_ids,
                scale=1.0 if scale is None else scale,
                max_new_tokens=NUM_TOKENS,
            )
            same = next((i for i, gap in enumerate(made.gaps) if gap < 1e-4), NUM_TOKENS)
            assert same > NUM_TOKENS // 2
            expected[case] = made.token_ids[:same]
    yield expected
    torch.set_num_threads(threads)


def tokens_of(http: httpx.Client, case: Case, stream: bool) -> list[int]:
    """The tokens that the server generates, of a stream or of a whole answer."""
    model, prompt, scale = case
    body: Json = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True, "stream": stream}
    body |= {} if scale is None else {"guidance_scale": scale, "negative_prompt": NEGATIVE}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        whole = answer.json()
        assert whole["model"] == model
        assert whole.get("guidance", {}).get("guided_tokens", 0) == (NUM_TOKENS if scale else 0)
        ids: list[int] = whole["choices"][0]["token_ids"]
        return ids
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert {chunk["model"] for chunk in chunks} == {model}
    assert ("guidance" in chunks[-1]) == (scale is not None)
    return [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in choice.get("token_ids") or ()
    ]


def check(http: httpx.Client, case: Case, expected: list[int], stream: bool) -> None:
    assert tokens_of(http, case, stream)[: len(expected)] == expected, (case, stream)


def test_a_request_wakes_the_second_one(http: httpx.Client, answers: dict[Case, list[int]]) -> None:
    case: Case = (TINY, PROMPTS[0], 1.5)
    assert http.get("/ready").json()["engines"][TINY] == {"replicas": 0}
    with ThreadPoolExecutor(3) as pool:  # all of them wait, and others are served meanwhile
        waiting = [
            pool.submit(check, http, case, answers[case], stream) for stream in (True, False)
        ]
        began = time.monotonic()
        other: Case = (STORIES, PROMPTS[0], 1.5)
        check(http, other, answers[other], stream=False)
        assert time.monotonic() - began < 10
        assert not any(request.done() for request in waiting)
        for request in waiting:
            request.result()
    assert http.get("/ready").json()["engines"][TINY]["total_blocks"] > 0
    assert metrics(http, "cfg_serve_replicas") == {STORIES: 1, TINY: 1}


GUIDED = "cfg_serve_guided_tokens_total"


def cases_of(model: str, client: int) -> list[Case]:
    """What one of the clients of a model asks, in this order."""
    mine = [case for case in CASES if case[0] == model]
    return [mine[(client + turn) % len(mine)] for turn in range(REQUESTS_OF_EACH)]


def num_guided(model: str) -> int:
    return sum(scale is not None for n in range(CLIENTS) for _, _, scale in cases_of(model, n))


def test_known_answers_of_both_under_load(
    http: httpx.Client, server: ServeProcess, answers: dict[Case, list[int]]
) -> None:
    """Eight clients of each model at once, plain and guided, streamed and not; and the encoder."""
    time.sleep(2)  # until the engines have reported what they did before
    before = metrics(http, GUIDED)

    def client(model: str, number: int) -> int:
        with httpx.Client(base_url=server.url, timeout=120) as own:
            for turn, case in enumerate(cases_of(model, number)):
                check(own, case, answers[case], stream=(number + turn // 2) % 2 == 0)
        return REQUESTS_OF_EACH

    with ThreadPoolExecutor(2 * CLIENTS + 1) as pool:
        running = [pool.submit(client, m, n) for n in range(CLIENTS) for m in (STORIES, TINY)]
        vector = pool.submit(
            lambda: http.post("/v1/embeddings", json={"model": ENCODER, "input": "A cat."}).json()
        )
        assert sum(one.result() for one in running) == 2 * CLIENTS * REQUESTS_OF_EACH
        assert len(vector.result()["data"][0]["embedding"]) == 384
    time.sleep(2)
    after = metrics(http, GUIDED)
    guided = {model: after[model] - before[model] for model in after}
    assert guided == {model: NUM_TOKENS * num_guided(model) for model in (STORIES, TINY)}
    assert set(metrics(http, "cfg_serve_kv_blocks")) == {STORIES, TINY}


def test_each_endpoint_asks_the_model_that_is_named(http: httpx.Client) -> None:
    text = "The dog"
    ids = {
        model: http.post("/tokenize", json={"model": model, "prompt": text}).json()["tokens"]
        for model in (STORIES, TINY, ENCODER)
    }
    assert ids[TINY] == [0, *ids[TINY][1:]]
    assert len(ids[TINY]) == 1 + len(text)
    assert len({tuple(tokens) for tokens in ids.values()}) == 3
    for model in (STORIES, TINY):
        body: Json = {"model": model, "tokens": ids[model]}
        assert text in http.post("/detokenize", json=body).json()["prompt"]
        messages = [{"role": "user", "content": text}]
        chat: Json = {"model": model, "messages": messages, "max_tokens": 4}
        counted = http.post("/v1/messages/count_tokens", json=chat).json()["input_tokens"]
        shown = http.post("/tokenize", json={"model": model, "messages": messages}).json()
        assert counted == shown["count"]
        rendered = http.post("/v1/completions/render", json={"model": model, "prompt": text})
        assert rendered.json()[0]["token_ids"] == ids[model]
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = http.post(path, json={**chat, "guidance_scale": 2.0})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == model
            assert answer.json()["guidance"]["streams"] == 2
        responses = http.post(
            "/v1/responses", json={"model": model, "input": text, "max_output_tokens": 4}
        )
        assert responses.json()["model"] == model
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert {name: cards[name]["max_model_len"] for name in CONTEXTS} == CONTEXTS


def test_limits_are_those_of_the_model(http: httpx.Client) -> None:
    streams = [{"prompt": str(n), "weight": 0.1} for n in range(3)]
    body: Json = {"prompt": "x", "max_tokens": 1, "guidance_streams": streams}
    assert http.post("/v1/completions", json={**body, "model": STORIES}).status_code == 200
    refused = http.post("/v1/completions", json={**body, "model": TINY})
    assert refused.status_code == 400
    assert "guidance_streams" in refused.text


# --- asleep again ---------------------------------------------------------------------------------


def test_it_falls_asleep_again_and_wakes(
    http: httpx.Client, answers: dict[Case, list[int]]
) -> None:
    deadline = time.monotonic() + SLEEPS_AFTER_S
    while http.get("/ready").json()["engines"][TINY] != {"replicas": 0}:
        assert time.monotonic() < deadline, http.get("/ready").text
        time.sleep(1)
    assert metrics(http, "cfg_serve_replicas") == {STORIES: 1}
    case: Case = (TINY, PROMPTS[1], None)
    check(http, case, answers[case], stream=True)

"""The section `frontend` of the YAML file, which holds options of vLLM's own API server.

The tests use LoRA adapters and the times of each request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.adapters import make_adapter
from tests.serve.limited.server import KEY, bearer
from tools.serving.process import REPOSITORY, Json, ServeProcess

pytestmark = pytest.mark.slow

GUIDANCE: Json = {"guidance_scale": 2.0, "negative_prompt": "A story about the sea."}
LIMIT_S = 60


def complete(limited_server: ServeProcess, model: str, **fields: Any) -> Json:
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": 30,
        "temperature": 0,
        **fields,
    }
    answer = httpx.post(
        f"{limited_server.url}/v1/completions", json=body, headers=bearer(KEY), timeout=LIMIT_S
    )
    assert answer.status_code == 200, answer.text
    completion: Json = answer.json()
    return completion


def test_an_adapter_is_a_model_and_may_be_guided(limited_server: ServeProcess) -> None:
    models = httpx.get(
        f"{limited_server.url}/v1/models", headers=bearer(KEY), timeout=LIMIT_S
    ).json()["data"]
    assert [model["id"] for model in models] == ["stories", "odd-stories", "all-MiniLM-L6-v2"]
    guidances: tuple[Json, ...] = ({}, GUIDANCE)
    asked = [(model, fields) for model in ("stories", "odd-stories") for fields in guidances]
    answers = [complete(limited_server, model, **fields) for model, fields in asked]
    assert [answer["model"] for answer in answers] == [model for model, _ in asked]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 4
    assert [answer.get("guidance", {}).get("guided_tokens") for answer in answers] == [
        None if not fields else answer["usage"]["completion_tokens"]
        for (_, fields), answer in zip(asked, answers, strict=True)
    ]


def test_each_stream_may_have_an_adapter_of_its_own(limited_server: ServeProcess) -> None:
    """A follower of weight 1 alone decides: its adapter's text, whatever the leader's is."""
    base, odd = (complete(limited_server, m) for m in ("stories", "odd-stories"))

    def mixed(model: str, **follower: Any) -> Json:
        return complete(limited_server, model, guidance_streams=[{"weight": 1, **follower}])

    for answer, want in (
        (mixed("stories", lora="odd-stories"), odd),
        (mixed("odd-stories", lora=False), base),
        (mixed("odd-stories", lora="stories"), base),
    ):
        assert answer["choices"][0]["text"] == want["choices"][0]["text"]
        assert answer["guidance"]["weights"] == [0.0, 1.0]
    both = complete(
        limited_server,
        "stories",
        guidance_streams=[{"weight": 0.5, "prompt": "Once", "lora": "odd-stories"}],
    )
    assert both["guidance"]["negative_prompt_tokens"] == 2


def test_an_engine_with_adapters_does_not_score(limited_server: ServeProcess) -> None:
    body = {"model": "stories", "prompt": "Once upon", "echo": True, "logprobs": 0}
    answer = httpx.post(
        f"{limited_server.url}/v1/completions",
        json={**body, "guidance_scale": 2, "guidance_score_tokens": 1},
        headers=bearer(KEY),
        timeout=LIMIT_S,
    )
    assert answer.status_code == 400
    assert "does not work on an engine with adapters" in answer.json()["error"]["message"]


def test_an_adapter_is_loaded_and_unloaded_by_a_key_that_may(
    limited_server: ServeProcess, tmp_path: Path
) -> None:
    adapter = make_adapter(REPOSITORY / "models" / "stories", tmp_path / "late")

    def change(verb: str, body: Json, key: str = "op") -> httpx.Response:
        url = f"{limited_server.url}/v1/{verb}_lora_adapter"
        return httpx.post(url, json=body, headers=bearer(key), timeout=LIMIT_S)

    body: Json = {"lora_name": "late-stories", "lora_path": str(adapter)}
    assert change("load", body, KEY).status_code == 403
    assert change("load", body).status_code == 200
    assert "already been loaded" in change("load", body).text
    first, late = (complete(limited_server, m, **GUIDANCE) for m in ("odd-stories", "late-stories"))
    assert late["model"] == "late-stories"
    assert late["choices"][0]["text"] == first["choices"][0]["text"]  # of equal weights
    assert late["guidance"] == first["guidance"]
    assert change("unload", {"lora_name": "late-stories"}).status_code == 200
    assert change("unload", {"lora_name": "late-stories"}).status_code == 404
    for refused in (
        {"lora_name": "stories", "lora_path": str(adapter)},
        {"lora_name": "nowhere", "lora_path": str(tmp_path / "nowhere")},
        {"lora_name": "nameless"},
    ):
        assert change("load", refused).status_code in (400, 404), refused
    assert complete(limited_server, "stories")["model"] == "stories"


def test_an_unknown_adapter_is_an_unknown_model(limited_server: ServeProcess) -> None:
    body = {"model": "even-stories", "prompt": "x"}
    assert (
        httpx.post(
            f"{limited_server.url}/v1/completions", json=body, headers=bearer(KEY), timeout=LIMIT_S
        ).status_code
        == 404
    )


def test_an_adapter_encodes_nothing(limited_server: ServeProcess) -> None:
    """An adapter's name is known, so the error says that it generates text."""
    body = {"model": "odd-stories", "input": "x"}
    answer = httpx.post(
        f"{limited_server.url}/v1/embeddings", json=body, headers=bearer(KEY), timeout=LIMIT_S
    )
    assert answer.status_code == 400
    assert "odd-stories generates text" in answer.json()["error"]["message"]


def test_times_of_each_request(limited_server: ServeProcess) -> None:
    times = complete(limited_server, "stories", **GUIDANCE)["metrics"]
    assert times["time_to_first_token_ms"] > 0
    assert times["generation_time_ms"] > 0


def test_a_stream_ends_with_usage_guidance_and_times(limited_server: ServeProcess) -> None:
    body = {"model": "stories", "prompt": "Once", "max_tokens": 5, "stream": True, **GUIDANCE}
    answer = httpx.post(
        f"{limited_server.url}/v1/completions", json=body, headers=bearer(KEY), timeout=LIMIT_S
    )
    *_, last, done = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    assert done == "[DONE]"
    chunk = json.loads(last)
    assert chunk["usage"]["completion_tokens"] == chunk["guidance"]["guided_tokens"] == 5
    assert chunk["metrics"]["generation_time_ms"] > 0

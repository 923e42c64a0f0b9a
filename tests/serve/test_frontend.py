"""The section `frontend` of the YAML file, which holds options of vLLM's own API server.

The tests use LoRA adapters and the times of each request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_process import REPOSITORY, Json, ServeProcess, shipped_config

from tests.engine.adapters import make_adapter

pytestmark = pytest.mark.slow

GUIDANCE: Json = {"guidance_scale": 2.0, "negative_prompt": "A story about the sea."}
LIMIT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    adapter = make_adapter(
        REPOSITORY / "models" / "stories", tmp_path_factory.mktemp("lora") / "adapter"
    )
    config = shipped_config()
    application = config["applications"][0]
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Embedder"]
    args = application["args"]
    del args["encoders"]
    args["engine"] |= {"enable_lora": True, "max_lora_rank": 8}
    args["frontend"] = {
        "lora_modules": [{"name": "odd-stories", "path": str(adapter)}],
        "enable_per_request_metrics": True,
        "enable_force_include_usage": True,
    }
    with ServeProcess(config) as process:
        yield process


def complete(server: ServeProcess, model: str, **fields: Any) -> Json:
    body = {
        "model": model,
        "prompt": "Once upon a time",
        "max_tokens": 30,
        "temperature": 0,
        **fields,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    assert answer.status_code == 200, answer.text
    completion: Json = answer.json()
    return completion


def test_an_adapter_is_a_model_and_may_be_guided(server: ServeProcess) -> None:
    models = httpx.get(f"{server.url}/v1/models", timeout=LIMIT_S).json()["data"]
    assert [model["id"] for model in models] == ["stories", "odd-stories"]
    guidances: tuple[Json, ...] = ({}, GUIDANCE)
    asked = [(model, fields) for model in ("stories", "odd-stories") for fields in guidances]
    answers = [complete(server, model, **fields) for model, fields in asked]
    assert [answer["model"] for answer in answers] == [model for model, _ in asked]
    assert len({answer["choices"][0]["text"] for answer in answers}) == 4
    assert [answer.get("guidance", {}).get("guided_tokens") for answer in answers] == [
        None if not fields else answer["usage"]["completion_tokens"]
        for (_, fields), answer in zip(asked, answers, strict=True)
    ]


def test_an_unknown_adapter_is_an_unknown_model(server: ServeProcess) -> None:
    body = {"model": "even-stories", "prompt": "x"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 404


def test_an_adapter_encodes_nothing(server: ServeProcess) -> None:
    """An adapter's name is known, so the error says that it generates text."""
    body = {"model": "odd-stories", "input": "x"}
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=LIMIT_S)
    assert answer.status_code == 400
    assert "odd-stories generates text" in answer.json()["error"]["message"]


def test_times_of_each_request(server: ServeProcess) -> None:
    times = complete(server, "stories", **GUIDANCE)["metrics"]
    assert times["time_to_first_token_ms"] > 0
    assert times["generation_time_ms"] > 0


def test_a_stream_ends_with_usage_guidance_and_times(server: ServeProcess) -> None:
    body = {"model": "stories", "prompt": "Once", "max_tokens": 5, "stream": True, **GUIDANCE}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_S)
    *_, last, done = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    assert done == "[DONE]"
    chunk = json.loads(last)
    assert chunk["usage"]["completion_tokens"] == chunk["guidance"]["guided_tokens"] == 5
    assert chunk["metrics"]["generation_time_ms"] > 0

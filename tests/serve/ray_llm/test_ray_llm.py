"""Ray Serve LLM with `guided`: two models, an adapter, Ray's prefix-aware router, autoscaling.

Our own replica is asked first, then it is stopped, and Ray's server must answer the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cfg_core.reference import guided_generate
from tests.engine.adapters import make_adapter
from tests.engine.engines import of_these_tests
from tests.engine.in_process_server import Server
from tests.serve.ray_llm.bodies import (
    CHATS,
    COMPLETIONS,
    GUIDANCE,
    OPTIONS,
    PROMPTS,
    SEA,
    answer,
    in_xargs,
    post,
    streamed,
    told,
)
from tests.serve.ray_llm.process import ENGINE, RayLlmProcess, llm_config
from tools.serving.process import REPOSITORY, Json

pytestmark = [pytest.mark.slow, pytest.mark.survey, pytest.mark.timeout(900)]

STORIES, DRAFT = (REPOSITORY / "models" / name for name in ("stories", "stories-draft"))
ADAPTER = "stories:one"
ADAPTED: Json = {**COMPLETIONS[0], "model": ADAPTER}
ONE_PROCESS: Json = {"distributed_executor_backend": "uni"}  # no worker beside the engine's process
WITH_LORA: Json = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
ROUTER = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"
Answers = dict[str, list[tuple[str, Any]]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(STORIES, folder / "one")
    return folder


@pytest.fixture(scope="module")
def ours(adapters: Path) -> Answers:
    """What our own replica answers; tests/serve/stories shows that HTTP changes nothing of it."""
    lora = {"lora_modules": [{"name": ADAPTER, "path": str(adapters / "one")}]}
    asked = {"completions": COMPLETIONS, "chats": CHATS, "adapted": [ADAPTED]}
    with of_these_tests(), closing(Server(STORIES, lora, **ENGINE, **WITH_LORA)) as replica:
        return {
            name: [told(replica.answer(body)) for body in bodies] for name, bodies in asked.items()
        }


@pytest.fixture(scope="module")
def server(ours: Answers, adapters: Path) -> Iterator[RayLlmProcess]:
    """Ray's, after our replica has stopped."""
    scaled = {
        "num_replicas": "auto",
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 64},
        "request_router_config": {"request_router_class": ROUTER},
    }
    stories = llm_config("stories", str(STORIES), scaled, **WITH_LORA, **ONE_PROCESS)
    stories["lora_config"] = {"dynamic_lora_loading_path": f"s3://{adapters}"}
    stories["server_cls"] = "tests.serve.ray_llm.adapters.LocalAdapters"
    with RayLlmProcess(stories, llm_config("draft", str(DRAFT), **ONE_PROCESS)) as process:
        yield process


def test_50_completions_are_those_of_our_own_server(server: RayLlmProcess, ours: Answers) -> None:
    assert len(COMPLETIONS) == 50
    found = [answer(server.url, body) for body in COMPLETIONS]
    assert found == ours["completions"]
    assert len({text for text, _ in found}) > 40
    assert all(guidance["guided_tokens"] > 0 for _, guidance in found)


def test_50_streams_are_those_of_our_own_server(server: RayLlmProcess, ours: Answers) -> None:
    assert [streamed(server.url, body) for body in COMPLETIONS] == ours["completions"]


def test_guidance_in_vllm_xargs(server: RayLlmProcess, ours: Answers) -> None:
    bodies = [in_xargs(body) for body in COMPLETIONS[: 2 * len(GUIDANCE)]]
    wanted = ours["completions"][: len(bodies)]
    assert [answer(server.url, body) for body in bodies] == wanted
    assert [streamed(server.url, body) for body in bodies] == wanted


def test_chats(server: RayLlmProcess, ours: Answers) -> None:
    assert [answer(server.url, body) for body in CHATS] == ours["chats"]
    assert [streamed(server.url, body) for body in CHATS] == ours["chats"]


def test_an_adapter(server: RayLlmProcess, ours: Answers) -> None:
    assert [answer(server.url, ADAPTED)] == ours["adapted"]
    assert ours["adapted"][0][0] != ours["completions"][0][0]


def test_the_second_model_is_guided(server: RayLlmProcess) -> None:
    """Against two forwards of transformers."""
    model = AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(DRAFT)
    negative = tokenizer.encode(SEA)
    for prompt in PROMPTS[:3]:
        body = {**OPTIONS, "model": "draft", "prompt": prompt, "ignore_eos": True}
        ids = tokenizer.encode(prompt)
        want = guided_generate(model, ids, negative, scale=3.0, max_new_tokens=24)
        text, guidance = answer(server.url, {**body, **GUIDANCE[0]})
        assert min(want.gaps) > 1e-4
        assert text == tokenizer.decode(want.token_ids)
        assert guidance["guided_tokens"] == 24
        assert answer(server.url, body) != (text, None)


def test_a_plain_request_has_no_guidance_object(server: RayLlmProcess) -> None:
    text, guidance = answer(server.url, {**OPTIONS, "prompt": PROMPTS[0]})
    assert text
    assert guidance is None
    body = {**OPTIONS, "prompt": PROMPTS[0], "guidance_scale": 1, "negative_prompt": ""}
    same, guidance = answer(server.url, body)
    assert same == text
    assert guidance["guided_tokens"] == 0
    assert "had no effect" in guidance["note"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"guidance_scal": 3.0}, "Did you mean guidance_scale?"),
        ({"guidence_scale": 3.0}, "Did you mean guidance_scale?"),
        ({"vllm_xargs": {"guidance_scal": 3.0}}, "Did you mean guidance_scale?"),
        ({"vllm_xargs": {"guidance_scale": 3.0}, "guidance_scale": 3.0}, "inside vllm_xargs"),
        ({"extra_body": {"guidance_scale": 3.0}}, "move it to the top level"),
        ({"guidance_scale": "much"}, "must be a number"),
        ({"guidance_scale": 2.0, "negative_prompt_token_ids": []}, "is empty"),
        ({"guidance_scale": 2.0, "negative_prompt": SEA * 300}, "negative_prompt cannot be used"),
        ({"guidance_scale": 2.0, "use_beam_search": True, "n": 2}, "Beam search"),
        ({"cfg_weight": 2.0}, "ambiguous"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_wrong_field_is_refused(
    server: RayLlmProcess, fields: Json, sentence: str, stream: bool
) -> None:
    body = {**OPTIONS, "prompt": PROMPTS[0], "stream": stream, **fields}
    found = post(server.url, body)
    assert found.status_code == 400, found.text
    assert sentence in found.json()["error"]["message"]


def test_a_wrong_field_in_a_chat_is_refused(server: RayLlmProcess) -> None:
    body = {name: value for name, value in CHATS[1].items() if name != "negative_messages"}
    found = post(server.url, {**body, "negative_message": []})
    assert found.status_code == 400, found.text
    assert "Did you mean negative_messages?" in found.json()["error"]["message"]


def test_an_unmodified_openai_client(server: RayLlmProcess, ours: Answers) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
    made = client.completions.create(
        model="stories", prompt=PROMPTS[0], max_tokens=24, temperature=0, extra_body=GUIDANCE[0]
    )
    assert (made.choices[0].text, made.guidance) == ours["completions"][0]  # type: ignore[attr-defined]


def test_a_client_that_leaves_ends_its_group(server: RayLlmProcess, ours: Answers) -> None:
    body = {**COMPLETIONS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}
    for _ in range(8):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
            next(stream.iter_text())
    assert answer(server.url, COMPLETIONS[0]) == ours["completions"][0]

"""Two tensor-parallel workers as Ray actors in the replica's placement group, on CPUs.

vLLM's CPU platform refuses Ray. So a platform plugin (tests/support/ray_cpu) reports its device as
Ray's "GPU", and Ray is told that this machine has two GPUs. Everything else is as in
configs/llama-8b-tp2.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from cfg_core.reference import CausalLM, Generation, guided_generate, plain_generate
from tests.support.quick_starts import python_path
from tools.serving.process import REPOSITORY, Json, ServeProcess, grammars_later, shipped_config

pytestmark = pytest.mark.slow

PLATFORM = REPOSITORY / "tests" / "support" / "ray_cpu"
PROMPT, NEGATIVE = "Once upon a time", "A story about the sea."
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    config, big = shipped_config(), shipped_config("llama-8b-tp2")
    application = config["applications"][0]
    del application["args"]["encoders"]
    application["deployments"] = [d for d in application["deployments"] if d["name"] != "Embedder"]
    engine = application["args"]["engine"]
    del engine["distributed_executor_backend"]
    engine["tensor_parallel_size"] = 2
    replica, real = (named(c, "ModelReplica") for c in (config, big))
    replica |= {key: real[key] for key in ("placement_group_bundles", "placement_group_strategy")}
    del replica["ray_actor_options"]["runtime_env"]["env_vars"]["VLLM_ENABLE_V1_MULTIPROCESSING"]
    resources = json.dumps({"CPU": 4, "GPU": 2})
    env = {"PYTHONPATH": python_path(PLATFORM), "RAY_OVERRIDE_RESOURCES": resources}
    with ServeProcess(grammars_later(config), env) as process:
        yield process


def named(config: Json, name: str) -> Json:
    deployments: list[Json] = config["applications"][0]["deployments"]
    return next(d for d in deployments if d["name"] == name)


def ids_of(server: ServeProcess, text: str) -> list[int]:
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": text}, timeout=60)
    tokens: list[int] = answer.json()["tokens"]
    return tokens


def test_workers_are_ray_actors_and_give_the_tokens_of_the_reference(
    server: ServeProcess, oracle: CausalLM
) -> None:
    commands = [" ".join(process.cmdline()) for process in server.processes()]
    assert sum("RayWorkerProc" in command for command in commands) == 2, commands
    prompt, negative = ids_of(server, PROMPT), ids_of(server, NEGATIVE)
    cases: list[tuple[Json, Generation]] = [
        ({}, plain_generate(oracle, prompt, max_new_tokens=NUM_TOKENS)),
        (
            {"guidance_scale": 3.0, "negative_prompt": NEGATIVE},
            guided_generate(oracle, prompt, negative, scale=3.0, max_new_tokens=NUM_TOKENS),
        ),
        (
            {"guidance_scale": 0.5},
            guided_generate(oracle, prompt, None, scale=0.5, max_new_tokens=NUM_TOKENS),
        ),
    ]
    body: Json = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    for guidance, want in cases:
        answer = httpx.post(f"{server.url}/v1/completions", json=body | guidance, timeout=60)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        # After a tie, the tokens may differ.
        same = next((i for i, gap in enumerate(want.gaps) if gap < 1e-4), NUM_TOKENS)
        assert found["choices"][0]["token_ids"][:same] == want.token_ids[:same]
        assert same > NUM_TOKENS // 2
        if guidance:
            assert found["guidance"]["guided_tokens"] == NUM_TOKENS

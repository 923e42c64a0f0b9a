"""Two tensor-parallel workers as Ray actors in the replica's placement group, on CPUs.

vLLM's CPU platform refuses Ray. So a platform plugin (tests/support/ray_cpu) reports its device as
Ray's "GPU", and Ray is told that this machine has two GPUs. Everything else is as in
configs/llama-8b-tp2.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tools.serving.process import Json, ServeProcess, shipped_config

pytestmark = pytest.mark.slow

PLATFORM = Path(__file__).parent.parent / "support" / "ray_cpu"


@pytest.fixture(scope="module")
def tp_server() -> Iterator[ServeProcess]:
    config, big = shipped_config(), shipped_config("llama-8b-tp2")
    application = config["applications"][0]
    engine = application["args"]["engine"]
    del engine["distributed_executor_backend"]
    engine["tensor_parallel_size"] = 2
    replica, real = (named(c, "ModelReplica") for c in (config, big))
    replica |= {key: real[key] for key in ("placement_group_bundles", "placement_group_strategy")}
    del replica["ray_actor_options"]["runtime_env"]["env_vars"]["VLLM_ENABLE_V1_MULTIPROCESSING"]
    resources = json.dumps({"CPU": 4, "GPU": 2})
    with ServeProcess(
        config, {"PYTHONPATH": str(PLATFORM), "RAY_OVERRIDE_RESOURCES": resources}
    ) as process:
        yield process


def named(config: Json, name: str) -> Json:
    deployments: list[Json] = config["applications"][0]["deployments"]
    return next(d for d in deployments if d["name"] == name)


def test_workers_are_ray_actors_and_guidance_is_the_same(
    tp_server: ServeProcess, server: ServeProcess
) -> None:
    """Two workers give the same greedy tokens as one."""
    commands = [" ".join(process.cmdline()) for process in tp_server.processes()]
    assert sum("RayWorkerProc" in command for command in commands) == 2, commands
    body: Json = {
        "prompt": "Once upon a time",
        "max_tokens": 24,
        "temperature": 0,
        "return_token_ids": True,
    }
    for guidance in (
        {},
        {"guidance_scale": 3.0, "negative_prompt": "A story about the sea."},
        {"guidance_scale": 0.5},
    ):
        one, two = (
            httpx.post(f"{s.url}/v1/completions", json=body | guidance, timeout=60)
            for s in (server, tp_server)
        )
        assert one.status_code == two.status_code == 200, two.text
        assert one.json()["choices"][0]["token_ids"] == two.json()["choices"][0]["token_ids"]
        assert one.json().get("guidance") == two.json().get("guidance")

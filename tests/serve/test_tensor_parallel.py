"""Two tensor-parallel workers as Ray actors in the replica's placement group, on CPUs.

vLLM's CPU platform refuses Ray, so a platform plugin (tests/support/ray_cpu) says that its device
is Ray's "GPU"; Ray is told that this machine has two. Everything else is what
configs/llama-8b-tp2.yaml does on real ones.
"""

import json
from pathlib import Path

import httpx
import pytest
from serve_process import ServeProcess, shipped_config

pytestmark = pytest.mark.slow

PLATFORM = Path(__file__).parent.parent / "support" / "ray_cpu"


@pytest.fixture(scope="module")
def tp_server():
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


def named(config, name):
    return next(d for d in config["applications"][0]["deployments"] if d["name"] == name)


def test_workers_are_ray_actors_and_guidance_is_the_same(tp_server, server):
    """The greedy tokens of two workers are those of one."""
    commands = [" ".join(process.cmdline()) for process in tp_server.processes()]
    assert sum("RayWorkerProc" in command for command in commands) == 2, commands
    body = {
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

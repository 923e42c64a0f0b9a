"""What a configuration asks of the machine, before Ray starts."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from cfg_serve.errors import CommandError
from cfg_serve.machine import GIB, Machine
from cfg_serve.start import preflight
from cfg_serve.start.examples import model_names

CPU = Machine(device="cpu", cores=2, gpus=0, memory_bytes=15 * GIB, total_bytes=21 * GIB)
GPU = Machine(device="cuda", cores=8, gpus=2, memory_bytes=90 * GIB, total_bytes=99 * GIB)
KV = {"kv_cache_memory_bytes": 2**28}


def config(args: dict[str, Any], *parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "applications": [
            {
                "import_path": "deployments.app:build",
                "args": {"model": "org/m", "engine": KV, **args},
                "deployments": list(parts),
            }
        ]
    }


@pytest.fixture(autouse=True)
def _cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ray_cpus", lambda: 2)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def replica(**options: Any) -> dict[str, Any]:
    return {"name": "ModelReplica", **options}


@pytest.mark.parametrize(
    ("given", "machine", "sentence"),
    [
        (config({}), CPU, None),
        (config({}, replica(num_replicas=1)), CPU, None),
        (config({}, replica(num_replicas=2, ray_actor_options={"num_cpus": 0.9})), CPU, None),
        (
            config({}, replica(num_replicas=2)),
            CPU,
            "the replicas ask for 2.1 CPUs, and there are 2: CfgRouter 0.1 (1 x 0.1), ModelReplica"
            " 2 (2 x 1). Lower `num_replicas`, or `num_cpus` in `ray_actor_options`",
        ),
        (
            config({}, replica(autoscaling_config={"min_replicas": 2, "max_replicas": 4})),
            CPU,
            "the replicas ask for 2.1 CPUs, and there are 2",
        ),
        (
            config({}, replica(num_replicas=3, ray_actor_options={"num_cpus": 0, "num_gpus": 1})),
            GPU,
            "the replicas ask for 3 GPUs, and there are 2: ModelReplica 3 (3 x 1). Lower",
        ),
        (
            config({}, replica(placement_group_bundles=[{"CPU": 1, "GPU": 2}, {"GPU": 2}])),
            GPU,
            "the replicas ask for 4 GPUs, and there are 2",
        ),
        (
            config({"engine": {**KV, "tensor_parallel_size": 2}}),
            CPU,
            "an engine of 2 workers runs them as Ray actors, which vLLM's CPU build cannot",
        ),
        (
            config({"engine": {**KV, "distributed_executor_backend": "ray"}}),
            CPU,
            "an engine of 1 workers runs them as Ray actors",
        ),
        (
            config(
                {
                    "engine": {
                        **KV,
                        "tensor_parallel_size": 2,
                        "distributed_executor_backend": "mp",
                    }
                }
            ),
            CPU,
            None,
        ),
        (
            config({"engine": {}}),
            CPU,
            "without `kv_cache_memory_bytes`, vLLM takes 0.92 of the memory for each engine on a"
            " CPU (19.3 GiB), and 15.0 GiB of 21.0 GiB are free: set `engine:"
            " {kv_cache_memory_bytes: 2013265920}`.",
        ),
        (config({"engine": {"gpu_memory_utilization": 0.5}}), CPU, None),
        (config({"engine": {}}), GPU, None),
        (
            config({"engine": {"kv_cache_memory_bytes": 20 * GIB}}),
            CPU,
            "`engine.kv_cache_memory_bytes` is 21474836480 (20.0 GiB) for each of 1 replicas, and"
            " 15.0 GiB of memory are free: set 2013265920 or less.",
        ),
        (
            config(
                {"engine": {}},
                replica(
                    ray_actor_options={"runtime_env": {"env_vars": {"VLLM_CPU_KVCACHE_SPACE": "1"}}}
                ),
            ),
            CPU,
            None,
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_missing(given: dict[str, Any], machine: Machine, sentence: str | None) -> None:
    found = preflight.problems(given, machine)
    if sentence is None:
        assert found == []
    else:
        (told,) = found
        assert told.startswith(sentence)


def test_the_application_of_somebody_else() -> None:
    given = {"applications": [{"import_path": "my.app:make", "args": {"model": 1}}]}
    assert preflight.problems(given, CPU) == []
    assert model_names(given) == []


@pytest.mark.parametrize(
    "given",
    [
        config({"engine": KV}, replica(num_replicas="two")),
        config({"engine": KV}, replica(autoscaling_config={"min_replicas": "two"})),
        config({"engine": KV}, replica(ray_actor_options={"num_cpus": "one"})),
        config({"engine": KV}, replica(placement_group_bundles=[{"CPU": "one"}])),
        config({"engine": {**KV, "tensor_parallel_size": "two"}}),
        config({"engine": {"kv_cache_memory_bytes": "much"}}),
    ],
    ids=lambda given: str(given["applications"][0])[-60:],
)
def test_what_is_no_number_is_left_to_ray_and_vllm(given: dict[str, Any]) -> None:
    assert preflight.problems(given, CPU) == []


def test_an_address_of_no_machine() -> None:
    with pytest.raises(CommandError, match="Give an address of this machine"):
        preflight.check_port("192.0.2.1", 8000)


def test_how_many_replicas_are_waited_for() -> None:
    parts = (
        replica(autoscaling_config={"min_replicas": 1, "initial_replicas": 3, "max_replicas": 4}),
        {"name": "Embedder", "num_replicas": 2},
    )
    given = config({"encoders": [{"model": "org/e"}]}, *parts)
    assert preflight.wanted_replicas(given) == {"CfgRouter": 1, "ModelReplica": 3, "Embedder": 2}


def test_each_of_several_models_is_looked_at() -> None:
    models = [
        {"model": "org/a", "engine": KV},
        {"model": "org/b", "deployment": "B", "engine": {"kv_cache_memory_bytes": 14 * GIB}},
        {"model": "org/c", "deployment": "C", "engine": {}},
        {"model": "org/d", "deployment": "D", "engine": {"kv_cache_memory_bytes": 2 * GIB}},
    ]
    sleeping = {"autoscaling_config": {"min_replicas": 0, "initial_replicas": 0}}
    parts = ({"name": "B", "num_replicas": 1}, {"name": "C", **sleeping}, {"name": "D"})
    given = config({}, *parts)
    (application,) = given["applications"]
    application["args"] = {"models": models}
    assert preflight.wanted_replicas(given) == {
        "CfgRouter": 1,
        "ModelReplica": 1,
        "B": 1,
        "C": 0,
        "D": 1,
    }
    lacking, memory = preflight.problems(given, CPU)
    assert lacking.startswith("the replicas ask for 3.1 CPUs")
    assert memory.startswith("`org/d` in `models`: `engine.kv_cache_memory_bytes` is 2147483648")


def test_a_port_that_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = f"cannot listen on 127.0.0.1:{port} .*another port: --port {port + 1}"
        with pytest.raises(CommandError, match=words):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)

"""The values that are chosen for a model and a machine."""

from __future__ import annotations

from typing import Any

import pytest

from cfg_serve.check.file import problems_of
from cfg_serve.errors import CommandError
from cfg_serve.generate.choices import Wanted, configuration
from cfg_serve.generate.model_facts import ModelFacts
from cfg_serve.machine import GIB, Machine
from cfg_serve.start import preflight

LAPTOP = Machine(device="cpu", cores=2, gpus=0, memory_bytes=15 * GIB, total_bytes=21 * GIB)
SMALL = Machine(device="cpu", cores=1, gpus=0, memory_bytes=2 * GIB, total_bytes=4 * GIB)
WORKSTATION = Machine(device="cpu", cores=16, gpus=0, memory_bytes=60 * GIB, total_bytes=64 * GIB)
GPUS = Machine(device="cuda", cores=16, gpus=4, memory_bytes=90 * GIB, total_bytes=99 * GIB)

TINY = ModelFacts(
    path="/m/tiny", is_local=True, max_len=512, kv_token_bytes=1024, weight_bytes=1000
)
CHAT = ModelFacts(
    path="/m/chat", is_local=True, max_len=131072, kv_token_bytes=131072, weight_bytes=2 * GIB
)
HUB = ModelFacts(path="org/model", is_local=False, max_len=4096, kv_token_bytes=65536)
UNKNOWN = ModelFacts(path="org/other", is_local=False)
ENCODER = ModelFacts(path="/m/e", is_local=True, generates=False)
MODELS = {"tiny": TINY, "chat": CHAT, "hub": HUB, "unknown": UNKNOWN}


def parts(config: dict[str, Any]) -> dict[str, Any]:
    return {part["name"]: part for part in config["applications"][0]["deployments"]}


def args(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["applications"][0]["args"]
    return found


@pytest.mark.parametrize("machine", [LAPTOP, WORKSTATION, GPUS], ids=lambda m: f"{m.cores}")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("encoders", [0, 1, 2])
@pytest.mark.parametrize("replicas", [1, 2])
def test_what_is_chosen_can_start(
    machine: Machine, model: str, encoders: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "ray_cpus", lambda: max(2, machine.cores))
    monkeypatch.setattr("deployments.config.encoders.resolve_model", lambda name: name)
    monkeypatch.setattr("deployments.config.generators.resolve_model", lambda name: name)
    others = [ENCODER, UNKNOWN][:encoders]
    if model == "unknown":
        others = others[:1]
    config = configuration(Wanted(replicas=replicas), MODELS[model], others, machine)
    assert list(problems_of(config)) == []
    assert preflight.problems(config, machine) == []


@pytest.mark.parametrize("machine", [LAPTOP, WORKSTATION], ids=lambda m: f"{m.cores}")
@pytest.mark.parametrize("model", [TINY, CHAT, HUB], ids=lambda m: m.path)
def test_both_streams_fit_the_cache(machine: Machine, model: ModelFacts) -> None:
    """Also in float32, where the checkpoint is bfloat16."""
    engine = args(configuration(Wanted(), model, (), machine))["engine"]
    needed = 2 * engine["max_model_len"] * 2 * (model.kv_token_bytes or 0)
    assert needed <= engine["kv_cache_memory_bytes"]
    assert engine["kv_cache_memory_bytes"] <= machine.memory_bytes // 4


def test_a_cpu() -> None:
    config = configuration(Wanted(), TINY, (), LAPTOP)
    assert args(config)["engine"] == {
        "max_model_len": 512,
        "dtype": "auto",
        "enforce_eager": True,
        "max_num_seqs": 64,
        "kv_cache_memory_bytes": 128 * 2**20,
        "distributed_executor_backend": "uni",
    }
    options = parts(config)["ModelReplica"]["ray_actor_options"]
    assert options["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "1"
    assert options["runtime_env"]["env_vars"]["HF_HUB_OFFLINE"] == "1"
    many = parts(configuration(Wanted(replicas=3), TINY, (), WORKSTATION))["ModelReplica"]
    assert many["ray_actor_options"]["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "5"


def test_processes_of_a_cpu() -> None:
    """vLLM's CPU build cannot run its workers as Ray actors."""
    config = configuration(Wanted(tensor_parallel=2), TINY, (), WORKSTATION)
    engine = args(config)["engine"]
    assert (engine["tensor_parallel_size"], engine["distributed_executor_backend"]) == (2, "mp")
    variables = parts(config)["ModelReplica"]["ray_actor_options"]["runtime_env"]["env_vars"]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in variables


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "ray_cpus", lambda: GPUS.cores)
    config = configuration(Wanted(), HUB, (), GPUS)
    assert args(config)["engine"] == {"max_num_seqs": 256}
    options = parts(config)["ModelReplica"]["ray_actor_options"]
    assert (options["num_gpus"], options["num_cpus"]) == (1, 1)
    assert "HF_HUB_OFFLINE" not in options["runtime_env"]["env_vars"]
    shared = configuration(Wanted(), HUB, [ENCODER], GPUS)
    assert parts(shared)["ModelReplica"]["ray_actor_options"]["num_gpus"] == 0.8
    assert args(shared)["engine"]["gpu_memory_utilization"] == 0.7
    pairs = configuration(Wanted(tensor_parallel=2, replicas=2), HUB, (), GPUS)
    part = parts(pairs)["ModelReplica"]
    assert part["placement_group_bundles"] == [{"CPU": 1, "GPU": 1}, {"GPU": 1}]
    assert preflight.lacking(pairs, GPUS) is None
    four = configuration(Wanted(tensor_parallel=4, replicas=2), HUB, (), GPUS)
    assert "ask for 8 GPUs, and there are 4" in str(preflight.lacking(four, GPUS))


def test_a_model_that_is_too_large() -> None:
    large = ModelFacts(path="/m", is_local=True, weight_bytes=2 * GIB)
    words = r"the weights take up to 4.0 GiB of memory in 1 replica\(s\), and 2.0 GiB are free"
    with pytest.raises(CommandError, match=words):
        configuration(Wanted(), large, (), SMALL)

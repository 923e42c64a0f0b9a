"""Which configuration suits a model and a machine. Pure: what is asked and known comes in."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cfg_serve.errors import CommandError
from cfg_serve.generate.model_facts import ModelFacts
from cfg_serve.machine import GIB, Machine, gib

Json = dict[str, Any]
KVSplit = Literal["elastic", "even"]

CPU_SEQS, GPU_SEQS = 64, 256
"""Streams in one step. A guided request is two."""

AHEAD = 1.25
"""Streams that CfgRouter sends to an engine for each one that it can run (SPARE in admission)."""

LEAST_KV_BYTES, MOST_KV_BYTES = 128 * 2**20, 8 * GIB
"""Of the KV cache on a CPU, where memory is shared with everything else."""

ROUTER_CPUS, ENCODER_CPUS, ENCODER_GPUS = 0.1, 0.5, 0.2
LEAST_LEN = 256


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the user asked for. None: what suits the machine."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    tensor_parallel: int = 1
    replicas: int = 1
    max_model_len: int | None = None
    kv_split: KVSplit = "elastic"
    dtype: str | None = None


def configuration(
    wanted: Wanted, model: ModelFacts | None, encoders: Iterable[ModelFacts], machine: Machine
) -> Json:
    """The whole YAML. Raises CommandError if the machine cannot hold the model."""
    others = list(encoders)
    args: Json = {}
    if model is not None:
        args |= _generator_args(wanted, model, machine, len(others))
    if others:
        args["encoders"] = [_encoder_args(facts, at) for at, facts in enumerate(others)]
    parts = [_router()]
    if model is not None:
        parts.append(_generator(wanted, model, machine, len(others)))
    parts += [_encoder(facts, at, machine) for at, facts in enumerate(others)]
    application = {
        "name": "cfg",
        "route_prefix": "/",
        "import_path": "deployments.app:build",
        "args": args,
        "deployments": parts,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": wanted.host, "port": wanted.port},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
    }


# ---- the generator -------------------------------------------------------------------------------


def _generator_args(wanted: Wanted, model: ModelFacts, machine: Machine, encoders: int) -> Json:
    named = {"served_model_name": wanted.name} if wanted.name else {}
    on_cpu = machine.device == "cpu"
    engine = _cpu_engine(wanted, model, machine) if on_cpu else _gpu_engine(wanted, encoders)
    return {"model": model.path, **named, "kv_split": wanted.kv_split, "engine": engine}


def _cpu_engine(wanted: Wanted, model: ModelFacts, machine: Machine) -> Json:
    kv_bytes = _kv_bytes(wanted, model, machine)
    length = wanted.max_model_len or _fitting_len(model, kv_bytes)
    parallel = wanted.tensor_parallel > 1
    return {
        **({"max_model_len": length} if length else {}),
        "dtype": wanted.dtype or "auto",
        "enforce_eager": True,
        "max_num_seqs": CPU_SEQS,
        "kv_cache_memory_bytes": kv_bytes,
        **({"tensor_parallel_size": wanted.tensor_parallel} if parallel else {}),
        "distributed_executor_backend": "mp" if parallel else "uni",
    }


def _kv_bytes(wanted: Wanted, model: ModelFacts, machine: Machine) -> int:
    """A quarter of what the weights leave, within bounds, for each of all workers.

    Weights are read in the type of the checkpoint, and may double where that is bfloat16.
    """
    weights = 2 * (model.weight_bytes or 0) * wanted.replicas
    left = machine.memory_bytes - weights
    if left < LEAST_KV_BYTES * wanted.replicas:
        raise CommandError(
            f"the weights take up to {gib(weights)} of memory in {wanted.replicas} replica(s), and"
            f" {gib(machine.memory_bytes)} are free: end other programs, or take a smaller model."
        )
    share = left // 4 // wanted.replicas
    length = wanted.max_model_len or model.max_len
    most = MOST_KV_BYTES
    if model.kv_token_bytes and length:  # 64 streams of the whole length are enough
        most = min(most, max(LEAST_KV_BYTES, CPU_SEQS * length * model.kv_token_bytes))
    return max(LEAST_KV_BYTES, min(share, most) // 2**20 * 2**20)


def _fitting_len(model: ModelFacts, kv_bytes: int) -> int | None:
    """The longest context of which the cache holds both streams; None leaves it to vLLM."""
    if model.max_len is None or model.kv_token_bytes is None:
        return None
    # The engine may compute in float32 where the checkpoint is bfloat16: twice the bytes.
    fits = kv_bytes // (4 * model.kv_token_bytes)
    return model.max_len if fits >= model.max_len else max(LEAST_LEN, fits // 256 * 256)


def _gpu_engine(wanted: Wanted, encoders: int) -> Json:
    parallel = wanted.tensor_parallel > 1
    shared = encoders and not parallel
    return {
        **({"max_model_len": wanted.max_model_len} if wanted.max_model_len else {}),
        **({"dtype": wanted.dtype} if wanted.dtype else {}),
        "max_num_seqs": GPU_SEQS,
        **({"tensor_parallel_size": wanted.tensor_parallel} if parallel else {}),
        **({"gpu_memory_utilization": round(0.9 - ENCODER_GPUS * encoders, 2)} if shared else {}),
    }


def _generator(wanted: Wanted, model: ModelFacts, machine: Machine, encoders: int) -> Json:
    on_cpu = machine.device == "cpu"
    seqs = CPU_SEQS if on_cpu else GPU_SEQS
    options: Json = {"num_cpus": _cpus(wanted, machine, encoders) if on_cpu else 1}
    parallel = wanted.tensor_parallel
    bundles: Json = {}
    if not on_cpu and parallel == 1:
        options["num_gpus"] = round(1 - ENCODER_GPUS * encoders, 2)
    elif not on_cpu:
        one = [{"CPU": 1, "GPU": 1}, *({"GPU": 1} for _ in range(parallel - 1))]
        bundles = {"placement_group_bundles": one, "placement_group_strategy": "STRICT_PACK"}
    options["runtime_env"] = {"env_vars": _variables(wanted, model, machine)}
    return {
        "name": "ModelReplica",
        "num_replicas": wanted.replicas,
        "max_ongoing_requests": math.ceil(AHEAD * seqs),
        "max_queued_requests": 256,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_timeout_s": 60,
        "ray_actor_options": options,
        **bundles,
    }


def _cpus(wanted: Wanted, machine: Machine, encoders: int) -> float:
    """One for each replica, or less, so that all find a place."""
    left = max(2, machine.cores) - ROUTER_CPUS - ENCODER_CPUS * encoders
    return max(0.1, min(1.0, math.floor(10 * left / wanted.replicas) / 10))


def _variables(wanted: Wanted, model: ModelFacts, machine: Machine) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1"} if model.is_local else {}
    if machine.device == "cuda":
        return {"VLLM_LOGGING_LEVEL": "WARNING", **offline}
    processes = wanted.replicas * wanted.tensor_parallel
    threads = max(1, (machine.cores - 1) // processes)
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if wanted.tensor_parallel == 1 else {}
    return {
        "TORCHDYNAMO_DISABLE": "1",  # else the first request for logprobs compiles C++
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **one_process,
        "VLLM_LOGGING_LEVEL": "ERROR",
        **offline,
    }


# ---- the others ----------------------------------------------------------------------------------


def _router() -> Json:
    return {
        "name": "CfgRouter",
        "max_ongoing_requests": 100_000,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": {"num_cpus": ROUTER_CPUS},
    }


def _deployment_name(at: int) -> str:
    return f"Embedder{at + 1}" if at else "Embedder"


def _encoder_args(facts: ModelFacts, at: int) -> Json:
    return {"model": facts.path, "deployment": _deployment_name(at)}


def _encoder(facts: ModelFacts, at: int, machine: Machine) -> Json:
    on_gpu = {"num_gpus": ENCODER_GPUS} if machine.device == "cuda" else {}
    threads = {"OMP_NUM_THREADS": "1"} if machine.device == "cpu" else {}
    offline = {"HF_HUB_OFFLINE": "1"} if facts.is_local else {}
    return {
        "name": _deployment_name(at),
        "num_replicas": 1,
        "max_ongoing_requests": 256,
        "max_queued_requests": 1024,
        "graceful_shutdown_wait_loop_s": 0.2,
        "ray_actor_options": {
            "num_cpus": ENCODER_CPUS,
            **on_gpu,
            "runtime_env": {"env_vars": {**threads, "TOKENIZERS_PARALLELISM": "false", **offline}},
        },
    }

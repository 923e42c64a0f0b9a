"""What a configuration asks of this machine, and what is missing, before Ray starts.

Everything here is told in a second. Without it, Ray waits for ever for a CPU that does not come,
and an engine fails after a minute.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cfg_serve.check.file import ROUTER, deployment_of, generators_of, is_ours, names_of
from cfg_serve.errors import CommandError
from cfg_serve.machine import GIB, Machine, gib

ROUTER_CPUS = 0.1
"""What CfgRouter asks for by itself (deployments/ingress/router.py); the others ask for 1."""

VLLM_FRACTION = 0.92
"""vLLM's own share of the memory, if no option says another."""

_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Need:
    """What the replicas of a deployment need together."""

    name: str
    replicas: int
    cpus: float
    gpus: float


def ray_cpus() -> int:
    """The CPUs that the Ray of `cfg-serve serve` has: two at least, for a router and a replica."""
    return max(2, os.cpu_count() or 1)


def check_port(host: str, port: int) -> None:
    """Raise CommandError if the server cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CommandError(
                f"cannot listen on {host}:{port} ({reason}). {_way_out(error, port)}"
            ) from None


def _way_out(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Stop the program that uses it, or use another port: --port {port + 1}"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Ports below 1024 are for root: use another one, such as --port 8000."
    return "Give an address of this machine: --host 127.0.0.1, or 0.0.0.0 for all."


def wanted_replicas(config: Mapping[str, Any]) -> dict[str, int]:
    """The replicas of each deployment that are there when the server is ready."""
    return {need.name: need.replicas for need in needs(config)}


def needs(config: Mapping[str, Any]) -> list[Need]:
    return [need for application in config["applications"] for need in _of(application)]


def _of(application: Mapping[str, Any]) -> Iterator[Need]:
    given = {str(entry.get("name")): entry for entry in application.get("deployments") or ()}
    names = names_of(application.get("args") or {}) if is_ours(application) else list(given)
    for name in names:
        yield _need(name, given.get(name, {}))


def _need(name: str, entry: Mapping[str, Any]) -> Need:
    replicas = _replicas(entry)
    options = entry.get("ray_actor_options") or {}
    usual = ROUTER_CPUS if name == ROUTER and not options else 1
    one = {"CPU": _number(options, "num_cpus", usual), "GPU": _number(options, "num_gpus", 0)}
    if bundles := entry.get("placement_group_bundles"):
        one = {kind: sum(_number(bundle, kind, 0) for bundle in bundles) for kind in one}
    return Need(name, replicas, replicas * one["CPU"], replicas * one["GPU"])


def _replicas(entry: Mapping[str, Any]) -> int:
    scaling = entry.get("autoscaling_config")
    if isinstance(scaling, Mapping):
        least = _number(scaling, "min_replicas", 1)
        return int(_number(scaling, "initial_replicas", least) or least)
    return int(_number(entry, "num_replicas", 1))


def _number(options: Mapping[str, Any], name: str, usual: float) -> float:
    """An option; `usual` for what is no number. Ray or vLLM refuses that, in their own words."""
    value = options.get(name, usual)
    return value if isinstance(value, int | float) and math.isfinite(value) else usual


def lacking(config: Mapping[str, Any], machine: Machine) -> str | None:
    """What this machine lacks for the replicas, and what to do; None if all have a place."""
    found = needs(config)
    for kind, has, words in (
        ("cpus", ray_cpus(), "CPUs"),
        ("gpus", machine.gpus, "GPUs"),
    ):
        asked = sum(getattr(need, kind) for need in found)
        if asked > has + _ROUNDING:
            each = ", ".join(
                f"{need.name} {getattr(need, kind):g} ({need.replicas} x"
                f" {getattr(need, kind) / need.replicas:g})"
                for need in found
                if getattr(need, kind)
            )
            return (
                f"the replicas ask for {asked:g} {words}, and there are {has}: {each}. Lower"
                f" `num_replicas`, or `num_{kind}` in `ray_actor_options`, under `deployments`."
            )
    return None


def problems(config: Mapping[str, Any], machine: Machine) -> list[str]:
    """Everything that would keep the replicas from starting on this machine."""
    found = [lacking(config, machine)]
    for application in config["applications"]:
        if is_ours(application) and machine.device == "cpu":
            found += _of_generators(application, machine)
    return [sentence for sentence in found if sentence]


def _of_generators(application: Mapping[str, Any], machine: Machine) -> Iterator[str]:
    """What keeps each generator from starting on a CPU; with several, it is named."""
    args, free = application.get("args") or {}, machine.memory_bytes
    for entry in generators_of(args):
        name = deployment_of(entry)
        engine = entry.get("engine") or {}
        replicas = wanted_replicas({"applications": [application]})[name]
        variables = _variables(application, name)
        for sentence in (
            _executor(engine),
            _memory(engine, replicas, variables, free, machine.total_bytes),
        ):
            if sentence:
                yield (
                    sentence if entry is args else f"`{entry.get('model')}` in `models`: {sentence}"
                )
        free -= int(_number(engine, "kv_cache_memory_bytes", 0)) * replicas


def _executor(engine: Mapping[str, Any]) -> str | None:
    """On CPUs, vLLM's workers cannot be Ray actors."""
    ranks = int(
        _number(engine, "tensor_parallel_size", 1) * _number(engine, "pipeline_parallel_size", 1)
    )
    usual = "ray" if ranks > 1 else "uni"
    if engine.get("distributed_executor_backend", usual) != "ray":
        return None
    return (
        f"an engine of {ranks} workers runs them as Ray actors, which vLLM's CPU build cannot:"
        " set `engine: {distributed_executor_backend: mp}`, or leave `tensor_parallel_size` and"
        " `pipeline_parallel_size` out."
    )


def _memory(
    engine: Mapping[str, Any], replicas: int, variables: set[str], free: float, total: float
) -> str | None:
    """What the KV cache takes on a CPU, where vLLM's own choice is nearly all memory.

    free: bytes that the models before leave.
    """
    if engine.get("kv_cache_memory_bytes"):
        given = int(_number(engine, "kv_cache_memory_bytes", 0))
        if given * replicas <= free:
            return None
        return (
            f"`engine.kv_cache_memory_bytes` is {given} ({gib(given)}) for each of"
            f" {replicas} replicas, and {gib(free)} of memory are free: set"
            f" {suggested_kv_bytes(free, replicas)} or less."
        )
    if _KV_SPACE in variables:
        return None
    share = _number(engine, "gpu_memory_utilization", VLLM_FRACTION)
    if total * share * replicas <= free:
        return None
    return (
        f"without `kv_cache_memory_bytes`, vLLM takes {share:g} of the memory for each engine on a"
        f" CPU ({gib(total * share)}), and {gib(free)} of {gib(total)}"
        f" are free: set `engine: {{kv_cache_memory_bytes: {suggested_kv_bytes(free, replicas)}}}`."
    )


def suggested_kv_bytes(free: float, replicas: int = 1) -> int:
    """A size of the KV cache that leaves room for weights: an eighth of what is free, to 4 GiB."""
    return max(2**26, min(4 * GIB, int(free / 8 / replicas)) // 2**26 * 2**26)


def _variables(application: Mapping[str, Any], deployment: str) -> set[str]:
    """The names of the environment variables of a deployment's replicas."""
    found = set(os.environ)
    for entry in application.get("deployments") or ():
        if entry["name"] == deployment:
            runtime = (entry.get("ray_actor_options") or {}).get("runtime_env") or {}
            found |= set(runtime.get("env_vars") or {})
    return found

"""Applications of Ray Serve LLM, run as a user runs them: `serve run` with a YAML file."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import httpx
from typing_extensions import override

from tools.serving.process import START_LIMIT_S, Json, ServeProcess

IMPORT_PATH = "deployments.ray_llm:build_openai_app"
ENGINE = {
    "max_model_len": 512,
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 27,
}
ON_CPUS = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


def llm_config(name: str, folder: str, deployment: Json | None = None, **engine: Any) -> Json:
    """The fields of an LLMConfig that serves a model on CPUs."""
    return {
        "model_loading_config": {"model_id": name, "model_source": folder},
        "engine_kwargs": {**ENGINE, **engine},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"num_replicas": 1, **(deployment or {})},
        "runtime_env": {"env_vars": dict(ON_CPUS)},
    }


class RayLlmProcess(ServeProcess):
    """One application with these models. It is ready when each model has answered."""

    def __init__(
        self,
        *configs: Json,
        import_path: str = IMPORT_PATH,
        env: dict[str, str] | None = None,
        resources: Json | None = None,
    ) -> None:
        self.is_ours = import_path == IMPORT_PATH
        self._models = [config["model_loading_config"]["model_id"] for config in configs]
        application = {
            "name": "llm",
            "route_prefix": "/",
            "import_path": import_path,
            "args": {"llm_configs": list(configs)},
        }
        config = {
            "http_options": {"host": "127.0.0.1"},
            "logging_config": {"log_level": "WARNING", "enable_access_log": False},
            "applications": [application],
        }
        settings = {"RAY_OVERRIDE_RESOURCES": json.dumps(resources or {"CPU": 16})}
        super().__init__(config, {**settings, **(env or {})}, stock=True)

    @override
    def wait_until_ready(self) -> float:
        while time.monotonic() - self.started < 2 * START_LIMIT_S:
            with suppress(httpx.TransportError):
                if all(self._has_answered(model) for model in self._models):
                    return time.monotonic() - self.started
            if self._process.poll() is not None or "failed with exception" in self.tail():
                break
            time.sleep(1)
        raise AssertionError(f"serve run did not get ready:\n{self.tail(200)}")

    def _has_answered(self, model: str) -> bool:
        body = {"model": model, "prompt": "Once", "max_tokens": 1}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code == 200

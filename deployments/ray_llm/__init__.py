"""Guidance in Ray Serve LLM: `guided` makes an LLMConfig of Ray's guided.

    from ray.serve.llm import LLMConfig, build_openai_app
    from deployments.ray_llm import guided

    app = build_openai_app({"llm_configs": [guided(LLMConfig(...)), ...]})

Requests may then have the fields of guidance as to our own server (docs/ray-llm.md). With a YAML
file, name `deployments.ray_llm:build_openai_app` as its `import_path`: every model is guided then.

    config.py    in the program that builds the app: guided, build_openai_app
    engine.py    in Ray's replica: the engine that LLMServer makes
    calls.py     from a request as Ray's ingress has parsed it to a GenerateCall
    answers.py   from what VllmServer yields to what LLMServer passes on
    direct.py    "direct streaming": the requests that Ray sends past its ingress
    ray_names.py the names of Ray that are not public
"""

from __future__ import annotations

try:
    from deployments.ray_llm.config import build_openai_app, guided
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Ray Serve LLM does not run with this vLLM ({error}): use 0.32 (`make setup VLLM=0.32`)",
        name=error.name,
    ) from error

__all__ = ["build_openai_app", "guided"]

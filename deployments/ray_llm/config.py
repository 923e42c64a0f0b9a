"""In the program that builds the application: make an LLMConfig of Ray Serve LLM guided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ray.serve.deployment import Application
from ray.serve.llm import LLMServingArgs
from ray.serve.llm import build_openai_app as build_stock_app

from cfg_core.errors import ConfigError
from cfg_core.vllm_plugin import guided_engine_args
from cfg_core.vllm_plugin.config import merged
from cfg_core.vllm_plugin.processes import is_guided_scheduler
from deployments.ray_llm.ray_names import ENGINE_CLASS_ENV, EngineKind, LLMConfig

Config = TypeVar("Config", bound=LLMConfig)

ENGINE = "deployments.ray_llm.engine.GuidedVLLMEngine"


def guided(config: Config, **options: Any) -> Config:
    """The same LLMConfig, whose replicas run a guided engine. `config` does not change.

    All builders of Ray Serve LLM take it, and its `server_cls` may be any: the engine's class is
    named in its `runtime_env`.

    options: of `cfg_core.vllm_plugin.guided_engine_args`.
    Raises ConfigError for an engine other than vLLM or a scheduler other than ours, and whatever
    `guided_engine_args` raises.
    """
    if config.llm_engine != EngineKind.vLLM.value:
        raise ConfigError(f"llm_engine is {config.llm_engine!r}: guidance needs 'vLLM'.")
    given = config.engine_kwargs
    scheduler = given.get("scheduler_cls")
    if scheduler is not None and not is_guided_scheduler(scheduler):
        raise ConfigError(
            "engine_kwargs has a scheduler_cls: leave it out, guidance brings its own."
        )
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    fields |= {
        "engine_kwargs": merged(given, guided_engine_args(**options)),
        "runtime_env": _with_engine(config.runtime_env),
    }
    return type(config)(**fields)


def _with_engine(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """The runtime environment in which LLMServer makes our engine."""
    env = dict(runtime_env or {})
    return {**env, "env_vars": {**(env.get("env_vars") or {}), ENGINE_CLASS_ENV: ENGINE}}


def build_openai_app(builder_config: Mapping[str, Any]) -> Application:
    """As `ray.serve.llm.build_openai_app`, with guidance for all its models."""
    args = LLMServingArgs.model_validate(dict(builder_config))
    configs = [guided(config) for config in args.llm_configs if isinstance(config, LLMConfig)]
    return build_stock_app({**builder_config, "llm_configs": configs})

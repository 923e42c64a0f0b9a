"""Checks on the keys of `engine:` and `frontend:`.

vllm is not imported, because that takes ten seconds.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cfg_core.errors import ConfigError
from cfg_core.keys import check_keys

_ONE_RANK = (
    "each replica has one engine of one rank; set `num_replicas` of ModelReplica under"
    " `deployments` for more, and `tensor_parallel_size` with `enable_expert_parallel` for a model"
    " of experts"
)

_DATA_PARALLEL = (
    *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
    *("data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
    *("data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
    "data_parallel_multi_port_external_lb",
)

RESERVED_ENGINE_KEYS = {
    "model": "name it one level up, as `model`",
    "served_model_name": "name it one level up, as `served_model_name`",
    "scheduler_cls": "the guided scheduler is always used; it serves plain requests unchanged",
    "worker_cls": "the guided worker is always used; it serves plain requests unchanged",
    **dict.fromkeys(_DATA_PARALLEL, _ONE_RANK),
}
"""Engine options that the application sets itself, each with what the user should do instead."""


FRONTEND_KEYS = frozenset(
    {
        "chat_template",
        "chat_template_content_format",
        "default_chat_template_kwargs",
        "enable_auto_tool_choice",
        "enable_force_include_usage",
        "enable_per_request_metrics",
        "enable_prompt_tokens_details",
        "exclude_tools_when_tool_choice_none",
        "fingerprint_mode",
        "fingerprint_value",
        "lora_modules",
        "response_role",
        "return_tokens_as_token_ids",
        "tool_call_parser",
        "tool_strict_level",
        "trust_request_chat_template",
    }
)
"""Options of vLLM's FrontendArgs that its serving classes read.

The other options belong to vLLM's own HTTP server, which is not used here.
"""


def check_frontend(frontend: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown option, or for one that needs another that is missing.

    Known are FRONTEND_KEYS.
    """
    check_keys(frontend, FRONTEND_KEYS, "frontend")
    if frontend.get("enable_auto_tool_choice") and not frontend.get("tool_call_parser"):
        raise ConfigError(
            "`enable_auto_tool_choice` in `frontend` needs `tool_call_parser`: set the parser"
            " for this model."
        )
    adapters = frontend.get("lora_modules", [])
    if not isinstance(adapters, list) or not all(_is_adapter(adapter) for adapter in adapters):
        raise ConfigError(
            "`lora_modules` in `frontend` must be a list of `{name: NAME, path: DIRECTORY}`."
        )
    if adapters and not engine.get("enable_lora"):
        raise ConfigError("`lora_modules` in `frontend` needs `enable_lora: true` in `engine`.")


def _is_adapter(entry: object) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"name", "path"}:
        return False
    return all(isinstance(value, str) for value in entry.values())


def check_engine_keys(engine: Collection[str]) -> None:
    """Raise ConfigError for an option that the application sets, or that vLLM does not know."""
    for key, instead in RESERVED_ENGINE_KEYS.items():
        if key in engine:
            raise ConfigError(f"`{key}` in `engine` is set by the application: {instead}.")
    known = vllm_engine_fields()
    if known is not None:
        check_keys(engine, known - RESERVED_ENGINE_KEYS.keys(), "engine")


@cache
def vllm_engine_fields() -> frozenset[str] | None:
    """Field names of vLLM's AsyncEngineArgs, read from its source code.

    None if vllm is not installed here, for example on the head node of a cluster. The replica then
    checks the options.
    """
    spec = importlib.util.find_spec("vllm")
    roots = (spec.submodule_search_locations if spec else None) or []
    sources = [path for root in roots if (path := Path(root) / "engine" / "arg_utils.py").is_file()]
    if not sources:
        return None
    tree = ast.parse(sources[0].read_text(encoding="utf-8"))
    return frozenset(
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
    )

"""Which options the vLLM engine takes, told without importing vllm, which takes ten seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection
from functools import cache
from pathlib import Path

from cfg_core.errors import ConfigError
from cfg_core.keys import check_keys

RESERVED_ENGINE_KEYS = {
    "model": "name it one level up, as `model`",
    "served_model_name": "name it one level up, as `served_model_name`",
    "scheduler_cls": "the guided scheduler is always used; it serves plain requests unchanged",
    "worker_cls": "the guided worker is always used; it serves plain requests unchanged",
}
"""Engine options that the application sets itself, each with what to do instead."""


def check_engine_keys(engine: Collection[str]) -> None:
    """Raise ConfigError on an option that this vLLM does not have, or that the application sets itself."""
    for key, instead in RESERVED_ENGINE_KEYS.items():
        if key in engine:
            raise ConfigError(f"`{key}` in `engine` is set by the application: {instead}.")
    known = vllm_engine_fields()
    if known is not None:
        check_keys(engine, known - RESERVED_ENGINE_KEYS.keys(), "engine")


@cache
def vllm_engine_fields() -> frozenset[str] | None:
    """Field names of vLLM's AsyncEngineArgs, read from its source: importing vllm takes ten seconds.

    None if vllm is not installed here, as on the head node of a cluster; the replica then checks.
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

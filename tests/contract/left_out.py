"""Modules of ours that the installed vLLM cannot run. Contract tests leave them out."""

from __future__ import annotations

import importlib
from pathlib import Path

from cfg_core.vllm_plugin import versions


def _runs_ray_llm() -> bool:
    """vLLM 0.33 has moved a module that Ray 2.60's Serve LLM imports (docs/ray-llm.md)."""
    try:
        importlib.import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:
        return False
    return True


RUNS_RAY_LLM = _runs_ray_llm()


def is_left_out(path: Path) -> bool:
    """Whether a file of ours is for another vLLM than the installed one."""
    return versions.is_for_another(path) or ("ray_llm" in path.parts and not RUNS_RAY_LLM)

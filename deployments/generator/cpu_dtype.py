"""In which type a CPU computes: bfloat16 only where it has instructions for it.

With `dtype: auto`, vLLM computes in the type of the checkpoint, which is bfloat16 for most models.
A CPU without instructions for bfloat16 converts each value, and is faster in float32. The replica
decides, because its machine computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names that Linux gives to these instructions: two on x86-64, one on aarch64."""
CPUINFO = "/proc/cpuinfo"


def with_cpu_dtype(engine: Mapping[str, Any], cpuinfo: str) -> dict[str, Any]:
    """Engine options for a CPU: `dtype: float32` where `auto` would be slow bfloat16.

    The checkpoint's type is read in the directory of the model. That of a name on the hub is not
    known here, so vLLM chooses.
    """
    is_open = engine.get("dtype", "auto") == "auto"
    if is_open and not has_bfloat16(cpuinfo) and checkpoint_dtype(engine["model"]) == "bfloat16":
        return {**engine, "dtype": "float32"}
    return dict(engine)


def has_bfloat16(cpuinfo: str) -> bool:
    """Whether the text of /proc/cpuinfo names instructions for bfloat16.

    A text without a list of features counts as if it named them, so that vLLM's choice holds.
    """
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return not FEATURES.isdisjoint(value.split())
    return True


def checkpoint_dtype(folder: str) -> str | None:
    """The type that a checkpoint's config.json names; None if there is none."""
    try:
        config = json.loads(read(f"{folder}/config.json"))
    except ValueError:
        return None
    for part in (config, config.get("text_config", {})):
        if found := part.get("dtype") or part.get("torch_dtype"):
            return str(found)
    return None


def read(path: str) -> str:
    """The text of a file; nothing if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""

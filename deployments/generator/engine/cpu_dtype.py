"""In which type a CPU computes: bfloat16 only where it has instructions for it.

With `dtype: auto`, vLLM computes in the type of the checkpoint, which is bfloat16 for most models.
A CPU without instructions for bfloat16 converts each value, and is faster in float32. The replica
decides, because its machine computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cfg_core.cpu_features import has_bfloat16, read


def with_cpu_dtype(engine: Mapping[str, Any], cpuinfo: str) -> dict[str, Any]:
    """Engine options for a CPU: `dtype: float32` where `auto` would be slow bfloat16.

    The checkpoint's type is read in the directory of the model. That of a name on the hub is not
    known here, so vLLM chooses. It also chooses if `cpuinfo` lists no features.
    """
    is_open = engine.get("dtype", "auto") == "auto"
    is_slow = has_bfloat16(cpuinfo) is False
    if is_open and is_slow and checkpoint_dtype(engine["model"]) == "bfloat16":
        return {**engine, "dtype": "float32"}
    return dict(engine)


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

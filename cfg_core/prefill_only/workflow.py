"""The parts of the engine that have several implementations, of which the options choose one.

docs/embeddings.md shows the roles and their names. In place of a name, a dotted path
`package.module:Name` is an implementation of one's own:

    role        called as                                                 default
    attention   a function of the type attention.Backend                  varlen or sdpa_runs
    runner      (checkpoint, options, special_ids) -> runner.Runner       transformers or vllm
    executor    (compute, deliver) -> executor.Executor                   thread

The default attention is varlen on a GPU in bfloat16 or float16, and sdpa_runs else. The executor
`vllm` is the thread with the runner `vllm`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from cfg_core.errors import ConfigError
from cfg_core.keys import check_keys, nearest

_HERE = "cfg_core.prefill_only.stages"

ROLES: Mapping[str, Mapping[str, str]] = {
    "attention": {name: f"{_HERE}.attention:{name}" for name in ("naive", "sdpa_runs", "varlen")},
    "runner": {
        "transformers": f"{_HERE}.runner:TransformersRunner",
        "vllm": f"{_HERE}.vllm_runner:VllmRunner",
    },
    "executor": {
        "inline": f"{_HERE}.executor:InlineExecutor",
        "thread": f"{_HERE}.executor:ThreadExecutor",
        "vllm": f"{_HERE}.executor:ThreadExecutor",
    },
}
"""The implementations that are shipped, by role and name."""


def check_workflow(workflow: Mapping[str, str]) -> None:
    """Raise ConfigError on an unknown role or name. Imports no implementation."""
    check_keys(workflow, ROLES, "workflow")
    for role, name in workflow.items():
        if ":" not in name and name not in ROLES[role]:
            hint = nearest(name, ROLES[role], "names")
            raise ConfigError(
                f"unknown {role} `{name}` in `workflow`: {hint} Or give a dotted path,"
                " package.module:Name."
            )


def resolve(role: str, name: str) -> Any:
    """The implementation of `role` that `name` names. Raises ConfigError if it cannot load."""
    path = ROLES[role].get(name, name)
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`{path}` in `workflow` cannot be loaded: {error}.") from None

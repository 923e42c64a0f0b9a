"""The replaceable modules of the engine, by role, and the default for each role.

The idea is that of vLLM pull request 9124, "workflow defined engine": an engine for prefill-only
models is a pipeline whose parts have names. One line of YAML then replaces a model family, an
attention kernel or an executor (`workflow: {scheduler: mypackage.mymodule:MyScheduler}`), and no
fork is needed.

    role              called as                                              default
    tokenizer         (checkpoint)                                           Tokenizer
    input_processor   (tokenizer, info, skips_prompt)                        InputProcessor
    scheduler         (options, max_batch_tokens)                            Scheduler
    model_input       (first_position, uses_token_types, pin_memory)         ModelInputBuilder
    attention         a function of the type attention.Backend               sdpa_runs or varlen
    runner            (checkpoint, options, special_ids)                     transformers or vllm
    pooler            (checkpoint, model, special_ids) -> task -> Pooler     make_poolers
    executor          (compute, deliver)                                     thread
    output_processor  (checkpoint)                                           OutputProcessor

The default attention is varlen on a GPU in bfloat16 or float16, and sdpa_runs else. The default
runner is `vllm` if the executor is `vllm`, and `transformers` otherwise. The other executors are
`inline`, and `vllm`: the thread executor, which selects the runner `vllm`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from cfg_core.errors import ConfigError
from cfg_core.keys import check_keys, nearest

_HERE = "cfg_core.prefill_only.stages"

MODULES: Mapping[str, Mapping[str, str]] = {
    "tokenizer": {"default": f"{_HERE}.tokenizer:Tokenizer"},
    "input_processor": {"default": f"{_HERE}.input_processor:InputProcessor"},
    "scheduler": {"default": f"{_HERE}.scheduler:Scheduler"},
    "model_input": {"default": f"{_HERE}.model_input:ModelInputBuilder"},
    "attention": {name: f"{_HERE}.attention:{name}" for name in ("naive", "sdpa_runs", "varlen")},
    "runner": {
        "default": f"{_HERE}.runner:TransformersRunner",
        "transformers": f"{_HERE}.runner:TransformersRunner",
        "vllm": f"{_HERE}.vllm_runner:VllmRunner",
    },
    "pooler": {"default": f"{_HERE}.poolers:make_poolers"},
    "executor": {
        "default": f"{_HERE}.executor:ThreadExecutor",
        "inline": f"{_HERE}.executor:InlineExecutor",
        "thread": f"{_HERE}.executor:ThreadExecutor",
        "vllm": f"{_HERE}.executor:ThreadExecutor",
    },
    "output_processor": {"default": f"{_HERE}.output_processor:OutputProcessor"},
}
"""Modules by role and name. A dotted path `package.module:Name` may be given instead of a name."""


def check_workflow(workflow: Mapping[str, str]) -> None:
    """Raise ConfigError on an unknown role or name. Imports no module.

    The message suggests the nearest known name.
    """
    check_keys(workflow, MODULES, "workflow")
    for role, name in workflow.items():
        if ":" not in name and name not in MODULES[role]:
            hint = nearest(name, MODULES[role])
            raise ConfigError(
                f"unknown {role} `{name}` in `workflow`: {hint} Or give a dotted path,"
                " package.module:Name."
            )


def resolve(role: str, workflow: Mapping[str, str]) -> Any:
    """The class or function that plays `role`.

    Raises ConfigError if it cannot be loaded.
    """
    name = workflow.get(role, "default")
    if role == "runner" and "runner" not in workflow and workflow.get("executor") == "vllm":
        name = "vllm"
    return load(MODULES[role].get(name, name))


def load(path: str) -> Any:
    """The object that `package.module:Name` names. Raises ConfigError if it cannot be loaded."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`{path}` in `workflow` cannot be loaded: {error}.") from None

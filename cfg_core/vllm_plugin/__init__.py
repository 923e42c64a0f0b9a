"""Guidance for any vLLM entry point.

    from vllm import LLM, SamplingParams
    from cfg_core.vllm_plugin import guided_engine_args

    llm = LLM(model, **guided_engine_args())
    llm.generate(prompt, SamplingParams(extra_args={"guidance_scale": 1.5, "negative_prompt": "..."}))

`python -m cfg_core.vllm_plugin` prints the same as flags for `vllm serve`.
"""

from __future__ import annotations

from typing import Any


def guided_engine_args(kv_split: str = "elastic") -> dict[str, Any]:
    """Engine arguments that make a vLLM engine understand guidance.

    kv_split: `elastic` lets the boundary between the leaders' and the followers' share of the KV pool move with
    demand; `even` gives each exactly half (vLLM RFC #5825).

    Plain requests on such an engine behave exactly as without it. Raises CompatibilityError for an unknown
    kv_split or an unsupported vLLM.
    """
    from cfg_core.vllm_plugin import compat

    compat.check_version()
    register()
    return {
        "scheduler_cls": "cfg_core.vllm_plugin.scheduler.GuidedScheduler",
        "worker_cls": "cfg_core.vllm_plugin.worker.GuidedWorker",
        "additional_config": {compat.ADDITIONAL_CONFIG: {"kv_split": compat.check_kv_split(kv_split)}},
    }


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes. Idempotent.

    It only adds the admission check for guided requests; an engine is guided by its arguments alone.
    """
    from cfg_core.vllm_plugin import admission

    admission.install()

"""Guidance for any vLLM entry point.

    from vllm import LLM, SamplingParams
    from cfg_core.vllm_plugin import guided_engine_args

    llm = LLM(model, **guided_engine_args())
    llm.generate(prompt, SamplingParams(extra_args={"guidance_scale": 1.5, "negative_prompt": "..."}))

`python -m cfg_core.vllm_plugin` prints the same as flags for `vllm serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def guided_engine_args(
    kv_split: str = "elastic",
    logits_processors: Mapping[str, Any] | None = None,
    draft_cost: float | None = None,
    grammars: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Engine arguments that make a vLLM engine understand guidance.

    kv_split: `elastic` lets the boundary between the leaders' and the followers' share of the KV pool move with
    demand; `even` gives each exactly half (vLLM RFC #5825).
    logits_processors: factories of logits processors by name, beside those that we ship (see
    `cfg_core.processor_registry`): `package.module:Class`, or `{"factory": that, **options}`.
    draft_cost: under speculation, what one more draft costs, in steps without drafts. Groups whose drafts are kept too
    rarely to pay for that get fewer, down to none; 0 never backs off. Default: `cfg_core.draft_length.DRAFT_COST`.
    grammars: bounds on the size of grammars, and limits of their trial: fields of
    `cfg_core.grammar_bounds.GrammarBounds` and `cfg_core.grammar_limits.GrammarLimits`. Default: theirs.

    Plain requests on such an engine behave exactly as without it. Raises CompatibilityError for an unknown
    kv_split, a bad draft_cost or an unsupported vLLM, ConfigError for malformed logits_processors.
    """
    from cfg_core.processor_config import check_config
    from cfg_core.vllm_plugin import compat

    compat.check_version()
    register()
    ours: dict[str, Any] = {"kv_split": compat.check_kv_split(kv_split)}
    if logits_processors:
        ours["logits_processors"] = check_config(logits_processors)
    if draft_cost is not None:
        ours["draft_cost"] = compat.check_draft_cost(draft_cost)
    if grammars:
        ours[compat.GRAMMARS] = compat.check_grammars(grammars)
    return {
        "scheduler_cls": "cfg_core.vllm_plugin.scheduler.GuidedScheduler",
        "worker_cls": "cfg_core.vllm_plugin.worker.GuidedWorker",
        "additional_config": {compat.ADDITIONAL_CONFIG: ours},
    }


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes. Idempotent.

    It only adds to the frontend: guided requests are checked, `guidance_logprobs` read, and counts of guided tokens
    dropped. An engine is guided by its arguments alone.
    """
    from cfg_core.vllm_plugin import admission, grammar_sandbox, guided_tokens, stream_logprobs

    admission.install()
    grammar_sandbox.install()
    guided_tokens.install()
    stream_logprobs.install()

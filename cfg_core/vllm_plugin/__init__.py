"""Guidance for any vLLM entry point.

    from vllm import LLM, SamplingParams
    from cfg_core.vllm_plugin import guided_engine_args

    llm = LLM(model, **guided_engine_args()) llm.generate(prompt,
    SamplingParams(extra_args={"guidance_scale": 1.5, "negative_prompt": ".."}))

`python -m cfg_core.vllm_plugin` prints the same as flags for `vllm serve`. What is replaced inside
vLLM is in patches.py; frontend/, core/ and worker/ hold what runs in each kind of process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEDULER = "cfg_core.vllm_plugin.core.scheduler.GuidedScheduler"
WORKER = "cfg_core.vllm_plugin.worker.worker.GuidedWorker"


def guided_engine_args(
    kv_split: str = "elastic",
    logits_processors: Mapping[str, Any] | None = None,
    draft_cost: float | None = None,
    grammars: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Engine arguments that make a vLLM engine understand guidance.

    kv_split: `elastic` lets the boundary between the leaders' and the followers' share of the KV
        pool move with demand; `even` gives each exactly half (vLLM RFC #5825).
    logits_processors: factories of logits processors by name, beside those that we ship (see
        `cfg_core.logits_processors.registry`): `package.module:Class`, or `{"factory": that,
        **options}`.
    draft_cost: under speculation, what one more draft costs, in steps without drafts. Groups whose
        drafts are accepted too rarely to pay for that get fewer, down to none; 0 never backs off.
        Default: `cfg_core.draft_length.DRAFT_COST`.
    grammars: bounds on the size of grammars, and limits of their trial: fields of
        `cfg_core.grammars.bounds.GrammarBounds` and `cfg_core.grammars.limits.GrammarLimits`.
        Default: theirs.

    Plain requests on such an engine behave exactly as without it. Raises CompatibilityError for an
    unknown kv_split, a bad draft_cost or an unsupported vLLM, ConfigError for malformed
    logits_processors.
    """
    from cfg_core.logits_processors.config import check_config
    from cfg_core.vllm_plugin import config, patches

    config.check_version()
    patches.apply("frontend")
    ours: dict[str, Any] = {"kv_split": config.check_kv_split(kv_split)}
    if logits_processors:
        ours["logits_processors"] = check_config(logits_processors)
    if draft_cost is not None:
        ours["draft_cost"] = config.check_draft_cost(draft_cost)
    if grammars:
        ours[config.GRAMMARS] = config.check_grammars(grammars)
    return {
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKER,
        "additional_config": {config.ADDITIONAL_CONFIG: ours},
    }


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes.

    It patches the frontend where the command line asks for a guided engine (`vllm serve` with our
    flags), and does nothing anywhere else. Programs call `guided_engine_args`, which patches their
    process; schedulers and workers patch theirs when vLLM makes them.
    """
    if asks_for_guidance(sys.argv):
        from cfg_core.vllm_plugin import patches

        patches.apply("frontend")


def asks_for_guidance(command_line: Sequence[str]) -> bool:
    """Whether a command line names our scheduler, itself or in the file of its `--config`."""
    if any(SCHEDULER in argument for argument in command_line):
        return True
    for flag, value in zip(command_line, [*command_line[1:], ""], strict=True):
        name, _, joined = flag.partition("=")
        file = Path(joined or value)
        if name == "--config" and file.is_file():
            return SCHEDULER in file.read_text(encoding="utf-8")
    return False

"""Guidance for any vLLM entry point.

    from vllm import LLM, SamplingParams
    from cfg_core.vllm_plugin import guided_engine_args

    llm = LLM(model, **guided_engine_args())
    fields = {"guidance_scale": 1.5, "negative_prompt": ".."}
    llm.generate(prompt, SamplingParams(extra_args=fields))

`python -m cfg_core.vllm_plugin` prints the same arguments as flags for `vllm serve`. The
tables in vllm_patches.py list what is changed inside vLLM. The packages frontend/, core/ and
worker/ hold the code of each kind of process.
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
    allow_untested_vllm: bool = False,
    max_followers: int | None = None,
    traced: bool = False,
) -> dict[str, Any]:
    """Engine arguments that make a vLLM engine understand guidance.

    kv_split: `elastic` lets the boundary between the leaders' and the followers' share of the KV
        pool move with demand; `even` gives each exactly half (vLLM RFC #5825).
    logits_processors: factories of logits processors by name, in addition to those that we ship
        (see `cfg_core.logits_processors.registry`). A factory is `package.module:Class`, or
        `{"factory": that, **options}`.
    draft_cost: under speculation, the cost of one more draft, in steps without drafts. Groups whose
        drafts are accepted too rarely to be worth that cost get fewer drafts, down to none. With 0,
        speculation never backs off. Default: measured while the engine runs, and
        `cfg_core.policy.draft_length.DRAFT_COST` where it is not (docs/speculation.md).
    grammars: limits on the trials of grammars: fields of `cfg_core.grammars.trials.GrammarLimits`.
        Default: the defaults of this class.
    allow_untested_vllm: accept a vLLM version that was not tested, if it has all names and
        signatures that we use. Guidance may still be wrong on it.

    max_followers: the most followers that one request may have (`guidance_streams`).
        Default: `cfg_core.params.follower.USUAL_MAX_FOLLOWERS`.
    traced: tell the frontend when followers ran, for spans of each stream (wire.follower_events).

    Plain requests on such an engine behave exactly as without it. Raises CompatibilityError for an
    unknown kv_split, a bad draft_cost or max_followers, or an unsupported vLLM, and ConfigError for
    malformed logits_processors or grammars.
    """
    from cfg_core.logits_processors.config import check_config
    from cfg_core.vllm_plugin import config, vllm_patches
    from cfg_core.vllm_plugin.processes import TravellingOptions
    from cfg_core.vllm_plugin.versions import tested

    tested.check_version(allow_untested_vllm)
    tested.check_names(__name__, vllm_patches.ROWS)
    vllm_patches.apply("frontend")
    ours: dict[str, Any] = {"kv_split": config.check_kv_split(kv_split)}
    if logits_processors:
        ours["logits_processors"] = check_config(logits_processors)
    if draft_cost is not None:
        ours["draft_cost"] = config.check_draft_cost(draft_cost)
    if grammars:
        ours[config.GRAMMARS] = config.check_grammars(grammars)
    if max_followers is not None:
        ours[config.MAX_FOLLOWERS] = config.check_max_followers(max_followers)
    if traced:
        ours[config.TRACED] = True
    if allow_untested_vllm:
        ours[config.ALLOW_UNTESTED] = True
    return {
        "scheduler_cls": SCHEDULER,
        "worker_cls": WORKER,
        "additional_config": {config.ADDITIONAL_CONFIG: TravellingOptions(ours)},
    }


def register() -> None:
    """Entry point `vllm.general_plugins`: vLLM calls it in each of its processes.

    It patches the frontend if the command line asks for a guided engine (`vllm serve` with our
    flags), or if the engine arguments for which vLLM loads its plugins do. Otherwise it does
    nothing. Programs call `guided_engine_args`, which patches their process, and each process to
    which its result is sent (processes.py). Schedulers and workers patch their own process when
    vLLM makes them.
    """
    from cfg_core.vllm_plugin import processes

    arguments = processes.guided_arguments(sys._getframe(1))
    if arguments is not None:
        processes.let_travel(arguments)
    if arguments is not None or asks_for_guidance(sys.argv):
        from cfg_core.vllm_plugin import vllm_patches

        vllm_patches.apply("frontend")


def asks_for_guidance(command_line: Sequence[str]) -> bool:
    """Whether a command line, or the file of its `--config`, names our scheduler."""
    if any(SCHEDULER in argument for argument in command_line):
        return True
    for flag, value in zip(command_line, [*command_line[1:], ""], strict=True):
        name, _, joined = flag.partition("=")
        file = Path(joined or value)
        if name == "--config" and file.is_file():
            return SCHEDULER in file.read_text(encoding="utf-8")
    return False

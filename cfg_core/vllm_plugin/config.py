"""The plugin's own options in a vLLM engine's configuration, and the checks at engine start.

The options are in vLLM's `additional_config`, under the key ADDITIONAL_CONFIG. `guided_engine_args`
writes them, and each process of the engine reads them with the functions below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cfg_core.errors import CompatibilityError
from cfg_core.grammars.trials import GrammarLimits
from cfg_core.keys import check_keys
from cfg_core.logits_processors import config as processor_config
from cfg_core.params.follower import USUAL_MAX_FOLLOWERS
from cfg_core.policy.pool import KV_SPLITS
from cfg_core.vllm_plugin import drafters
from cfg_core.vllm_plugin.versions.tested import TESTED, check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

ADDITIONAL_CONFIG = "cfg_serve"
"""Key of our options in vLLM's `additional_config`."""

ALLOW_UNTESTED = "allow_untested_vllm"
"""Key, in our options: whether a vLLM version may run that was not tested."""

PREFIX_LM = frozenset({"HrmTextForCausalLM"})
"""The architectures whose attention is vLLM's PrefillPrefixLMAttention."""


def kv_split_of(config: VllmConfig) -> str:
    """`elastic` or `even`, from `additional_config`.

    Raises CompatibilityError for anything else.
    """
    return check_kv_split(ours(config).get("kv_split", KV_SPLITS[0]))


def draft_cost_of(config: VllmConfig) -> float | None:
    """The cost of one more draft, in steps without drafts, from `additional_config`.

    None: it is to be measured (`cfg_core.policy.draft_cost`). Raises CompatibilityError for a bad
    value.
    """
    value = ours(config).get("draft_cost")
    return None if value is None else check_draft_cost(value)


def check_draft_cost(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise CompatibilityError(
            f"draft_cost is {value!r}: it must be a number of 0 or more (0: drafting never"
            " backs off)."
        )
    return float(value)


TRACED = "traced"
"""Key, in our options: whether the engine tells the frontend when followers ran."""


def is_traced(config: VllmConfig) -> bool:
    """Whether the frontend is told when followers ran, from `additional_config`."""
    return bool(ours(config).get(TRACED, False))


MAX_FOLLOWERS = "max_followers"
"""Key, in our options, of the largest number of followers that a group may have."""


def max_followers_of(config: VllmConfig) -> int:
    """Most followers of one group, from `additional_config`. Raises CompatibilityError."""
    return check_max_followers(ours(config).get(MAX_FOLLOWERS, USUAL_MAX_FOLLOWERS))


def check_max_followers(value: object) -> int:
    if type(value) is not int or value < 1:
        raise CompatibilityError(f"{MAX_FOLLOWERS} is {value!r}: it must be an integer above 0.")
    return value


def processors_of(config: VllmConfig) -> dict[str, Any]:
    """The factories of logits processors by name, from `additional_config`.

    Raises ConfigError if they are malformed.
    """
    return processor_config.check_config(ours(config).get(processor_config.FIELD, {}))


GRAMMARS = "grammars"
"""Key, in our options, of the fields of GrammarLimits."""


def grammar_limits_of(config: VllmConfig) -> GrammarLimits:
    """What the trial of a grammar may cost, from `additional_config`."""
    return GrammarLimits(**(ours(config).get(GRAMMARS) or {}))


def check_grammars(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` if all are known and have usable values.

    A value is a positive number, for `at_start` true or false, and for `json_whitespace` also None.
    Raises ConfigError for an unknown name, and CompatibilityError for a value that cannot be used.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(GrammarLimits)}
    check_keys(fields, defaults, GRAMMARS)
    for name, value in fields.items():
        is_switch = isinstance(defaults[name], bool)
        is_unlimited = name == "json_whitespace" and value is None
        if not (isinstance(value, bool) if is_switch else is_unlimited or _is_positive(value)):
            needed = "true or false" if is_switch else "a number above 0"
            raise CompatibilityError(f"`{name}` in `{GRAMMARS}` is {value!r}: it must be {needed}.")
    return dict(fields)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 < value < math.inf


def ours(config: VllmConfig) -> dict[str, Any]:
    return (config.additional_config or {}).get(ADDITIONAL_CONFIG) or {}


def merged(base: Mapping[str, Any], plugin: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the plugin's engine arguments; where both hold a mapping, the two are joined."""
    joined = {
        k: {**base[k], **v}
        for k, v in plugin.items()
        if isinstance(v, dict) and isinstance(base.get(k), dict)
    }
    return {**base, **plugin, **joined}


def check_kv_split(value: object) -> str:
    if value not in KV_SPLITS:
        raise CompatibilityError(
            f"kv_split is {value!r}: it must be one of {', '.join(KV_SPLITS)}."
        )
    return str(value)


def check_overrides(cls: type) -> None:
    """Refuse a vLLM that lacks a method which `cls` or a base of it overrides (`@override`).

    vLLM would never call such an override. Raises CompatibilityError.
    """
    for ours in cls.__mro__:
        above = ours.__mro__[1:]
        for name, method in vars(ours).items():
            if getattr(method, "__override__", False) and not any(name in vars(b) for b in above):
                raise CompatibilityError(
                    f"vLLM has no method {name} for {ours.__qualname__} to override: install a"
                    f" tested version as released ({', '.join(TESTED)})."
                )


def guided_class(drafter: object, guided: Mapping[type, type]) -> type:
    """The class of ours that replaces the class of vLLM's `drafter`.

    guided: our class for each of vLLM's classes.
    Raises CompatibilityError for a class that is not in `guided`, and as check_overrides does.
    """
    if type(drafter) not in guided:
        raise CompatibilityError(
            f"cfg-serve cannot guide {type(drafter).__name__}: use another speculative method."
        )
    cls = guided[type(drafter)]
    check_overrides(cls)
    return cls


def check_version_of(config: VllmConfig) -> None:
    """Refuse, at engine start, a vLLM that was not tested. Raises CompatibilityError."""
    check_version(ours(config).get(ALLOW_UNTESTED, False))


def cannot_guide(config: VllmConfig) -> str | None:
    """Why this engine cannot guide exactly, as the end of "... does not work with"; None if it can.

    Such an engine refuses guided requests, and those with logits processors, with this reason. It
    serves plain requests with vLLM's own runners.
    """
    model, parallel = config.model_config, config.parallel_config
    causes = {
        "batch-sharded sampling (set enable_batch_sharded_sampling=False)": (
            parallel.enable_batch_sharded_sampling
        ),
        "context parallelism (use tensor_parallel_size)": (
            parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1
        ),
        "KV connectors (remove kv_transfer_config)": config.kv_transfer_config is not None,
        "encoder connectors (remove ec_transfer_config)": config.ec_transfer_config is not None,
        "encoder-decoder models": model.is_encoder_decoder,
        "models that read a prompt in both directions": reads_both_ways(config),
        "diffusion models": model.is_diffusion,
        "watermarking (remove watermark_config)": config.watermark_config is not None,
    }
    found = [
        *drafters.why_not_guided(config, recurrent=is_recurrent(config)),
        *(cause for cause, applies in causes.items() if applies),
    ]
    return "; ".join(found) or None


def refusal(cause: str) -> str:
    """The sentence for a request, and for the log, on an engine that cannot guide.

    cause: what `cannot_guide` returned.
    """
    return (
        f"this engine serves plain requests only: guidance does not work with {cause} in this"
        " version of cfg-serve."
    )


def reads_both_ways(config: VllmConfig) -> bool:
    """Whether the tokens of a step attend to each other in both directions (prefix LM).

    What such a model says depends on the steps in which its prompt is read, and a guided stream may
    wait one token short of its prompt's end.
    """
    return not PREFIX_LM.isdisjoint(config.model_config.architectures)


def is_recurrent(config: VllmConfig) -> bool:
    """Whether the model has layers with a state (Mamba, linear attention, short convolutions)."""
    return bool(config.model_config.is_hybrid or config.model_config.has_inner_state)


def step_budget(scheduler: Scheduler) -> int:
    """Number of tokens that a step may compute, drafting slots included."""
    return int(
        min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)
    )


def rows_per_stream(config: VllmConfig) -> int:
    """Tokens of a step's budget that a decoding stream takes, with drafts and drafting slots."""
    return 1 + int(config.num_speculative_tokens) + drafting_slots(config)


def drafting_slots(config: VllmConfig) -> int:
    """Tokens of a step's budget that each scheduled stream takes beside its own, for drafting."""
    speculative = config.speculative_config
    return 0 if speculative is None else int(speculative.max_num_new_slots_for_drafting)

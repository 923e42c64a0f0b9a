"""Which drafters of vLLM draft for groups, which for plain requests only, and which may not run.

A drafter never decides what a text says, only how fast it comes: vLLM's rejection sampler verifies
each draft against the target's blended rows. What a drafter must have is a way to draft the same
tokens for all streams of a group. There are two. One that is a model has its rows blended
(worker/drafter_v1.py, drafter_v2.py). One that looks tokens up in a text reads the leader's, and
the followers get its drafts (the runners' `propose`).

A drafter that has neither way drafts for plain requests. The scheduler gives groups no drafts then
(core/speculation.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig

MODELS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods whose drafter is a model."""

LOOKUPS = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods whose drafter reads tokens alone."""

METHODS = (*MODELS, *LOOKUPS)
"""The methods that draft for groups, too."""

UNGUIDED = {
    "medusa": "its heads draft in a pass of their own, without the blend",
    "mlp_speculator": "vLLM has no drafter for it",
    "dflash": "its drafter is a class of vLLM that is not replaced",
    "dspark": "its drafter is a class of vLLM that is not replaced",
    "extract_hidden_states": "it drafts nothing",
}
"""Why the other methods draft for plain requests only."""

WITHOUT_NEXT_TOKEN = (*LOOKUPS, "medusa")
"""Methods whose drafter does not read the token that was sampled last."""

GATED_DELTA_NET = "linear_num_value_heads"
"""A field of the configuration of models with gated delta nets (Qwen3-Next, Qwen3.5).

Of the recurrent layers that vLLM's CPU build can run, only these take drafts. The code of the
others ignores how many drafts were accepted, also for plain requests.
"""


def why_not_guided(config: VllmConfig, *, recurrent: bool) -> Iterator[str]:
    """The causes for which an engine with this speculation cannot guide. None if it can.

    recurrent: whether the model has layers with a state.
    """
    speculative = config.speculative_config
    if speculative is None:
        return
    method = speculative.method
    if method not in WITHOUT_NEXT_TOKEN and speculative.disable_padded_drafter_batch:
        # The next token of a stream whose sample is dropped would be -1.
        yield "drafting without padding (set disable_padded_drafter_batch=False)"
    if method == "ngram_gpu" and not config.use_v2_model_runner:
        # V1 trims such drafts in a copy of the step that has no guidance.
        yield "ngram_gpu on vLLM's V1 model runner (use ngram, or VLLM_USE_V2_MODEL_RUNNER=1)"
    if speculative.enable_adaptive_verification:
        yield "adaptive verification (set enable_adaptive_verification=False)"
    if config.parallel_config.pipeline_parallel_size > 1:
        yield "speculation with pipeline parallelism (use tensor_parallel_size)"
    if recurrent:
        yield from _states(config)


def _states(config: VllmConfig) -> Iterator[str]:
    """Models with recurrent state. vLLM keeps one state for each token of a step with drafts.

    The next step begins with the state of the last token that was accepted, so all streams of a
    group, which accept the same tokens, begin with their own states of the same place.
    """
    if not config.model_config.is_hybrid:
        yield "speculation of a model without attention (remove speculative_config)"
    if current_platform.is_cpu() and not hasattr(
        config.model_config.hf_text_config, GATED_DELTA_NET
    ):
        yield (
            "speculation of this model with recurrent state on a CPU, whose kernels take no drafts"
            " (remove speculative_config)"
        )


def must_make_all(config: VllmConfig) -> bool:
    """Whether the drafter must make all drafts in each step, also if its groups want fewer.

    The ranks of data parallelism that share experts must draft equally often. vLLM's suffix
    decoding asserts the number, and its tree of texts must see each token.
    """
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "suffix":
        return True
    return bool(config.parallel_config.data_parallel_size > 1)


def why_groups_rest(config: VllmConfig) -> str | None:
    """Why groups of this engine get no drafts, while plain requests do; None if they get some."""
    speculative = config.speculative_config
    if speculative is None:
        return None
    method = speculative.method
    if method not in METHODS:
        why = UNGUIDED.get(method, "it is unknown")
        return f"speculation by {method}, because {why} (use {', '.join(METHODS)})"
    return _heads(speculative, v2=config.use_v2_model_runner) if method == "mtp" else None


def _heads(speculative: SpeculativeConfig, *, v2: bool) -> str | None:
    """Heads for multi-token prediction that vLLM runs by classes which are not replaced."""
    if speculative.use_gemma4_mtp():
        return "Gemma 4's assistant, whose keys are the target's (use draft_model)"
    if v2 and speculative.use_multi_module_mtp():
        return (
            "several MTP heads on vLLM's Model Runner V2 (set num_speculative_tokens=1, or"
            " VLLM_USE_V2_MODEL_RUNNER=0)"
        )
    if not v2 and speculative.use_step3p5_mtp():
        return "Step 3.5's MTP heads on vLLM's V1 model runner"
    return None

"""Which architectures run here, and why the others do not. Does not import torch.

Each family on the list has a test in tests/encoders, which compares its packed forward with its own
padded forward in transformers. Other families are refused, because an encoder that ignores a bias
or a mask gives vectors that look right but are wrong.
"""

from __future__ import annotations

from cfg_core.errors import CompatibilityError
from cfg_core.prefill_only.models.checkpoint import Checkpoint
from cfg_core.prefill_only.options import EngineOptions

ENCODERS = (
    "albert",
    "bert",
    "camembert",
    "data2vec-text",
    "distilbert",
    "electra",
    "ernie",
    "eurobert",
    "gte",
    "jina_embeddings_v3",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
)
DECODERS = ("gemma", "gemma3_text", "llama", "ministral3", "mistral", "qwen2", "qwen3")

BY_RUNS = ("deberta", "deberta-v2", "gemma2", "megatron-bert", "rembert", "roformer")
"""Types that take no attention function of ours. Sequences of one length are computed at a time, by
the model's own forward, see backbones.py."""

OWN_ATTENTION = ("mpnet", *BY_RUNS)
"""Types for which the attention cannot be chosen."""

FLOAT32_ONLY = ("deberta",)
"""Types whose code in transformers mixes float32 with other types, and fails."""

_ALIBI = "it biases attention by distance (ALiBi), which packed attention does not compute"
_RELATIVE = (
    "it adds a relative position bias inside attention, which packed attention does not compute"
)
_EXPERTS = "it has experts, which transformers does not compute for this type"
REASONS = {
    "t5": _RELATIVE,
    "mt5": _RELATIVE,
    "umt5": _RELATIVE,
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "jina_bert": _ALIBI,
    "new": "its code comes with the checkpoint, and remote code is not run; transformers has this"
    " model as gte (gte-multilingual-base is published so, too)",
    "longformer": "it attends to global tokens besides a window",
    "big_bird": "it uses block-sparse attention",
    "lfm2": "its convolutions mix neighbouring tokens, which packed sequences do not separate",
    "mamba": "it has recurrent state",
    "mamba2": "it has recurrent state",
    "embedding_gemma2": "it takes images and sounds, too, and has not been tested",
    "modernvbert": "it reads images",
    "mobilebert": "its packed forward differs from its own",
}


def check_family(checkpoint: Checkpoint, options: EngineOptions) -> None:
    """Raise CompatibilityError, with the reason, if this checkpoint cannot be computed exactly."""
    config, kind = checkpoint.config, checkpoint.model_type
    if config.get("position_embedding_type", "absolute") not in ("absolute", "rope", "rotary"):
        _refuse(kind, _ALIBI if "alibi" in str(config["position_embedding_type"]) else _RELATIVE)
    if kind in REASONS:
        _refuse(kind, REASONS[kind])
    if kind == "nomic_bert" and config.get("num_experts"):
        _refuse(kind, _EXPERTS)
    if kind not in (*ENCODERS, *DECODERS, *BY_RUNS):
        own_code = "its code comes with the checkpoint, and remote code is not run"
        _refuse(kind, own_code if config.get("auto_map") else "it has not been tested")
    if kind in OWN_ATTENTION and "attention" in options.workflow:
        raise CompatibilityError(
            f"models of the type {kind} have an attention of their own: leave `attention` out of"
            " `workflow`."
        )
    if kind in FLOAT32_ONLY and options.dtype not in ("auto", "float32"):
        raise CompatibilityError(
            f"transformers computes the type {kind} in float32 only: set dtype float32."
        )
    if kind in BY_RUNS and options.quantization:  # oneDNN would keep kernels without end
        raise CompatibilityError(
            f"models of the type {kind} are not computed in {options.quantization}: leave"
            " quantization out."
        )
    if kind in BY_RUNS and options.is_causal is not None:
        raise CompatibilityError(
            f"whether attention is causal cannot be chosen for the type {kind}: leave is_causal"
            " out."
        )
    if config.get("auto_map") and kind in DECODERS and is_causal(checkpoint, options) is None:
        raise CompatibilityError(
            f"this {kind} checkpoint comes with its own code, which is not run and may use"
            " bidirectional attention: set `is_causal: false` (gte-Qwen2, LLM2Vec) or"
            " `is_causal: true` in the engine's options."
        )


def is_causal(checkpoint: Checkpoint, options: EngineOptions) -> bool | None:
    """Whether attention is causal; None: as the architecture has it."""
    named: bool | None = checkpoint.config.get("is_causal")
    return named if options.is_causal is None else options.is_causal


def _refuse(kind: str, reason: str) -> None:
    raise CompatibilityError(
        f"models of the type {kind or 'unknown'} are not supported: {reason}. Supported types:"
        f" {', '.join(sorted(ENCODERS + DECODERS + BY_RUNS))}. Try vLLM's `runner: pooling` or"
        " sentence-transformers."
    )

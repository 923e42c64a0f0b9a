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
    "bert",
    "camembert",
    "distilbert",
    "electra",
    "eurobert",
    "gte",
    "modernbert",
    "nomic_bert",
    "roberta",
    "xlm-roberta",
)
DECODERS = ("llama", "mistral", "qwen2", "qwen3")

_ALIBI = "it biases attention by distance (ALiBi), which packed attention does not compute"
_RELATIVE = (
    "it adds a relative position bias inside attention, which packed attention does not compute"
)
REASONS = {
    "deberta": "its disentangled attention mixes positions into the scores",
    "deberta-v2": "its disentangled attention mixes positions into the scores",
    "t5": _RELATIVE,
    "mt5": _RELATIVE,
    "umt5": _RELATIVE,
    "mpnet": _RELATIVE,
    "bloom": _ALIBI,
    "mpt": _ALIBI,
    "jina_bert": _ALIBI,
    "longformer": "it attends to global tokens besides a window",
    "big_bird": "it uses block-sparse attention",
    "mamba": "it has recurrent state",
    "mamba2": "it has recurrent state",
}


def check_family(checkpoint: Checkpoint, options: EngineOptions) -> None:
    """Raise CompatibilityError, with the reason, if this checkpoint cannot be computed exactly."""
    config, kind = checkpoint.config, checkpoint.model_type
    if config.get("position_embedding_type", "absolute") not in ("absolute", "rope", "rotary"):
        _refuse(kind, _ALIBI if "alibi" in str(config["position_embedding_type"]) else _RELATIVE)
    if kind in REASONS:
        _refuse(kind, REASONS[kind])
    if kind not in (*ENCODERS, *DECODERS):
        own_code = "its code comes with the checkpoint, and remote code is not run"
        _refuse(kind, own_code if config.get("auto_map") else "it has not been tested")
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
        f" {', '.join(ENCODERS + DECODERS)}. Try vLLM's `runner: pooling` or"
        " sentence-transformers."
    )

"""Random-weight models of several architectures, and a byte tokenizer.

The models are built in a second. Their output is nonsense on purpose: any error in positions,
caches or the blend changes the tokens at once. A trained model would often give the same word
anyhow.

The weights are drawn here, not by `initializer_range`, so that every layer matters and greedy text
does not repeat itself:
  - each matrix keeps the variance of its input (gain 1), and queries are larger (gain 3), so that
    attention picks tokens rather than averaging over them;
  - the head gives logits of standard deviation 5, whose gaps are large against float32 rounding;
  - where embedding and head are one matrix (Gemma-2), the norms after each block are large.
    Otherwise the model would only repeat its last token.
Sizes follow the rule of vLLM on a CPU: head size a multiple of 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    FalconH1Config,
    Gemma2Config,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

BOS, EOS, PAD, UNK = range(4)
NUM_SPECIAL = 4
VOCAB_SIZE = NUM_SPECIAL + 256
HIDDEN, HEADS, HEAD_DIM, LAYERS, FFN, POSITIONS = 64, 2, 32, 2, 128, 512
HEAD_STD = 5.0
SPECIAL_IDS: dict[str, Any] = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
    **SPECIAL_IDS,
}


def llama() -> PretrainedConfig:
    return LlamaConfig(**DECODER)


def gemma2() -> PretrainedConfig:
    """A sliding and a full layer, which are two KV groups in vLLM.

    The soft-caps of attention and logits are small enough to have an effect.
    """
    return Gemma2Config(
        **{**DECODER, "tie_word_embeddings": True},
        query_pre_attn_scalar=HEAD_DIM,
        sliding_window=32,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=15.0,
        layer_types=["sliding_attention", "full_attention"],
    )


def qwen3_moe() -> PretrainedConfig:
    return Qwen3MoeConfig(
        **DECODER,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=HIDDEN,
        norm_topk_prob=True,
    )


MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32}
MAMBA2 |= {"mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 64}


def mamba2() -> PretrainedConfig:
    """Recurrent layers alone."""
    return Mamba2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN,
        num_heads=4,
        head_dim=32,
        state_size=32,
        num_hidden_layers=LAYERS,
        n_groups=1,
        chunk_size=64,
        tie_word_embeddings=False,
        **SPECIAL_IDS,
    )


def falcon_h1() -> PretrainedConfig:
    """Attention and a recurrent part in each layer."""
    return FalconH1Config(**DECODER, **MAMBA2, mamba_d_ssm=2 * HIDDEN)


def granite_hybrid() -> PretrainedConfig:
    """A recurrent layer, and one of attention and experts."""
    return GraniteMoeHybridConfig(
        **DECODER,
        **MAMBA2,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=HIDDEN,
    )


RECURRENT = (mamba2, falcon_h1, granite_hybrid)
ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    f.__name__: f for f in (llama, gemma2, qwen3_moe, *RECURRENT)
}

SEEDS = dict.fromkeys(ARCHITECTURES, 0) | {"granite_hybrid": 2}
"""Seeds for which `Oracle.margin` is above `oracle.MIN_MARGIN`.

They were chosen with the reference only.
"""


def build(name: str, folder: Path) -> Path:
    """Write model `name` and the tokenizer to `folder`, float32, and return it."""
    model = make_model(name)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_model(name: str, seed: int | None = None) -> PreTrainedModel:
    config = ARCHITECTURES[name]()
    config.dtype = "float32"
    # Eager attention: the only one in transformers with Gemma-2's soft-cap, and the plainest for
    # all.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    draw_weights(model, torch.Generator().manual_seed(SEEDS[name] if seed is None else seed))
    return model


@torch.no_grad()
def draw_weights(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Overwrite every parameter of `model` in place, in the order of their names."""
    tied = model.config.tie_word_embeddings
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(_shaped(name, noise, tied=tied))


def _shaped(name: str, noise: torch.Tensor, *, tied: bool) -> torch.Tensor:
    """Turn standard normal `noise` of the parameter's shape into its values."""
    if noise.dim() == 1:
        return _vector(name, noise, tied=tied)
    if "conv1d" in name:  # one filter for each channel
        return noise / math.sqrt(noise.shape[-1])
    if "lm_head" in name or ("embed_tokens" in name and tied):
        return noise * HEAD_STD / math.sqrt(HIDDEN)
    if "embed" in name:
        return noise
    fan_in = noise.shape[-1]
    return noise * (3 if "q_proj" in name else 1) / math.sqrt(fan_in)


def _vector(name: str, noise: torch.Tensor, *, tied: bool) -> torch.Tensor:
    """Biases near 0, norm weights near 1, and states that forget at different speeds.

    Gemma stores `weight - 1`, and its post-norms are large here.
    """
    if "A_log" in name:
        return torch.log(1 + 4 * noise.abs())
    if "dt_bias" in name:
        return noise * 0.5 - 1
    if name.endswith("bias"):
        return noise * 0.1
    if tied:
        return noise * 0.1 + (60 if "post_" in name else 0)
    return 1 + noise * 0.1 + (2 if "q_norm" in name else 0)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is one token. Every text begins with a BOS token, as with Llama's tokenizer."""
    specials = ["<bos>", "<eos>", "<pad>", "<unk>"]
    pieces = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), specials, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer

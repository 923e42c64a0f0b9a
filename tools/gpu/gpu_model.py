"""A model with random weights, because a machine without network has no others."""

from __future__ import annotations

from pathlib import Path

POSITIONS = 131_072


def model_of_ids(folder: Path, vocabulary: int) -> Path:
    """Make a small Llama with a large vocabulary and many positions in `folder`; without tokenizer.

    It is wide enough for the kernels that real models use, and its scores are spread widely, so
    that few tokens are nearly equal.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=POSITIONS,
        rope_theta=1e6,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.normal_(std=5 / 512**0.5)
    model.save_pretrained(folder)
    return folder

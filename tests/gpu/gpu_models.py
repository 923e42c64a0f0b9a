"""Tiny models with random weights, wide enough for the kernels that real models use."""

from __future__ import annotations

import random
from pathlib import Path

VOCABULARY = 4096


def make_llama(folder: Path, layers: int = 4) -> Path:
    """A Llama whose scores are spread widely, so that few tokens are nearly equal."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.normal_(std=5 / 512**0.5)
    model.save_pretrained(folder)
    return folder


def make_pairs() -> list[tuple[list[int], list[int]]]:
    """Prompts and negatives of many lengths. The last ones repeat themselves, for n-grams."""
    rng = random.Random(3)
    lengths = [(1, 40), (40, 1), (33, 33), (100, 17), (17, 100), (150, 120), (16, 48), (300, 64)]

    def ids(length: int) -> list[int]:
        return [rng.randrange(4, VOCABULARY) for _ in range(length)]

    pairs = [(ids(prompt), ids(negative)) for prompt, negative in lengths]
    phrase = ids(12)
    return [*pairs, (phrase * 4, phrase * 2), (phrase * 3, [7])]

"""The models of the slices, each behind one function.

They have random weights, because a machine without network has no others.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHAT = ROOT / "models" / "SmolLM2-135M-Instruct"
STORIES = ROOT / "models" / "stories"
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


def served_model() -> Path:
    """A model with a tokenizer and a chat template, for the server: as large as there is one.

    models/real_size.py makes one with a vocabulary of 151,936. Without it: the chat model, or the
    stories in the repository.
    """
    if (ROOT / "models" / "real_size.py").exists():
        sys.path.append(str(ROOT / "models"))
        from real_size import real_size_model  # type: ignore[import-not-found, unused-ignore]

        return Path(real_size_model())
    return CHAT if CHAT.is_dir() else STORIES

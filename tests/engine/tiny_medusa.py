"""A Medusa checkpoint whose heads draft the token that the target has just sampled, again."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def build(target: Path, folder: Path, heads: int) -> None:
    """Write heads for the model in `target`: its own head, behind blocks that change nothing."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    vocabulary, hidden = model.lm_head.weight.shape
    weights = {}
    for i in range(heads):
        weights[f"blocks.{i}.layers.0.weight"] = torch.zeros(hidden, hidden)
        weights[f"lm_heads.{i}.weight"] = model.lm_head.weight.detach().clone()
    save_file(weights, folder / "model.safetensors")
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": hidden,
        "vocab_size": vocabulary,
        "num_heads": heads,
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))

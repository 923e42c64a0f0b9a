"""Random LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "v_proj", "down_proj", "lm_head")


def make_adapter(model: Path, folder: Path, seed: int = 5) -> Path:
    """A random adapter, as PEFT saves one."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if any(target in name for target in TARGETS):
            stem, (rows, columns) = f"base_model.model.{name.removesuffix('.weight')}", weight.shape
            weights[f"{stem}.lora_A.weight"] = (
                torch.randn(RANK, columns, generator=generator) / columns**0.5
            )
            weights[f"{stem}.lora_B.weight"] = (
                torch.randn(rows, RANK, generator=generator) / RANK**0.5
            )
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder

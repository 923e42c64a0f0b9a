"""Guided generation of Hugging Face transformers, with which guided engines are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def guided_generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    negatives: Sequence[Sequence[int]],
    scale: float,
    tokens: int,
    **sampling: Any,
) -> list[list[int]]:
    """The token ids that `generate(guidance_scale=...)` gives: so many for each prompt, in a batch.

    Greedy, if `sampling` says nothing else. No text ends by itself.
    """
    ids, mask = _padded(prompts, model.device)
    negative, negative_mask = _padded(negatives, model.device)
    model.generation_config.eos_token_id = None
    made = model.generate(
        ids,
        attention_mask=mask,
        negative_prompt_ids=negative,
        negative_prompt_attention_mask=negative_mask,
        guidance_scale=scale,
        max_new_tokens=tokens,
        pad_token_id=0,
        **{"do_sample": False, **sampling},
    )
    rows: list[list[int]] = made[:, ids.shape[1] :].tolist()
    return rows


def _padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask [B, T] int64, padded on the left."""
    import torch

    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

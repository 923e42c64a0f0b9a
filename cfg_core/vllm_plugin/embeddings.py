"""Prompts as embeddings: how a follower's travel from admission to the scheduler.

vLLM takes the embeddings of a request's own prompt as a tensor. Those of a follower are among the
guidance fields, which vLLM's encoder sends as they are, so here they become bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import VLLMClientError
from vllm.renderers.embed_utils import safe_load_prompt_embeds

from cfg_core.errors import GuidanceError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def read(model: ModelConfig, value: object, param: str) -> torch.Tensor:
    """The embeddings [T, hidden size] that a caller gave, in the dtype of the model, on the CPU.

    value: a tensor, or over HTTP the base64 of torch.save, which vLLM loads without running code.
    Raises GuidanceError if the engine takes no embeddings, and for what cannot be used.
    """
    if not model.enable_prompt_embeds:
        raise GuidanceError(
            f"this engine takes no prompt embeddings: start it with enable_prompt_embeds, or leave"
            f" {param} out.",
            param,
        )
    if isinstance(value, str):
        try:
            value = safe_load_prompt_embeds(model, value.encode())
        except (VLLMClientError, ValueError) as error:
            raise GuidanceError(f"{param} cannot be read: {error}", param) from error
    size = model.get_inputs_embeds_size()
    usable = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2
    if not usable or not len(value) or value.shape[1] != size:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise GuidanceError(
            f"{param} must be a tensor of floating point numbers, of shape [tokens, {size}], not"
            f" {shape}.",
            param,
        )
    return value.detach().to("cpu", model.dtype).contiguous()


def packed(embeds: torch.Tensor) -> dict[str, Any]:
    """Embeddings as an object of plain values."""
    values = embeds.contiguous().view(torch.uint8)
    dtype = str(embeds.dtype).removeprefix("torch.")
    return {"shape": list(embeds.shape), "dtype": dtype, "data": values.numpy().tobytes()}


def unpacked(value: Mapping[str, Any]) -> torch.Tensor:
    """The inverse of `packed`."""
    values = torch.frombuffer(bytearray(value["data"]), dtype=getattr(torch, value["dtype"]))
    return values.view(value["shape"])


def with_tokens(embeds: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, list[bool] | None]:
    """Embeddings before `num_tokens` tokens, as vLLM takes such a prompt.

    Returns the embeddings, with rows of zeros for the tokens, and for each position whether it is a
    token; None if all are embeddings.
    """
    if not num_tokens:
        return embeds, None
    rows = embeds.new_zeros(num_tokens, embeds.shape[1])
    return torch.cat([embeds, rows]), [False] * len(embeds) + [True] * num_tokens

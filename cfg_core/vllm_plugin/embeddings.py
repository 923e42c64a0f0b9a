"""Prompts as embeddings: how a follower's travel from admission to the scheduler.

vLLM takes the embeddings of a request's own prompt as a tensor. Those of a follower are among the
guidance fields, which vLLM's encoder sends as they are, so here they become bytes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pybase64
import torch
from vllm.exceptions import VLLMClientError
from vllm.renderers.embed_utils import safe_load_prompt_embeds

from cfg_core.errors import GuidanceError

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_OVERHEAD = 64 << 10
"""Bytes that the entries of an uncompressed file of torch may have beyond the file's own."""


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
        value = _loaded(model, value, param)
    size = model.get_inputs_embeds_size()
    usable = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 2
    if (
        not isinstance(value, torch.Tensor)
        or not usable
        or value.shape[1] != size
        or not len(value)
    ):
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise GuidanceError(
            f"{param} must be a tensor of floating point numbers, of shape [tokens, {size}], not"
            f" {shape}.",
            param,
        )
    if len(value) > model.max_model_len:  # before anything is copied
        raise GuidanceError(
            f"{param} has {len(value)} tokens, and the context is {model.max_model_len}: shorten"
            " it.",
            param,
        )
    return value.detach().to("cpu", model.dtype).contiguous()


def _loaded(model: ModelConfig, text: str, param: str) -> object:
    check_file(text, param)
    try:
        return safe_load_prompt_embeds(model, text.encode())
    except (VLLMClientError, ValueError) as error:
        raise GuidanceError(f"{param} cannot be read: {error}", param) from error


def check_file(text: str, param: str) -> None:
    """Raise GuidanceError if the base64 of torch.save grows when it is loaded.

    torch.save does not compress, and torch.load reads compressed files: 8 MB may become 8 GB.
    """
    try:
        data = pybase64.b64decode(text.encode(), validate=True)
        sizes = [entry.file_size for entry in zipfile.ZipFile(BytesIO(data)).infolist()]
    except (ValueError, zipfile.BadZipFile, NotImplementedError):  # the last: a later zip format
        raise GuidanceError(
            f"{param} must be the base64 of what torch.save wrote of a tensor.", param
        ) from None
    if sum(sizes) > len(data) + _OVERHEAD:
        raise GuidanceError(f"{param} is compressed: send what torch.save wrote.", param)


def packed(
    embeds: torch.Tensor,
    token_ids: Sequence[int] | None = None,
    are_tokens: Sequence[bool] | None = None,
) -> dict[str, Any]:
    """Embeddings [T, hidden size] as an object of plain values.

    token_ids, are_tokens: for a prompt of tokens and embeddings, T values each. Where are_tokens is
        True, the position is the token and not the embedding.
    """
    values = embeds.contiguous().view(torch.uint8)
    dtype = str(embeds.dtype).removeprefix("torch.")
    out = {"shape": list(embeds.shape), "dtype": dtype, "data": values.numpy().tobytes()}
    if are_tokens is not None:
        out |= {"token_ids": list(token_ids or ()), "are_tokens": list(are_tokens)}
    return out


def request_fields(value: Mapping[str, Any], output: list[int]) -> dict[str, Any]:
    """What `packed` made, before the tokens of `output`, as arguments of vLLM's Request."""
    values = torch.frombuffer(bytearray(value["data"]), dtype=getattr(torch, value["dtype"]))
    embeds = values.view(value["shape"])
    length = len(embeds)
    ids, are_tokens = value.get("token_ids"), value.get("are_tokens")
    if output:
        embeds = torch.cat([embeds, embeds.new_zeros(len(output), embeds.shape[1])])
        ids = [*(ids or [0] * length), *output]
        are_tokens = [*(are_tokens or [False] * length), *([True] * len(output))]
    return {"prompt_token_ids": ids, "prompt_embeds": embeds, "prompt_is_token_ids": are_tokens}

"""Linear layers whose weights oneDNN lays out once, at load, for the CPU of this machine.

torch's own `nn.Linear` passes a plain matrix to oneDNN, which rearranges it in every call, or in
float32 to MKL, which is faster than oneDNN on some CPUs. The operators used here are those that
torch.compile emits for frozen weights. They are not public; `PRIVATE` lists them.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TypeGuard

import torch
from torch import nn
from transformers.activations import GELUActivation

PRIVATE = (
    "_reorder_linear_weight",
    "_linear_pointwise",
    "_is_mkldnn_bf16_supported",
    "_is_mkldnn_fp16_supported",
)
"""Operators of torch.ops.mkldnn that this module calls."""

_TURNS = 9
_MIN_WEIGHTS = 16_384  # for fewer weights, the call costs more than the layout saves


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on the CPU. Its weights cannot be changed or saved.

    gelu: apply the exact GELU in the same pass.
    """

    def __init__(self, linear: nn.Linear, *, gelu: bool = False) -> None:
        super().__init__()
        self._after = ("gelu", "none") if gelu else ("none", "")
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(
            linear.weight.detach().contiguous(), None
        )
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        name, variant = self._after
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self.weight, self.bias, name, [], variant
        )
        return result


def pack_linears(model: nn.Module) -> int:
    """Replace the linear layers of `model` that gain from it, in place; returns how many."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    num_packed = 0
    for module in list(model.modules()):
        num_packed += _fuse_gelu(module)
        for name, child in list(module.named_children()):
            if _can_be_packed(child) and child.weight.numel() >= _MIN_WEIGHTS:
                setattr(module, name, PackedLinear(child))
                num_packed += 1
    return num_packed


def rows_of(num_tokens: int) -> int:
    """How many rows a forward of so many tokens has on a CPU: up to an eighth more, or up to 3.

    oneDNN compiles and keeps a kernel for each number of rows. Without rounding, every batch would
    spend milliseconds on kernels of its own, and memory would grow by hundreds of megabytes. A
    short text that comes alone waits for each row, so steps are small there.
    """
    step = 1 << min(max(num_tokens.bit_length() - 4, 2), 5)
    return num_tokens + -num_tokens % step


def packs_bfloat16() -> bool:
    """Whether oneDNN computes layers in bfloat16 on this CPU, if need be by converting values."""
    return bool(
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@cache
def _float32_gains() -> bool:
    """Whether this CPU computes packed layers faster than torch's own, in float32.

    Measured in a tenth of a second, with a layer of MiniLM. On an EPYC without AVX-512, torch's own
    layers embed 6% to 11% more texts.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        own, rows = nn.Linear(1536, 384), torch.randn(256, 1536)
        packed = PackedLinear(own)
        turns = [(_seconds(own, rows), _seconds(packed, rows)) for _ in range(_TURNS)]
    least_own, least_packed = map(min, zip(*turns, strict=True))
    return bool(least_packed < least_own)


def _seconds(layer: nn.Module, rows: torch.Tensor) -> float:
    start = time.perf_counter()
    layer(rows)
    return time.perf_counter() - start


def _can_be_packed(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether `module` is a plain linear layer that this CPU computes faster when it is packed.

    torch computes layers of a dtype without oneDNN if oneDNN does not support it on this CPU. An
    example is bfloat16 on a CPU that has only AVX2.
    """
    if type(module) is not nn.Linear:
        return False
    if module.weight.dtype == torch.bfloat16:
        return packs_bfloat16()
    if module.weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return module.weight.dtype == torch.float32 and _float32_gains()


def _fuse_gelu(module: nn.Module) -> int:
    """Fuse `dense` and `intermediate_act_fn` of a BERT-like layer; returns how many were fused.

    Separately, they are two passes over the widest rows of the model.
    """
    dense = getattr(module, "dense", None)
    if not _can_be_packed(dense) or not isinstance(
        getattr(module, "intermediate_act_fn", None), GELUActivation
    ):
        return 0
    module.dense = PackedLinear(dense, gelu=True)
    module.intermediate_act_fn = nn.Identity()
    return 1

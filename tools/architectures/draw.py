"""Random weights with which every layer of a model matters, whatever its family.

The rules are those of tiny_models.py, by the shape and the name of a parameter, with the ranges
that recurrent layers need. A parameter's values depend on its name and the seed alone. So a model
of transformers and one of vLLM, whose names differ, are drawn by the same rules.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

HEAD_STD = 5.0
"""Standard deviation of the logits."""

EMBEDDINGS = re.compile(r"embed|wte|wpe|word_embeddings|tok_embeddings")
HEADS = re.compile(r"lm_head|embed_out|output_layer\.weight$|^output\.weight$")
NOT_THE_INPUT = re.compile(r"rotary|norm|proj|position|wpe|per_layer")


@torch.no_grad()
def draw(
    parameters: Iterable[tuple[str, Tensor]],
    seed: int,
    *,
    tied: bool,
    gains: Mapping[str, float],
) -> None:
    """Overwrite the parameters in place.

    tied: whether the input embedding is the head.
    """
    for name, parameter in parameters:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        if name.endswith("g_idx") or parameter.dim() == 0:
            continue  # an order, or a scale of a cache: vLLM has set it
        if not parameter.is_floating_point():
            parameter.copy_(integers(parameter, generator))
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        values = shaped(name, noise, tied=tied)
        for pattern, gain in gains.items():
            if re.search(pattern, name):
                values = values * gain
        parameter.copy_(values)


def integers(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """Quantised weights: any integer of the type, but int8's least one, which has no opposite.

    Of a packed parameter, each integer holds several weights.
    """
    limits = torch.iinfo(parameter.dtype)
    least = -127 if parameter.dtype == torch.int8 else limits.min
    return torch.randint(
        least, limits.max, parameter.shape, generator=generator, dtype=parameter.dtype
    )


def shaped(name: str, noise: Tensor, *, tied: bool) -> Tensor:
    """Turn standard normal `noise` of a parameter's shape into its values."""
    special = recurrent(name, noise)
    if special is not None:
        return special
    if "scale" in name.rpartition(".")[2]:
        return 1 + noise.abs() * 0.1
    if noise.dim() == 1:
        return noise * 0.1 if "bias" in name else 1 + noise * 0.1
    is_embedding = EMBEDDINGS.search(name) and not NOT_THE_INPUT.search(name)
    if HEADS.search(name) or (is_embedding and tied):
        return noise * HEAD_STD / math.sqrt(noise.shape[-1])
    if is_embedding or "wpe" in name or "embed_positions" in name:
        return noise
    loud = 3 if re.search(r"\bq_proj|\bq_b_proj", name) else 1
    return noise * loud / math.sqrt(noise.shape[-1])


def recurrent(name: str, noise: Tensor) -> Tensor | None:
    """The values of a parameter that sets how fast a state forgets. None for others.

    Decays are between 1 and 16, and steps between 0.001 and 0.1, as such models are initialised.
    """
    last = name.rpartition(".")[2]
    uniform = torch.special.ndtr(noise)
    if last == "A_log":
        return torch.log(1 + 15 * uniform)
    if last == "A":
        return -(1 + 15 * uniform)
    if last == "dt_bias" or name.endswith("dt_proj.bias"):
        step = torch.exp(uniform * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
        return step + torch.log(-torch.expm1(-step))  # softplus of it is the step
    if last == "D":
        return 1 + noise * 0.1
    return None

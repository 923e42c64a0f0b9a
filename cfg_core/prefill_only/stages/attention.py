"""Attention over packed sequences, as attention functions for transformers.

There are three backends, which compute the same:

    naive      a loop over sequences, written to be obviously right: the reference of the tests
    sdpa_runs  CPU: one dense scaled_dot_product_attention for each run of sequences of equal length
    varlen     CUDA: torch.nn.attention.varlen (flash attention with cu_seq_lens)

Each sequence attends only to itself. A token attends to tokens at a distance below
`sliding_window`; in causal layers, only to itself and to tokens before it. transformers adds 1 to
the window of bidirectional layers before it passes it, so the same rule holds for both kinds of
layer. Whatever else a model asks of attention (soft caps, sinks, biases) raises CompatibilityError;
it is never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from cfg_core.cpu_features import AMX_BFLOAT16, CPUINFO, features, read
from cfg_core.errors import CompatibilityError
from cfg_core.prefill_only.batch import AttentionPlan, EqualLengthRun

Backend = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, AttentionPlan, bool, float, int | None], torch.Tensor
]
"""(query [H, T, D], key and value [H_kv, T, D], plan, causal, scale, window or None) -> [T, H, D].

On the CPU there may be more rows after the last sequence (cpu_linear.rows_of). A backend must
return finite values for them.
"""

_PREFIX = "cfg_serve_"
QUERIES = 256
"""Queries of a text whose attention within a window is computed at a time."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask")


def install(name: str, backend: Backend) -> str:
    """Register `backend` with transformers; returns its name for `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    registered = _PREFIX + name
    AttentionInterface.register(registered, _adapted(backend))
    AttentionMaskInterface.register(registered, _no_mask)
    return registered


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Make no mask: there is no padding that transformers' masks would have to hide."""


def _adapted(backend: Backend) -> Callable[..., tuple[torch.Tensor, None]]:
    """`backend` with the signature that transformers calls.

    It takes query, key and value as [1, H, T, D], and returns [1, T, H, D] and no weights.
    """

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        plan: AttentionPlan | None = None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        assert plan is not None, "the model did not pass the plan on to its attention"
        for name in _UNSUPPORTED:
            if kwargs.get(name) is not None:
                raise CompatibilityError(
                    f"this model's attention uses {name}, which is not supported."
                )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = sliding_window if sliding_window and sliding_window < plan.max_length else None
        return backend(query[0], key[0], value[0], plan, causal, scale, window)[None], None

    return attention


# ---- naive ---------------------------------------------------------------------------------------


def naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    causal: bool,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute one sequence at a time, with scores and softmax in float32."""
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    outputs = []
    bounds = plan.cu_seq_lens.tolist()
    num_keys = [run.keys for run in plan.runs for _ in range(run.num)]
    for (start, end), keys in zip(pairwise(bounds), num_keys, strict=True):
        q, k, v = (
            query[:, start:end].float(),
            key[:, start:end].float(),
            value[:, start:end].float(),
        )
        scores = q @ k.transpose(1, 2) * scale
        visible = _visible(end - start, causal, window, query.device)
        visible[:, keys:] = False
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
    rest = query.new_zeros(query.shape[1] - bounds[-1], query.shape[0], query.shape[2])
    return torch.cat([*outputs, rest]).to(query.dtype)


def _visible(length: int, causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [length, length]: whether the token of the row attends to the token of the column."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    visible = torch.ones(length, length, dtype=torch.bool, device=device)
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    return visible


# ---- sdpa_runs -----------------------------------------------------------------------------------


def sdpa_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    causal: bool,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Compute one dense SDPA for each run, or several if it is longer than the window.

    With a mask over all T x T tokens it would be three times slower at 2,000 tokens.
    """
    heads, tokens, width = query.shape
    grouped = key.shape[0] != heads
    out = torch.empty(tokens, heads, width, dtype=query.dtype, device=query.device)
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and _float32_is_faster():
        query, key, value = query.float(), key.float(), value.float()
    last = plan.runs[-1]
    out[last.start + last.num * last.length :] = 0
    for run in plan.runs:
        rows = slice(run.start, run.start + run.num * run.length)
        parts = (_split(query, rows, run), _split(key, rows, run), _split(value, rows, run))
        if window is not None and run.length > window:
            _check_keys(run, window)
            result = _windowed(*parts, causal, window, scale=scale, enable_gqa=grouped)
        else:
            is_causal = causal and run.length > 1
            if run.keys < run.length:
                parts = (parts[0], parts[1][:, :, : run.keys], parts[2][:, :, : run.keys])
            result = F.scaled_dot_product_attention(
                *parts, is_causal=is_causal, scale=scale, enable_gqa=grouped
            )
        out[rows].view(run.num, run.length, heads, width).copy_(result.transpose(1, 2))
    return out


def _check_keys(run: EqualLengthRun, window: int) -> None:
    """Raise CompatibilityError if tokens may see nothing, as those at the end are hidden."""
    if run.keys < run.length:
        raise CompatibilityError(
            f"this model's queries have {run.length} tokens, and its window of {window} is shorter."
        )


@cache
def _float32_is_faster() -> bool:
    """Whether this CPU computes SDPA faster in float32 than in bfloat16, conversion included.

    On x86-64 without AMX it does: a third faster for texts of 12 tokens, and equally fast for those
    of 250. Other processors were not measured.
    """
    found = features(read(CPUINFO)) or frozenset()
    return "avx512_bf16" in found and AMX_BFLOAT16 not in found


def _split(packed: torch.Tensor, rows: slice, run: EqualLengthRun) -> torch.Tensor:
    """A view of [H, T, D] as [num, H, length, D]: the sequences of one run."""
    heads, _, width = packed.shape
    return packed[:, rows].reshape(heads, run.num, run.length, width).transpose(0, 1)


def _windowed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    window: int,
    **options: Any,
) -> torch.Tensor:
    """SDPA of [num, H, length, D] with a window, in time and memory linear in the length.

    Some queries at a time see the keys that any of them attends to. A mask over length x length
    would take a gigabyte for a text of 32,768 tokens.
    """
    length, results = query.shape[2], []
    for first in range(0, length, QUERIES):
        last = min(first + QUERIES, length)
        start, end = max(0, first - window + 1), min(length, last if causal else last + window - 1)
        mask = _band(last - first, end - start, first - start, causal, window, query.device)
        seen = (key[:, :, start:end], value[:, :, start:end])
        results.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last], *seen, attn_mask=mask, **options
            )
        )
    return torch.cat(results, 2)


@lru_cache(maxsize=16)
def _band(
    queries: int, keys: int, first: int, causal: bool, window: int, device: torch.device
) -> torch.Tensor:
    """bool [queries, keys]: whether a query attends to a key. Query i is at the place first + i."""
    places = torch.arange(first, first + queries, device=device)
    distance = places[:, None] - torch.arange(keys, device=device)[None, :]
    return (distance < window) & (distance >= (0 if causal else 1 - window))


# ---- varlen --------------------------------------------------------------------------------------


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    causal: bool,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Call torch's flash attention for packed sequences: bfloat16 or float16, on CUDA."""
    if plan.hides_tokens:  # which this kernel has no argument for
        return sdpa_runs(query, key, value, plan, causal, scale, window)
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None else window - 1
    result = varlen_attn(
        query.transpose(0, 1),
        key.transpose(0, 1),
        value.transpose(0, 1),
        plan.cu_seq_lens,
        plan.cu_seq_lens,
        plan.max_length,
        plan.max_length,
        scale=scale,
        window_size=(left, 0 if causal else left),
        enable_gqa=key.shape[0] != query.shape[0],
    )
    assert isinstance(result, torch.Tensor)
    return result

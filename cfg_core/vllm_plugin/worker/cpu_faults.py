"""Patches for the faults of vLLM's CPU build that our users would meet (vllm_patches.py).

Two more faults are avoided in v1.py: seeds of requests with chunked prompts, and speculation in
steps without drafts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext


def make_expand_batch_to_tokens(_stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces `rejection_sampler.expand_batch_to_tokens`.

    vLLM's CPU kernel writes into a converted copy of its output, and the copy is lost.
    """
    return expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Repeat each value of `x` [batch] for each draft of its request. Returns [drafts].

    cu_num_tokens: [batch], the number of drafts up to and including each request's.
    num_tokens: the number of all drafts.

    Values equal to `replace_from` become `replace_to`.
    """
    values = torch.where(x == replace_from, replace_to, x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return values.repeat_interleave(counts, output_size=num_tokens)


def make_bgmv_shrink(stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `bgmv_shrink`, the first half of a LoRA product, [tokens, rank].

    vLLM's function takes the index -1 (no adapter) for the last adapter, so a request without an
    adapter is computed with that one if other requests of its batch have adapters.
    """

    def bgmv_shrink(
        inputs: torch.Tensor,
        lora_b_weights: torch.Tensor,
        output_tensor: torch.Tensor,
        lora_indices_tensor: torch.Tensor,
        scaling: float = 1.0,
    ) -> None:
        stock(inputs, lora_b_weights, output_tensor, lora_indices_tensor, scaling)
        output_tensor[lora_indices_tensor < 0] = 0

    return bgmv_shrink


def takes_last_adapter(stock: Callable[..., None]) -> bool:
    """Whether `stock`, vLLM's bgmv_shrink, takes the index -1 for the last adapter."""
    output = torch.zeros(1, 1)
    stock(torch.ones(1, 1), torch.ones(1, 1, 1, 1), output, torch.tensor([-1]), 1.0)
    return bool(output.any())


def make_get_kv_cache_spec(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces `MambaMixer2.get_kv_cache_spec`.

    vLLM says that the layer can save its state inside of a chunk. Its CPU kernel returns only the
    last state of a chunk, so the first prompt that fills a block would end the engine, if prefix
    caching is on. Without that promise, the scheduler ends a chunk where a state is cached.
    """

    def get_kv_cache_spec(self: Any, *args: Any, **kwargs: Any) -> Any:
        spec = stock(self, *args, **kwargs)
        if not isinstance(spec, MambaSpec):
            return spec
        return replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    return get_kv_cache_spec


def make_spec_forward(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Replaces `gdn_attention._spec_forward`: gated delta nets over steps with drafts.

    vLLM's code for CPUs rolls the inputs of the convolution on by `1 + most drafts` tokens. If a
    sequence has fewer tokens than were accepted before, that ends the engine. So a shorter sequence
    is filled up behind its end. What is computed there is dropped, and what it leaves in the cache
    is behind all places from which the next step can begin.
    """

    def spec_forward(
        layer: Any,
        attn_metadata_i: GDNAttentionMetadata,
        mixed_qkv_spec: torch.Tensor,
        b_spec: torch.Tensor,
        a_spec: torch.Tensor,
        conv_buf: torch.Tensor,
        ssm_state: torch.Tensor,
        width: int,
        state_len: int,
    ) -> torch.Tensor:
        number, longest = attn_metadata_i.num_spec_decodes, state_len - width + 2
        assert attn_metadata_i.spec_query_start_loc is not None
        starts = attn_metadata_i.spec_query_start_loc[: number + 1]
        source, own = filled_up(starts, longest)
        ends = torch.arange(number + 1, dtype=starts.dtype) * longest
        filled = replace(attn_metadata_i, spec_query_start_loc=ends)
        rows = (mixed_qkv_spec[source], b_spec[source], a_spec[source])
        return stock(layer, filled, *rows, conv_buf, ssm_state, width, state_len)[own]

    return spec_forward


def filled_up(starts: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places that make sequences equally long, by repeating each one's last token.

    starts: [sequences + 1], where each begins and ends. None is empty.

    Returns the source of each new place, and whether it is the sequence's own, both
    [sequences * longest].
    """
    lengths, places = starts.diff().unsqueeze(1), torch.arange(longest)
    source = starts[:-1].unsqueeze(1) + places.minimum(lengths - 1)
    return source.flatten(), (places < lengths).flatten()


def make_run_fused_precopy(_stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `MambaSpecDecodeGPUContext.run_fused_precopy`, which needs a GPU.

    With drafts and prefix caching, a sequence whose step ends in another block than its last one
    takes its state along.
    """

    def run_fused_precopy(
        self: MambaSpecDecodeGPUContext,
        num_reqs: int,
        state_idx_gpu: torch.Tensor,
        src_col_gpu: torch.Tensor,
        token_bias_gpu: torch.Tensor,
        idx_mapping: torch.Tensor | None,
    ) -> None:
        if not self.is_initialized:
            return
        places = range(num_reqs) if idx_mapping is None else idx_mapping[:num_reqs].tolist()
        sources, targets = src_col_gpu.tolist(), state_idx_gpu.tolist()
        for place in places:
            if place >= 0 and sources[place] >= 0 and sources[place] != targets[place]:
                copy_states(self, place, sources[place], targets[place], int(token_bias_gpu[place]))

    return run_fused_precopy


def make_run_fused_postprocess(_stock: Callable[..., None]) -> Callable[..., None]:
    """Replaces `MambaSpecDecodeGPUContext.run_fused_postprocess`, which needs a GPU.

    With drafts and prefix caching, the state of the last whole block of accepted tokens goes into
    that block, where other sequences find it.
    """

    def run_fused_postprocess(
        self: MambaSpecDecodeGPUContext,
        num_reqs: int,
        num_accepted_tokens_gpu: torch.Tensor,
        mamba_state_idx_gpu: torch.Tensor,
        num_scheduled_tokens_gpu: torch.Tensor,
        num_computed_tokens_gpu: torch.Tensor,
        num_draft_tokens_gpu: torch.Tensor,
    ) -> None:
        if not self.is_initialized:
            return
        accepted = num_accepted_tokens_gpu[:num_reqs]
        self.num_accepted_tokens_out[:num_reqs] = accepted
        first = num_computed_tokens_gpu + num_scheduled_tokens_gpu - num_draft_tokens_gpu
        first = first[:num_reqs]  # tokens in the state of the step's first entry
        whole = (first + accepted - 1) // self.block_size * self.block_size
        for place in (whole >= first).nonzero().flatten().tolist():
            source, target = int(mamba_state_idx_gpu[place]), int(whole[place]) // self.block_size
            copy_states(self, place, source, target - 1, int(whole[place] - first[place]))
            if source == target - 1:
                self.num_accepted_tokens_out[place] = 1

    return run_fused_postprocess


def copy_states(
    context: MambaSpecDecodeGPUContext, request: int, source: int, target: int, tokens: int
) -> None:
    """Copy the states of all layers between two blocks of a request.

    source, target: columns of its row in the block tables.
    tokens: which state is meant: that so many tokens behind the first one of `source`. A recurrent
        state has a block for each token. The window of a convolution is shifted instead.
    """
    for state in range(context.num_states):
        row = int(context.block_table_ptrs[context.state_group_indices[state]])
        row += request * context.block_table_stride_req * ctypes.sizeof(ctypes.c_int32)
        width = int(context.state_conv_widths[state])
        blocks = (ctypes.c_int32 * (max(source + tokens, target) + 1)).from_address(row)
        base, stride = int(context.state_base_addrs[state]), int(context.state_block_strides[state])
        size = int(context.state_inner_sizes[state]) * int(context.state_elem_sizes[state])
        to = base + blocks[target] * stride
        if not width:
            ctypes.memmove(to, base + blocks[source + tokens] * stride, size)
            continue
        begin = base + blocks[source] * stride + tokens * size
        by_channel = is_conv_state_dim_first()
        for channel in range(int(context.state_dim_row_count[state]) if by_channel else 1):
            at = channel * int(context.state_dim_row_stride[state])
            ctypes.memmove(to + at, begin + at, (width - tokens) * size)


def returns_last_state_only(_stock: Callable[..., Any]) -> bool:
    """Whether vLLM's CPU kernel returns one state for two chunks of one sequence."""
    tokens, ends = torch.zeros(2, 1, 1), torch.tensor([0, 1, 2], dtype=torch.int32)
    states = mamba_ssm._mamba_chunk_scan_combined_fwd_cpu(
        tokens,
        torch.zeros(2, 1),
        torch.zeros(1),
        tokens,
        tokens,
        1,
        torch.zeros_like(tokens),
        cu_seqlens=ends[::2].contiguous(),
        cu_chunk_seqlens=ends,
        last_chunk_indices=torch.tensor([1]),
        return_intermediate_states=True,
    )
    return len(states) == 1
